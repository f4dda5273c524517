"""`pd launch`: starts runs as Slurm jobs or local processes, from copies of the code and the configuration."""

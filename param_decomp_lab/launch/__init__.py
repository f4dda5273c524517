"""`pd launch`: runs as jobs of Slurm, or as processes here, from copies of the code and the configuration."""

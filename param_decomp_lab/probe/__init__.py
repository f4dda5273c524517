"""What a run needs of GPUs that are not here (`pd probe`), and the best run that fits on them (`pd fit`)."""

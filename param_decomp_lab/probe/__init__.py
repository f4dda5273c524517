"""What a run would need on GPUs that are not here, for people: figures and pages."""

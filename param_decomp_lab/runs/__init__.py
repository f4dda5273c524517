"""A run on disk: its folder, its checkpoints, what it recorded, and how it is opened."""

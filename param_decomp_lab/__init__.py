"""The laboratory: everything with a file, a network, a terminal or a person at its other end."""

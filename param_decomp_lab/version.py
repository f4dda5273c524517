"""The version of the three packages: `pyproject.toml` reads it from here."""

__version__ = "0.2.0"

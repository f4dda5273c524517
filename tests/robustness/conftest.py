"""The tiny run of the laboratory's tests."""

from tests.lab.conftest import _programs_shared, shared_folder, tiny

__all__ = ["_programs_shared", "shared_folder", "tiny"]

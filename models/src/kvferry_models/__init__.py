"""Small trained models for trying kvferry: Hugging Face directories, found by name with `kvferry.find_model`."""

from pathlib import Path

__version__ = "0.1.0"

__all__ = ["NAMES", "directory"]

NAMES = ("byte-mtp", "byte-mtp-window", "byte-mtp-hybrid", "eagle3-smollm2")
"""The models of this distribution: see models/README.md in the repository."""


def directory(name: str) -> Path:
    """The Hugging Face directory of one model. Raises KeyError for a name that is not in NAMES."""
    if name not in NAMES:
        raise KeyError(name)
    return Path(__file__).parent / name

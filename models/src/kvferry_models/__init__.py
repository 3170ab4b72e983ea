"""Small trained models for trying kvferry, as Hugging Face directories. `kvferry serve NAME` finds them by name."""

from pathlib import Path

__version__ = "0.1.0"

__all__ = ["NAMES", "directory"]

NAMES = ("byte-mtp", "byte-mtp-window", "byte-mtp-hybrid", "eagle3-smollm2")
"""The names of the models; README.md describes each."""


def directory(name: str) -> Path:
    """Returns the Hugging Face directory of a model. Raises KeyError for a name that is not in NAMES."""
    if name not in NAMES:
        raise KeyError(name)
    return Path(__file__).parent / name

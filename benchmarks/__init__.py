"""Comparisons with other software, run from the repository. They are not part of the installed package."""

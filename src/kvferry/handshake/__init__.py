"""Decides whether two engines can share a cache, and if not, why not. No I/O."""

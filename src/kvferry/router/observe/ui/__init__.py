"""The dashboard at /ui: the fleet as a matrix, hand-offs in flight, one request's time line."""

__all__ = ["PAGE_PATHS"]

PAGE_PATHS = frozenset({"/ui", "/ui/app.js", "/ui/style.css"})
"""The page and its two files: the same for everybody, so they need no key."""

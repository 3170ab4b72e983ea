"""Numbers as people read them."""

__all__ = ["plural", "size"]


def plural(count: int, noun: str) -> str:
    """Returns "1 edge", "2 edges", "1,200 edges"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(num_bytes: float) -> str:
    """Returns bytes in the unit that fits: "640 B", "12.5 KiB", "3 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"

"""May these two engines share a cache, and if not, why not. No I/O."""

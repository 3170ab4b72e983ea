"""The memory of one rank's KV cache, and how each attention layer reads and writes its part."""

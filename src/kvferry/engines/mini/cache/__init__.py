"""The memory of one rank's KV cache: where everything lies in it, and how attention reads and writes it."""

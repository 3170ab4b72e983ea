"""Moves bytes and short messages between ranks: `nixl`, `memory`."""

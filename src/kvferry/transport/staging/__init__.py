"""Staged transfers: short runs are packed into one long buffer, moved, and unpacked."""

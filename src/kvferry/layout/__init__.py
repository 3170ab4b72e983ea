"""Describes where every byte of a cache is, and plans which bytes go where. Needs numpy only."""

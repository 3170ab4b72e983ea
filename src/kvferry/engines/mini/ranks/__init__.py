"""The ranks of one engine: one in this process, or each in a process of its own."""

"""Requests to workers: connections, deadlines, and how a worker's answer is read."""

"""Requests to workers: connections, attempts, deadlines, and how a worker's answer is read."""

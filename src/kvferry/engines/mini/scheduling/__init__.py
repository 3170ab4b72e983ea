"""Decides which requests run in the next step, and with which blocks. Numbers only: nothing here imports torch."""

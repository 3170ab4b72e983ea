"""kvferry carries the KV cache of a request from a prefill worker to a decode worker.

Importing this package loads no torch, nixl, zmq or web framework: each is imported where it is used.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]

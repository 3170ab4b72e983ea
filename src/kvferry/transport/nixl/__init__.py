"""The NIXL transport, its errors, its environment, and the doorbell that wakes a peer."""

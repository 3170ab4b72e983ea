"""Messages between engines: typed, versioned, and bounded. No sockets."""

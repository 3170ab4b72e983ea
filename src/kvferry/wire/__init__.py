"""Messages: typed, versioned, bounded. No socket."""

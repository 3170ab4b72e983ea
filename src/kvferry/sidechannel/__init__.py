"""The sockets on which engines shake hands: authenticated, bounded, one listener an engine."""

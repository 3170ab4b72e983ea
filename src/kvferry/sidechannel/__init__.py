"""The sockets on which engines shake hands: authenticated and bounded, with one listener per engine."""

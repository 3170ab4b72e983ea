"""The dashboard at /ui: the fleet as a matrix, hand-offs in flight, and one request's time line."""

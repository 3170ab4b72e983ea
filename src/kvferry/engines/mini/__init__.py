"""The embedded engine: small and real."""

"""Which workers there are, how each of them is, which pairs fit, and which worker serves a request."""

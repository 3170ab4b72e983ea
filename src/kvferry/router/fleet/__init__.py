"""The workers that the router knows: how each of them is, which pairs fit, and which worker serves a request."""

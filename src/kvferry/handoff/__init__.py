"""One request's move: states, leases, pull, push. State machines take events and the time, and answer with actions."""

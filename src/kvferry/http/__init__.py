"""What the worker's server and the router share of HTTP: error bodies, records, listening. Knows no engine."""

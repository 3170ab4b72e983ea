"""What the worker's server and the router share of HTTP: error bodies, records, listening. It knows no engine."""

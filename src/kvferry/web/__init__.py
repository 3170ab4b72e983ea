"""HTTP code that a worker's server and the router share: error bodies, records, listening. It knows no engine."""

"""The answer to the client: relayed from a worker, started early with prefill's first token, sent once."""

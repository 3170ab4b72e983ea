"""The channel between vLLM's scheduler and its workers that does not wait for an engine step."""

"""The OpenAI-compatible front door that pairs a prefill worker with a decode worker."""

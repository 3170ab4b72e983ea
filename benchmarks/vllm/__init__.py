"""`python -m benchmarks.vllm`: kvferry in vLLM, beside the connectors that vLLM has."""

"""`python -m benchmarks.vllm`: kvferry in vLLM, compared with the connectors that vLLM has."""

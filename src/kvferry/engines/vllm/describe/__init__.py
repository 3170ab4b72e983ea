"""vLLM's cache and configuration, described in kvferry's terms. No module here imports vllm."""

"""The plug-in for vLLM: `KVFerryConnector`. Importing this package alone does not load vllm."""

"""The plug-in for real vLLM: `KVFerryConnector`. Importing the package alone loads no vllm."""

"""The part of the plug-in that runs in vLLM's scheduler process."""

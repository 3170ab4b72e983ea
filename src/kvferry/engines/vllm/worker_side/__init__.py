"""The part of the plug-in that runs in each vLLM worker process."""

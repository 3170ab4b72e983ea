"""Converts GGUF files into Hugging Face directories."""

"""Models: configuration, weights, tokenizers, and the families that build a network."""

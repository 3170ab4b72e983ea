"""The arithmetic of one step on one rank: forward pass, attention over the paged cache, sampling. No connector here."""

"""One step's arithmetic on one rank: attention over the paged cache, forward pass, sampling. It knows no connector."""

"""`kvferry bench`: one module per benchmark. Comparisons with other software are in benchmarks/ in the repository."""

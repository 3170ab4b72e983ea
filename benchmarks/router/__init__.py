"""`python -m benchmarks.router`: what a router costs, beside other routers."""

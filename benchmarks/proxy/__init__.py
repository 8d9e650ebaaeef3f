"""What `benchmarks/router.py` is made of."""

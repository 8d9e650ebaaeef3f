"""What `benchmarks/chunking.py` is made of: a load, contenders on engines of their own, and the page."""

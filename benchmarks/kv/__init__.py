"""What `benchmarks/kvstore.py` measures: stores and loads of the store, of vLLM's file tier, and of one plain file."""

"""What `benchmarks/dspark.py` measures: engines that draft and one that does not, on the same prompts in turns."""

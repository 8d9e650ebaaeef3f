"""Parts of benchmarks/ascend_tilelang.py: inputs of the kernels, what they should give, and the released shapes."""

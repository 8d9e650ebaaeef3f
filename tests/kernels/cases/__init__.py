"""Launches of vLLM's kernels on random inputs, a module a kind of kernel; each has `CASES`, a tuple of `Case`."""

"""Parts of benchmarks/eplb.py: loads of experts, the rules that place them, and what comes of it."""

"""The KV cache service. Loads neither vLLM nor torch."""

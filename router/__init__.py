"""The standalone router. Loads neither vLLM nor torch."""

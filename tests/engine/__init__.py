"""The model inside vLLM's engine, in this process."""

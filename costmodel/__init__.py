"""cost(q, c): the predicted time of a prefill chunk. Loads neither vLLM nor torch."""

"""What `deepinfer doctor` looks at. Nothing here imports vLLM or torch: a subprocess does, and its end is a row."""

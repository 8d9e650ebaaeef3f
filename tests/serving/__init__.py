"""One `vllm serve` on a tiny checkpoint, asked over HTTP by every test of this package that needs a server."""

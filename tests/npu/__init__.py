"""A device named `npu` that is not there, a platform of vLLM for it, and what runs on it; see `device`."""

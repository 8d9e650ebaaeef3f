"""A little C for what PyTorch can only do in many tiny operations. Optional: where no compiler is, PyTorch does it."""

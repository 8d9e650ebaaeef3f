"""Triton kernels of vLLM's model runner V2, for tensors in host memory and machines without Triton.

One function a kernel, with the kernel's parameter names, and its effect on its arguments to the last bit of what it
stores in integers; `tests/kernels` compares each with the kernel itself. `registry` says which stands for which.
Arrays are small here (a row a request), so most of this is numpy: its calls cost a third of torch's.
"""

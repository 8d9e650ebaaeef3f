"""Hot operations of the portable V4.1 as TileLang kernels for Ascend 950. Importing it needs no TileLang, nor torch.

Each is one tile body with two sets of words (`dialect`): emitted as AscendC, and run on a CPU as C beside the portable
model's own operation, which is its reference.
"""

from deepinfer_vllm.platforms.tilelang.registration import register

__all__ = ["register"]

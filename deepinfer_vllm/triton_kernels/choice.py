"""Whether the portable model runs its Triton kernels."""

from deepinfer_vllm import envs


def chosen() -> bool:
    """What `DEEPINFER_VLLM_KERNELS` asks of a layer that is built now. ValueError where Triton is asked for and vLLM
    finds none for this device."""
    if envs.DEEPINFER_VLLM_KERNELS != "triton":
        return False
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ValueError(
            "DEEPINFER_VLLM_KERNELS=triton needs Triton and a device that it compiles for, and vLLM finds none here. "
            "Leave it out, or set it to torch"
        )
    return True

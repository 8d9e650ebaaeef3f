"""Out-of-tree platforms. vLLM calls these detectors early and in every process, so they import nothing heavy."""


def ascend_platform() -> str | None:
    """vLLM's `vllm.platform_plugins` hook: the platform class to use, or None for "not this platform". Never raises.

    Dormant: there is no Ascend platform here yet.
    """
    return None

"""Numbers on their way from a device, without waiting for it."""

import torch


class OnHost:
    """A copy of a tensor in the host's memory, complete once `ready`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self.tensor = tensor
        if tensor.device.type != "cpu":
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or bool(self._event.query())

"""Settings of EPLB for engines that prefill and engines that decode: those DeepSeek published of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """What one kind of engine wants."""

    redundant_per_rank: int
    """Expert slots beyond one for each expert, before rounding to whole slots a rank."""
    window_size: int
    """Steps whose loads are looked at."""
    step_interval: int
    """Steps from one rebalancing to the next."""

    def settings(self, experts: int, ranks: int) -> dict[str, int]:
        """vLLM's fields for a model of `experts` a layer over `ranks`; every rank gets the same number of slots."""
        redundant = self.redundant_per_rank * ranks
        redundant += -(experts + redundant) % ranks
        return {
            "num_redundant_experts": redundant,
            "window_size": self.window_size,
            "step_interval": self.step_interval,
        }


PRESETS = {"prefill": Preset(4, 100, 1_000), "decode": Preset(1, 1_000, 10_000)}

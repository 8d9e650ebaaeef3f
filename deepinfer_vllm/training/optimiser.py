"""AdamW over named parameters with one schedule: a short rise, then half a cosine down to a tenth."""

from __future__ import annotations

import math

import torch

from deepinfer_vllm.training.parameters import Weights

RISE = 0.05
LAST = 0.05
CLIP = 1.0


def schedule(done: float) -> float:
    """Share of the peak rate after the fraction `done` of all steps."""
    if done < RISE:
        return done / RISE
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (done - RISE) / (1 - RISE)))


class Optimiser:
    """Gradients of all parameters, clipped together, to steps. Matrices decay; biases, norms and tables do not."""

    def __init__(self, parameters: Weights, rate: float, steps: int) -> None:
        self.rate, self.steps, self.done = rate, steps, 0
        self.parameters = [p for name, p in parameters.items() if not name.endswith(("gate.bias", "gate.bias_vl"))]
        decayed = [p for n, p in parameters.items() if p.dim() == 2 and "embed" not in n]
        others = [p for p in self.parameters if not any(p is d for d in decayed)]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.98),
            eps=1e-9,
        )

    def step(self) -> None:
        """One step down the gradients that are there; they are gone after it."""
        self.done += 1
        for group in self.adam.param_groups:
            group["lr"] = self.rate * schedule(self.done / self.steps)
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

"""Steps of a server made of what the mid model's routers chose on single texts (record.py).

A running sequence is texts of one kind, one after another, each for as many steps as it takes; which kind, and for how
long, is the generator's process of topics. The loads of a step are sums of recorded loads of 128 tokens of one text:
the routing is the model's, the traffic made up. A text is met again and again, so a policy may learn the texts
themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experts.generator import Traffic, topics_of_sequences

RECORDED = Path(__file__).resolve().parent / "recorded.npz"


def loads(traffic: Traffic, steps: np.ndarray, seed: int) -> np.ndarray:
    """[len(steps), layers, experts] int32; `traffic.tokens`, `top`, `experts` and `topics` are the recording's."""
    from deepinfer_vllm.eplb import trace

    read = trace.read(RECORDED)
    kinds = np.unique(read.meta["kinds"], return_inverse=True)[1]
    texts = [np.flatnonzero(kinds == kind) for kind in range(kinds.max() + 1)]
    random = np.random.default_rng(seed)
    wanted, made = set(steps.tolist()), []
    text = np.zeros(traffic.sequences, np.int64)
    for step, (topic, new) in enumerate(topics_of_sequences(traffic, int(steps[-1]) + 1, random)):
        for kind, own in enumerate(texts):
            fresh = new & (topic == kind)
            text[fresh] = random.choice(own, fresh.sum())
        if step in wanted:
            times = np.bincount(text, minlength=len(kinds))
            made.append(np.tensordot(times, read.counts, 1))
    return np.stack(made).astype(np.int32)

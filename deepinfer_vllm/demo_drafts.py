"""The demo's drafts: a tiny pair that was trained, not random, served with DSpark, and what of its drafts stood."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path

import openai
from prometheus_client.parser import text_string_to_metric_families

SPECULATIVE_FLAGS = ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}')
PREFIX = "vllm:deepinfer_dspark_"
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Drafted:
    """What a server's metrics say of its drafts since it started."""

    verifications: int
    """Steps, counted for each request that had a token sampled."""
    verified: tuple[int, ...]
    """Drafts that were checked, by position."""
    accepted: tuple[int, ...]
    """Drafts that stood, by position."""

    @property
    def length(self) -> float:
        """Tokens that a request gets in a step."""
        return 1 + sum(self.accepted) / max(1, self.verifications)

    @classmethod
    def read(cls, url: str) -> Drafted:
        """From /metrics of the server at `url`. Raises OSError when it does not answer."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        counts: dict[str, dict[int, int]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                    position = int(sample.labels.get("position", 0))
                    name = sample.name[len(PREFIX) : -len("_total")]
                    counts.setdefault(name, {})[position] = int(sample.value)
        by_position = {name: tuple(of[p] for p in sorted(of)) for name, of in counts.items()}
        (verifications,) = by_position.get("verifications", (0,))
        return cls(verifications, by_position.get("verified_tokens", ()), by_position.get("accepted_tokens", ()))


def write_pair(directory: Path) -> Path:
    """The trained pair that comes with the package, as a checkpoint."""
    from deepinfer_vllm.training.shipped import write_trained

    return write_trained(directory, force=True).directory


def continue_texts(client: openai.OpenAI, model: str) -> list[tuple[str, str]]:
    """(beginning, continuation) of one text of each kind that the pair knows, none of which it has seen."""
    from deepinfer_vllm.training.prompts import held_out_prompts
    from deepinfer_vllm.training.texts import WORKLOADS

    texts = []
    for prompt in held_out_prompts(len(WORKLOADS)):
        answer = client.completions.create(
            model=model,
            prompt=prompt["prompt"],
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        texts.append((prompt["prompt"], answer.choices[0].text))
    return texts

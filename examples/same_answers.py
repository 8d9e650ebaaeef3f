"""Greedy answers that do not depend on what else is computed: each prompt alone, then all in one batch.

    deepinfer checkpoint trained /tmp/pair
    VLLM_BATCH_INVARIANT=1 python examples/same_answers.py /tmp/pair

Compares tokens and log-probabilities bit by bit, and exits with 1 where some differ: without the variable they may.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm import LLM, SamplingParams

PROMPTS = [
    "Let us count.\n46 + 7 = 53\n53 + 9 = 62\n62 - 8 =",
    "Once upon a time there was a lazy crow that lived with Lena near the mill.",
    "def count_lines(lines: list):\n    total = 0\n    for line in lines:\n        total +=",
    '{"table": "lines", "owner": "Carl", "step": 1, "limit": 50}\n',
]


def answer(output: Any) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities."""
    completion = output.outputs[0]
    return [
        (token, values[token].logprob) for token, values in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def main() -> int:
    llm = LLM(sys.argv[1], tokenizer_mode="deepseek_v41", enforce_eager=True, kv_cache_memory_bytes=2**28)
    sampling = SamplingParams(temperature=0, max_tokens=32, logprobs=0)
    alone = [answer(llm.generate(prompt, sampling, use_tqdm=False)[0]) for prompt in PROMPTS]
    together = [answer(output) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    same = [one == other for one, other in zip(alone, together, strict=True)]
    print(f"{sum(same)} of {len(PROMPTS)} answers are the same, bit by bit, alone and in a batch")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())

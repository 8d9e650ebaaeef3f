"""An engine that drafts, over a store and with a record of its drafts, until it is killed: `python drafting_engine.py
CHECKPOINT ROOT`.

Its record and its calibration are named by the environment. Says in a line each what it answers, again and again, what
the store has given it, and whether it is calibrated.
"""

import json
import sys
from pathlib import Path

from deepinfer_vllm.training.texts import text
from engine.kvstore import engine_on, forget, tier_of

PROMPTS = [text(workload, 400)[:120] for workload in ("records", "code", "prose", "sums")]
COUNT = 40


def main(checkpoint: Path, root: Path) -> None:
    from vllm import SamplingParams

    speculative = {"method": "dspark", "num_speculative_tokens": 5}
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    small = {"block_size": 16, "max_num_seqs": 8, "max_model_len": 256, "skip_tokenizer_init": False}
    with engine_on(checkpoint, root, speculative_config=speculative, **small) as backend:
        while True:
            outputs = backend._llm.generate(PROMPTS, params, use_tqdm=False)
            metrics = {metric.name: getattr(metric, "value", 0) for metric in backend._llm.get_metrics()}
            said = {
                "answers": [list(output.outputs[0].token_ids) for output in outputs],
                "hits": tier_of(backend)._store.stats().hits,
                "calibrated": metrics["vllm:deepinfer_dspark_calibrated"],
            }
            print("\n" + json.dumps(said), flush=True)
            forget(backend)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

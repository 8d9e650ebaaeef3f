"""Tokens a second of vLLM's model runner V2 on CPU, with our kernels, beside runner V1.

Each runner has a process of its own, and they take turns, round by round, so that what else the machine does meets
both. A ratio is the median over the rounds of V2's rate divided by V1's of the same round, by the clock and by the
processor time that was used; one thread computes, so on an idle machine they are the same.

Example: python benchmarks/runner_v2.py --rounds 9
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from child import Child, answer
from facts import facts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
TOKENS = {"llama": 200, "deepseek_v41": 40}
WORKLOADS = [(batch, temperature) for batch in (1, 8) for temperature in (0.0, 1.0)]
RUNNERS = {"V1": "0", "V2": "1"}


def write_models(directory: Path) -> dict[str, Path]:
    """A llama whose weights vLLM makes up, and a V4.1 of random weights."""
    from deepinfer_vllm.checkpoint.create import create

    llama = directory / "llama"
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps(LLAMA))
    create(directory / "deepseek_v41", name="tiny")
    return {"llama": llama, "deepseek_v41": directory / "deepseek_v41"}


def serve_rounds(model: str) -> None:
    """In a runner's process: answer each line "batch temperature tokens" with the seconds it took, by either time."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=128 << 20,
        block_size=32,
        max_num_seqs=8,
        max_model_len=512,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format="dummy" if model.endswith("llama") else "auto",
    )
    answer()
    for line in sys.stdin:
        batch, temperature, tokens = line.split()
        prompts = [{"prompt_token_ids": list(range(10 + i, 26 + i))} for i in range(int(batch))]
        sampling = SamplingParams(
            temperature=float(temperature), seed=0, max_tokens=int(tokens), ignore_eos=True, detokenize=False
        )
        started, used = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        answer(f"{time.perf_counter() - started} {time.process_time() - used}")


def start(version: str, model: Path) -> Child:
    """A runner's process."""
    environment = {
        "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[version],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    child = Child([__file__, "--serve", str(model)], environment)
    child.ready()
    return child


def rates(runner: Child, batch: int, temperature: float, tokens: int) -> dict[str, float]:
    """Tokens a second of one round, by clock and by processor time."""
    clock, processor = map(float, runner.ask(f"{batch} {temperature} {tokens}").split())
    return {"clock": batch * tokens / clock, "processor": batch * tokens / processor}


def measure(name: str, model: Path, rounds: int) -> list[dict[str, Any]]:
    """Every workload on one model: rates of all rounds, and their ratios."""
    runners = {version: start(version, model) for version in RUNNERS}
    results = []
    for batch, temperature in WORKLOADS:
        found: dict[str, list[dict[str, float]]] = {version: [] for version in runners}
        for number in range(rounds + 1):  # the first warms up
            for version, runner in runners.items():
                rate = rates(runner, batch, temperature, TOKENS[name])
                if number:
                    found[version].append(rate)
        pairs = list(zip(found["V1"], found["V2"], strict=True))
        ratio = {by: statistics.median(v2[by] / v1[by] for v1, v2 in pairs) for by in ("clock", "processor")}
        workload = {"model": name, "batch": batch, "temperature": temperature}
        results.append({**workload, "ratio": ratio, "tokens_per_second": found})
        medians = ", ".join(f"{v} {statistics.median(r['clock'] for r in rows):.0f}" for v, rows in found.items())
        ratios = ", ".join(f"{value:.2f} by {by}" for by, value in ratio.items())
        print(f"{name}, batch {batch}, temperature {temperature}: {medians} tokens/s; V2/V1 {ratios}", flush=True)
    for runner in runners.values():
        runner.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of every workload, after one that warms up; default: 9")
    out = Path(__file__).parent / "results" / "runner_v2.json"
    parser.add_argument("--out", type=Path, default=out, help="file for the numbers, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")
    if arguments.serve:
        serve_rounds(arguments.serve)
        return
    with tempfile.TemporaryDirectory() as directory:
        models = write_models(Path(directory))
        results = [row for name, model in models.items() for row in measure(name, model, arguments.rounds)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**facts(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

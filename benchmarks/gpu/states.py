"""What a model inside vLLM's engine computes for a prompt: mean streams between layers, hidden states, logits.

Of the last rows of each prompt only: with decoder-side replay others are not computed past the last KV source. Which
model it is, DEEPINFER_VLLM_MODEL says (portable or upstream).

Example: python benchmarks/gpu/states.py /tmp/wide /tmp/states/plain.safetensors --tokens 1 128
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import save_file

ROWS = 8
"""Last tokens of a prompt that are compared."""


def prompt_of(tokens: int, vocab: int) -> list[int]:
    """The same random ids for every implementation; below the special ones, which are last."""
    return torch.randint(
        vocab - vocab // 16, (tokens,), generator=torch.Generator("cpu").manual_seed(tokens), device="cpu"
    ).tolist()


class Recorder:
    """Wraps a model's `forward`: the last chunk's aux states and hidden states, by row from the end."""

    def __init__(self, model: Any, layers: int) -> None:
        self.model, self.found = model, {}
        self.count = 0  # tokens of the step that is recorded; a step has padding after them
        model.set_aux_hidden_state_layers(tuple(range(1, layers)))  # at the first, vLLM's own model gives none
        self._forward = model.forward
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        out = self._forward(*args, **kwargs)
        hidden, aux = out if isinstance(out, tuple) else (out, [])
        metadata = get_forward_context().attn_metadata
        if metadata:
            rows = slice(max(0, self.count - ROWS), self.count)
            self.found = {"hidden": hidden[rows].clone(), "aux": torch.stack([a[rows] for a in aux])}
        return hidden


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def main() -> None:
    """Run the prompts and save what was computed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 2048, 32768], help="lengths of the prompts")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a step; default: 2048")
    parser.add_argument("--kv-gb", type=float, default=12, help="KV cache, GiB; default: 12")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(
        str(args.checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        language_model_only=True,
        max_model_len=max(args.tokens) + 64,
        max_num_batched_tokens=args.chunk,
        max_num_seqs=4,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,  # what is free at the start, no more: there are others
        kv_cache_memory_bytes=int(args.kv_gb * 2**30),
    )
    model = runner_of(llm).model
    config = llm.llm_engine.vllm_config.model_config.hf_config
    recorder = Recorder(model, config.num_hidden_layers)
    print(f"{type(model).__module__}: ready after {time.monotonic() - start:.0f} s", flush=True)
    kept: dict[str, torch.Tensor] = {}
    for tokens in args.tokens:
        recorder.count = tokens % args.chunk or args.chunk  # of the last chunk
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        begin = time.monotonic()
        answer = llm.generate([{"prompt_token_ids": prompt_of(tokens, config.vocab_size)}], params, use_tqdm=False)
        seconds = time.monotonic() - begin
        found = recorder.found
        with torch.inference_mode():
            logits = model.compute_logits(found["hidden"].contiguous())
        kept[f"{tokens}.aux"] = found["aux"].float().cpu().contiguous()
        kept[f"{tokens}.hidden"] = found["hidden"].float().cpu().contiguous()
        kept[f"{tokens}.logits"] = logits.float().cpu().contiguous()
        kept[f"{tokens}.token"] = torch.tensor([answer[0].outputs[0].token_ids[0]])
        print(f"{tokens} tokens: {seconds:.2f} s, token {answer[0].outputs[0].token_ids}", flush=True)
    save_file(kept, args.out)


if __name__ == "__main__":
    main()

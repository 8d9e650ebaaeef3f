"""The measurements as JSON and as a table with the floors and the limits beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts import keep


@dataclass(frozen=True)
class Limit:
    """An upper bound that a value is held to; `aim` is the bound wished for."""

    name: str
    value: float
    must: float
    aim: float | None = None
    unit: str = "×"

    def verdict(self) -> str:
        """What is met."""
        if self.value > self.must:
            return "missed"
        if self.aim is None:
            return "met"
        return "met, aim too" if self.value <= self.aim else "met, aim missed"


def limits(results: dict[str, Any]) -> list[Limit]:
    """The bounds on what was measured, float32's; none but for `mid`, the preset that they were set for."""
    if results["preset"] != "mid":
        return []
    single = results["float32"]
    found = [
        Limit("decode at batch 1, times its floor", single["decode_1"]["times_floor"], 3.0, 2.0),
        Limit("prefill, times its floor", single["prefill"]["times_floor"], 2.5, 1.6),
        Limit("prefill with replay over prefill without", single["prefill"]["replay_share"], 0.65),
    ]
    if "growth" in single:
        tokens = single["growth"]["tokens"]
        name = f"prefill of {tokens} tokens over one of {tokens // 2}"
        found.append(Limit(name, single["growth"]["ratio"], 2.5))
    found.append(Limit("engine start on the tiny preset", results["start"]["seconds"], 25.0, unit=" s"))
    return found


def write(results: dict[str, Any], directory: Path, name: str) -> Path:
    """`name`.json and `name`.md in `directory`; the path of the latter."""
    results["limits"] = [
        {"name": x.name, "value": x.value, "must": x.must, "aim": x.aim, "verdict": x.verdict()}
        for x in limits(results)
    ]
    return keep(results, directory, name, table(results))


def table(results: dict[str, Any]) -> str:
    """A page in Markdown."""
    machine = results["machine"]
    lines = [
        f"# Speed of the `{results['preset']}` preset against its floors",
        "",
        f"`{results['command']}` at commit {results['commit']} on {results['date']}: {machine['cpu']}, "
        f"{results['float32']['threads']} threads, torch {machine['torch']}, vLLM {machine['vllm']}. "
        "Raw numbers are in the JSON file of the same name.",
        "",
        "Floors are measured in the same run, in turn with what stands against them. Decode: bytes of the weights that "
        "a step touches over the bandwidth of a streaming read. Prefill: products of the model's own shapes, attention "
        "and index scores included. Both through vLLM's engine.",
        "",
        "| dtype | what | tokens/s | floor, tokens/s | times floor |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for dtype in ("float32", "bfloat16"):
        if dtype in results:
            lines += [_row(dtype, f"decode, batch {n}", results[dtype][f"decode_{n}"]) for n in (1, 8)]
            prefill = results[dtype]["prefill"]
            what = f"prefill of {prefill['tokens']} tokens in chunks of {prefill['chunk_tokens']}"
            lines.append(_row(dtype, what, prefill))
            replay = f"{prefill['replay_tokens_per_second']:.1f}"
            lines.append(f"| {dtype} | the same with decoder-side replay | {replay} | | |")
    found = limits(results)
    lines += ["", "| limit | measured | must | aim | |", "| --- | ---: | ---: | ---: | --- |"] if found else []
    for limit in found:
        aim = "" if limit.aim is None else f"{limit.aim:g}{limit.unit}"
        row = f"{limit.value:.2f}{limit.unit} | {limit.must:g}{limit.unit} | {aim} | {limit.verdict()}"
        lines.append(f"| {limit.name} | {row} |")
    return "\n".join(lines) + "\n"


def _row(dtype: str, what: str, found: dict[str, Any]) -> str:
    numbers = f"{found['tokens_per_second']:.1f} | {found['floor_tokens_per_second']:.1f} | {found['times_floor']:.2f}"
    return f"| {dtype} | {what} | {numbers} |"

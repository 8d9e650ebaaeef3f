"""Made-up texts of six kinds, from nearly forced to nearly random: a small world that a tiny model can learn.

Each text draws its own cast first (names, keys, rules) and keeps to it, so that some of what follows can only be known
from far above: copies of a list, a table's column, a function's name. A text is a function of its workload, split and
number; texts of the two splits share the rules and never the draws.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from deepinfer_vllm.training import words

SPLITS = ("train", "held-out")


def text(workload: str, number: int, split: str = "held-out") -> str:
    """Text `number` of a workload, 600 to 1500 characters. Raises KeyError for an unknown workload."""
    return WORKLOADS[workload](Random(f"{split} {workload} {number}"))


def _records(rng: Random) -> str:
    """JSON lines of one table: keys and steps are fixed by its first line, a flag follows from a number."""
    kind, step, limit = rng.choice(words.NOUNS), rng.choice((1, 1, 2, 5)), rng.choice((30, 50, 70))
    owner, cities = rng.choice(words.NAMES), rng.sample(words.CITIES, 3)
    head = f'{{"table": "{kind}s", "owner": "{owner}", "step": {step}, "limit": {limit}}}\n'
    rows, number = [], rng.randint(1, 60)
    for _ in range(rng.randint(9, 13)):
        price = rng.randint(1, 9) * 10
        high = "true" if price > limit else "false"
        city = rng.choice(cities)
        rows.append(f'{{"{kind}": {number}, "city": "{city}", "price": {price}, "high": {high}, "owner": "{owner}"}}\n')
        number += step
    return head + "".join(rows)


def _code(rng: Random) -> str:
    """Functions of a few shapes, then calls of each in the order of their definitions."""
    verbs, nouns = rng.sample(words.FUNCTIONS, 4), rng.sample(words.NOUNS, 4)
    parts, calls = [], []
    for verb, noun in zip(verbs, nouns, strict=True):
        name, values = f"{verb}_{noun}s", rng.choice(("items", "values", f"{noun}s"))
        body = rng.choice(
            (
                f"    total = 0\n    for {noun} in {values}:\n        total += {noun}.size\n    return total\n",
                f"    for {noun} in {values}:\n        if {noun} is None:\n            return False\n    return True\n",
                f"    found = []\n    for {noun} in {values}:\n        if {noun}.name == key:\n"
                f"            found.append({noun})\n    return found\n",
                f"    if not {values}:\n        return None\n    return {values}[{rng.choice(('0', '-1', '1'))}]\n",
            )
        )
        key = ", key: str" if "key" in body else ""
        parts.append(f"def {name}({values}: list{key}):\n{body}\n")
        calls.append(f"print({name}({nouns[0]}s{', key' if key else ''}))\n")
    return "".join(parts) + "".join(calls)


def _prose(rng: Random) -> str:
    """A small story: who, where and what they say are drawn once, what they do again and again."""
    name, animal, colour = rng.choice(words.NAMES), rng.choice(words.ANIMALS), rng.choice(words.COLOURS)
    mood, places, saying = rng.choice(words.MOODS), rng.sample(words.PLACES, 3), rng.choice(words.SAYINGS)
    sentences = [f"Once upon a time there was a {mood} {colour} {animal} that lived with {name} near the {places[0]}."]
    for _ in range(rng.randint(12, 18)):
        place, verb, other = rng.choice(places), rng.choice(words.VERBS), rng.choice(words.MOODS)
        time, stranger = rng.choice(words.TIMES), rng.choice(words.ANIMALS)
        sentences.append(
            rng.choice(
                (
                    f"{time} the {mood} {animal} {verb} to the {place}.",
                    f'"{saying[0].upper()}{saying[1:]}," said {name} to the {animal}.',
                    f"{time} {name} {verb} over the {place} and saw a {other} {stranger}.",
                    f"The {animal} was {colour}, and the {place} was {other}.",
                    f"{name} did not mind; {saying}.",
                )
            )
        )
    return " ".join(sentences) + "\n"


def _sums(rng: Random) -> str:
    """A chain of sums: each begins with the result above."""
    value, lines = rng.randint(10, 60), ["Let us count.\n"]
    for _ in range(rng.randint(30, 45)):
        up = value < 20 or (value < 80 and rng.random() < 0.5)
        other = rng.randint(1, 9)
        result = value + other if up else value - other
        lines.append(f"{value} {'+' if up else '-'} {other} = {result}\n")
        value = result
    return "".join(lines) + f"The last number is {value}.\n"


def _lists(rng: Random) -> str:
    """A list of things with owners, then the same list again, backwards, and by questions."""
    things, names = rng.sample(words.THINGS, 8), rng.sample(words.NAMES, 8)
    pairs = list(zip(things, names, strict=True))
    lines = ["Who has what:\n"] + [f"{i}. {name}: {thing}\n" for i, (thing, name) in enumerate(pairs, 1)]
    lines += ["Once more:\n"] + [f"{i}. {name}: {thing}\n" for i, (thing, name) in enumerate(pairs, 1)]
    lines += ["Backwards:\n"] + [f"{i}. {pairs[i - 1][1]}: {pairs[i - 1][0]}\n" for i in range(8, 0, -1)]
    asked = rng.sample(pairs, 8)
    lines += [f"Who has the {thing}? {name} has the {thing}.\n" for thing, name in asked]
    return "".join(lines)


def _noise(rng: Random) -> str:
    """Words, numbers and letters without a plan."""
    pool = words.THINGS + words.PLACES + words.ANIMALS + words.VERBS + words.COLOURS + words.MOODS
    pieces = []
    for _ in range(rng.randint(110, 150)):
        draw = rng.random()
        if draw < 0.6:
            pieces.append(rng.choice(pool))
        elif draw < 0.8:
            pieces.append(str(rng.randint(0, 999)))
        else:
            pieces.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5))))
    return " ".join(pieces) + "\n"


WORKLOADS: dict[str, Callable[[Random], str]] = {
    "records": _records,
    "code": _code,
    "lists": _lists,
    "sums": _sums,
    "prose": _prose,
    "noise": _noise,
}
"""By name, the more predictable first."""

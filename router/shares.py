"""How many engines each group should have, and which groups have engines of their own. Pure arithmetic."""

from collections.abc import Sequence


def shares(demand: Sequence[float], engines: int) -> list[float]:
    """Of `engines`, each group's part by demand, at least one; sums to `engines`. Needs engines >= groups >= 1."""
    total = sum(demand)
    if total <= 0:
        return [engines / len(demand)] * len(demand)
    held: set[int] = set()  # groups whose part by demand is less than one
    while True:
        rest = sum(d for g, d in enumerate(demand) if g not in held)
        scale = (engines - len(held)) / rest if rest > 0 else 0.0
        small = {g for g, d in enumerate(demand) if g not in held and d * scale < 1.0}
        if not small:
            break
        held |= small
        if len(held) == len(demand):
            return _spread(demand, engines)
    return [1.0 if g in held else d * scale for g, d in enumerate(demand)]


def _spread(demand: Sequence[float], engines: int) -> list[float]:
    """One each, and what is left by demand: rounding has taken all groups for small."""
    total = sum(demand)
    return [1.0 + (engines - len(demand)) * d / total for d in demand]


def whole(parts: Sequence[float]) -> list[int]:
    """`parts`, which sum to a whole number, as whole numbers of the same sum, each at least one: largest remainders."""
    counts = [max(1, int(part)) for part in parts]
    left = round(sum(parts)) - sum(counts)
    order = sorted(range(len(parts)), key=lambda g: (counts[g] - parts[g], g))
    for g in order[: max(0, left)]:
        counts[g] += 1
    while sum(counts) > round(sum(parts)):  # a part just below a whole number was raised to one
        counts[max(range(len(counts)), key=lambda g: (counts[g] - parts[g], counts[g]))] -= 1
    return counts


def blocks(active: Sequence[bool], demand: Sequence[float], engines: int) -> list[list[int]]:
    """Neighbouring groups that share engines, at most `engines` blocks, as lists of group numbers.

    A group without demand goes with the next longer one that has some, else with the next shorter. With more groups
    than engines, the neighbours with the least demand together are joined, longer ones first. Needs engines >= 1.
    """
    result: list[list[int]] = []
    pending: list[int] = []
    for g, is_active in enumerate(active):
        pending.append(g)
        if is_active:
            result.append(pending)
            pending = []
    if not result:
        return [pending]
    result[-1] += pending
    loads = [sum(demand[g] for g in block) for block in result]
    while len(result) > engines:
        i = min(range(len(result) - 1), key=lambda i: (loads[i] + loads[i + 1], -i))
        result[i : i + 2] = [result[i] + result[i + 1]]
        loads[i : i + 2] = [loads[i] + loads[i + 1]]
    return result

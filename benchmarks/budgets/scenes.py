"""What is replayed, by name."""

from __future__ import annotations

from dataclasses import replace

from budgets.curves import Curve, captured, fitted
from budgets.replay import Scene

LEVELS = (1, 2, 4, 8, 16, 32, 60, 80, 96, 128, 192, 256)
"""Concurrencies at which all rules are replayed; `every.py` has the others."""
PUBLISHED = (16, 60, 96)
EVERYWHERE = ("padded", "knee at 60")
"""Costs at which every concurrency is replayed: what was published, as engines pad it, and where drafting must end."""
CHANGES = (16, 60, 256)


def curves() -> dict[str, Curve]:
    """Costs that a sweep goes over. The last two are of nobody's service: there, drafting must end or be rare."""
    drafts, tokens = fitted("drafts"), fitted("tokens")
    return {
        "smooth": Curve(*drafts),
        "padded": Curve(*drafts, padded=captured()),
        "padded to sixes": Curve(*drafts, padded=tuple(range(6, 513, 6))),
        "reading tokens": Curve(*tokens),
        "gain 4 % at 60": Curve(*fitted("drafts", 0.04)),
        "gain 7 % at 60": Curve(*fitted("drafts", 0.07)),
        "experts load one by one": Curve(*drafts, experts=0.7),
        "knee at 60": Curve(60.0, drafts[1]),
    }


def headline(seeds: int, steps: int, levels: tuple[int, ...]) -> dict[str, Scene]:
    """At the concurrencies of DeepSeek's statements."""
    return {
        f"{name}, {requests} sequences, seed {seed}": Scene(
            requests, reading="tokens" if "tokens" in name else "drafts", curve=curve, steps=steps, seed=seed
        )
        for name, curve in curves().items()
        if name in ("smooth", "reading tokens")
        for requests in levels
        for seed in range(1, seeds + 1)
    }


def recorded(steps: int, levels: tuple[int, ...]) -> dict[str, Scene]:
    """What an engine recorded, over costs without and with padding."""
    return {
        f"recorded texts, {name}, {requests} sequences": Scene(
            requests, curve=curves()[name], recorded=True, steps=steps * (2 if requests <= 16 else 1)
        )
        for name in ("smooth", "padded")
        for requests in levels
    }


def sweep(levels: tuple[int, ...], steps: int) -> dict[str, Scene]:
    """Every curve at these concurrencies; few requests for longer, as their steps say less."""
    return {
        f"{name}, {requests} sequences": Scene(
            requests,
            reading="tokens" if "tokens" in name else "drafts",
            curve=curve,
            steps=steps * (2 if requests <= 16 else 1),
        )
        for name, curve in curves().items()
        for requests in levels
    }


def changes(steps: int) -> dict[str, Scene]:
    """What is wrong, or becomes so after a third of the steps."""
    plain = curves()["padded"]
    scenes = {
        "nothing": Scene(1, curve=plain),
        "all 1.5 times slower": Scene(1, curve=plain, later=replace(plain, scale=1.5)),
        "knee 1.6 times earlier": Scene(1, curve=plain, later=replace(plain, knee=plain.knee / 1.6)),
        "knee 1.6 times later": Scene(1, curve=plain, later=replace(plain, knee=plain.knee * 1.6)),
        "knee 6 times earlier": Scene(1, curve=plain, later=replace(plain, knee=plain.knee / 6)),
        "128K of context, measured without": Scene(1, curve=plain, context=2.0**17),
        "128K of context, measured with and without": Scene(
            1, curve=plain, context=2.0**17, measured_at=(0.0, 2.0**17)
        ),
        "1M of context, measured without": Scene(1, curve=plain, context=2.0**20),
        "overconfident, not calibrated": Scene(1, curve=plain, raw=True),
        "texts harder for a while": Scene(1, curve=plain, harder=4.0),
    }
    return {
        f"{name}, {requests} sequences": replace(scene, requests=requests, steps=steps)
        for name, scene in scenes.items()
        for requests in CHANGES
    }

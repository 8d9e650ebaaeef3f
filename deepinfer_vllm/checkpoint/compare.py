"""Comparisons of computed with golden values; each gives a row: what, measured, limit, whether it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table. `measured` may be at most `limit`, or at least it where `at_least` is set."""

    where: str  # the prompt
    what: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """False also for NaN, which compares as neither."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    @property
    def strain(self) -> float:
        """How much of the limit is used up, for finding the worst of several rows: above 1 is outside."""
        if self.ok and self.measured == self.limit:
            return 0.0 if self.limit == 0 else 1.0
        part, whole = (self.limit, self.measured) if self.at_least else (self.measured, self.limit)
        return part / whole if whole > 0 and math.isfinite(part) else math.inf


def max_abs(where: str, what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> Row:
    """Largest absolute difference; infinite when the shapes differ."""
    if got.shape != want.shape:
        return Row(where, f"{what}: shape {list(got.shape)}, golden {list(want.shape)}", float("inf"), limit)
    return Row(where, f"{what}, max abs", float((got.double() - want.double()).abs().max()), limit)


def rel_rms(where: str, what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> Row:
    """Root mean square of the difference over the standard deviation of the golden rows."""
    if got.shape != want.shape:
        return Row(where, f"{what}: shape {list(got.shape)}, golden {list(want.shape)}", float("inf"), limit)
    got, want = got.double(), want.double()
    return Row(where, f"{what}, rel rms", float((got - want).square().mean().sqrt() / want.std()), limit)


def hidden_states(where: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> list[Row]:
    """One row for each of the L + 2 stages of [L + 2, T, D]: norm of the difference over the norm."""
    if got.shape != want.shape:
        return [max_abs(where, "hidden states", got, want, limit)]
    got, want = got.double(), want.double()
    rel = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    names = ["embedding", *(f"layer {i}" for i in range(len(rel) - 2)), "final norm"]
    return [Row(where, f"hidden, {name}, rel", float(value), limit) for name, value in zip(names, rel, strict=True)]


def greedy(where: str, got: Sequence[int], want: torch.Tensor) -> Row:
    """How many tokens of the greedy continuation differ, missing ones included."""
    expected = want.tolist()
    same = sum(a == b for a, b in zip(got, expected, strict=False))
    return Row(where, f"greedy, of {len(expected)} tokens differing", max(len(expected), len(got)) - same, 0)


def argmax_exact(where: str, got: torch.Tensor, want: torch.Tensor, margin: torch.Tensor, at_least: float) -> Row:
    """Positions whose argmax differs although the golden margin is wide."""
    wide = margin >= at_least
    differing = int((got.cpu()[wide] != want[wide]).sum())
    return Row(where, f"argmax, of {int(wide.sum())} clear positions differing", differing, 0)


def argmax_agreement(where: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> Row:
    """Share of positions with the same argmax."""
    return Row(where, "argmax, share equal", float((got.cpu() == want).double().mean()), limit, at_least=True)


def selections(where: str, what: str, got: Sequence[set[int]], want: Sequence[set[int]], limit: float) -> Row:
    """Share of rows whose chosen sets differ."""
    if len(got) != len(want):
        return Row(where, f"{what}: {len(got)} rows, golden {len(want)}", 1.0, limit)
    differing = sum(a != b for a, b in zip(got, want, strict=True))
    return Row(where, f"{what}, share of rows differing", differing / max(len(want), 1), limit)


def padded_sets(rows: torch.Tensor) -> list[set[int]]:
    """int [T, K] padded with -1 -> the set of each row."""
    return [set(row) - {-1} for row in rows.tolist()]


def flagged_sets(flags: torch.Tensor) -> list[set[int]]:
    """0/1 [T, N] -> the columns that are set in each row."""
    return [set(torch.nonzero(row).flatten().tolist()) for row in flags]

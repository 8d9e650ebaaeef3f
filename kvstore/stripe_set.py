"""The roots of an erasure-coded store: each knows which set it belongs to, and its number there.

So roots in another order, or of another store, are found out before a byte is read through them.
"""

import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_kvstore.code import Code
from deepinfer_kvstore.errors import StoreConfigError
from deepinfer_kvstore.whole_file import write_whole

STRIPE_FILE = "stripe.json"
MAX_STRIPE_BYTES = 4096
_FORMAT = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stripe:
    """What the `stripe.json` of a root says."""

    set: int
    """u64, drawn when the set was made."""
    index: int
    """Number of the root in the set."""
    data: int
    parity: int
    format: int = _FORMAT

    @property
    def code(self) -> Code:
        """Of its set."""
        return Code(self.data, self.parity)

    @classmethod
    def read(cls, root: Path) -> "Stripe | None":
        """None: the root is away, or no root of a set.

        Raises:
            StoreConfigError: the file is there and not a stripe.json.
        """
        path = root / STRIPE_FILE
        try:
            with path.open("rb") as file:
                packed = file.read(MAX_STRIPE_BYTES)
        except OSError:
            return None
        try:
            found: dict[str, Any] = json.loads(packed)
            stripe = cls(**found)
            numbers = (stripe.set, stripe.index, stripe.data, stripe.parity)
            if stripe.format != _FORMAT or not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
                raise ValueError("numbers out of range, or of another version")
            Code.parse(str(stripe.code))
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreConfigError(f"{path} is not a {STRIPE_FILE} ({error}): rebuild this root") from error
        return stripe

    def write(self, root: Path) -> None:
        """Make `root` a root of the set; the first of several writers stays.

        Raises:
            FileExistsError: it is one already.
        """
        write_whole(root / STRIPE_FILE, json.dumps(asdict(self)) + "\n", replace=False)


@dataclass(frozen=True)
class StripeSet:
    """A set of roots, of which some may be lost."""

    id: int
    code: Code
    roots: tuple[Path, ...]
    """All, in their order."""
    present: tuple[bool, ...]

    @property
    def present_roots(self) -> list[Path]:
        """Those that are there."""
        return [root for root, present in zip(self.roots, self.present, strict=True) if present]

    @property
    def control_roots(self) -> list[Path]:
        """Those of the first m + 1 that are there: they hold replicas of the journals and leases."""
        first = self.roots[: self.code.parity + 1]
        return [root for root in self.present_roots if root in first]


def open_set(roots: Sequence[Path], code: Code, *, create: bool) -> StripeSet:
    """The set that `roots` are, in their order; made of them if all are empty directories and `create`.

    A root that is away, or is an empty directory, is lost; that is logged.

    Raises:
        StoreConfigError: not k + m roots, in another order, of several sets, or more than m lost.
    """
    if len(roots) != code.shards:
        raise StoreConfigError(f"{len(roots)} roots for erasure code {code}: it needs {code.shards}")
    if len({root.resolve() for root in roots}) < len(roots):
        raise StoreConfigError(f"roots {', '.join(map(str, roots))}: one is named twice, each shard needs its own")
    stripes = [Stripe.read(root) for root in roots]
    if create and _is_new(roots, stripes):
        stripes = _create(roots, code, stripes)
    known = [stripe for stripe in stripes if stripe]
    if not known:
        raise StoreConfigError(
            f"none of the roots {', '.join(map(str, roots))} has a {STRIPE_FILE}: mount them, or name empty directories"
        )
    ids = [stripe.set for stripe in known]
    common = max(ids, key=ids.count)
    for number, (root, stripe) in enumerate(zip(roots, stripes, strict=True)):
        if stripe is None:
            continue
        if stripe.set != common:
            raise StoreConfigError(
                f"root {root} is of stripe set {stripe.set:016x}, the others of {common:016x}: fix roots"
            )
        if stripe.code != code:
            raise StoreConfigError(
                f"root {root} is of a {stripe.code} set, not {code}: set ec to what it was made with"
            )
        if stripe.index != number:
            raise StoreConfigError(
                f"root {root} is number {stripe.index} of its set (counted from 0), named as number {number}:"
                " name the roots in the order in which the set was made"
            )
    lost = [str(root) for root, stripe in zip(roots, stripes, strict=True) if stripe is None]
    if len(lost) > code.parity:
        raise StoreConfigError(
            f"{len(lost)} of {code.shards} roots are lost ({', '.join(lost)}), {code} survives {code.parity}:"
            " mount them"
        )
    if lost:
        _log.warning("%s lost, the others serve: mount it, or run deepinfer kvstore rebuild", ", ".join(lost))
    return StripeSet(common, code, tuple(roots), tuple(stripe is not None for stripe in stripes))


def existing_set(roots: Sequence[Path]) -> StripeSet | None:
    """The set that `roots` are, in their order; None for one root that is of no set.

    Raises:
        StoreConfigError: several roots of no set, or not all of one.
    """
    stripes = [Stripe.read(root) for root in roots]
    known = next(filter(None, stripes), None)
    if known:
        return open_set(roots, known.code, create=False)
    if len(roots) > 1:
        raise StoreConfigError(f"roots {', '.join(map(str, roots))} are no erasure-coded store: name one root")
    return None


def _is_new(roots: Sequence[Path], stripes: Sequence[Stripe | None]) -> bool:
    """Whether nothing is in the roots yet, but for what a creation that was cut short has left."""
    try:
        names = {name for root in roots for name in os.listdir(root)}
    except OSError:
        return False
    others = names - {STRIPE_FILE, "lost+found"}
    return not all(stripes) and all(name.startswith(f".{STRIPE_FILE}-") for name in others)


def _create(roots: Sequence[Path], code: Code, stripes: Sequence[Stripe | None]) -> list[Stripe | None]:
    """Number the roots that are not numbered. Processes that do so at once agree through the first root."""
    wanted = next((stripe.set for stripe in stripes if stripe), secrets.randbits(64))
    for number, root in enumerate(roots):
        try:
            Stripe(wanted, number, code.data, code.parity).write(root)
        except FileExistsError:
            if found := Stripe.read(root):
                wanted = found.set if number == 0 else wanted
        except OSError as error:
            raise StoreConfigError(f"root {root} cannot be written ({error}): check owner, mount and space") from error
    return [Stripe.read(root) for root in roots]

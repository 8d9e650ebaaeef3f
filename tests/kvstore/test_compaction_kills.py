"""Writers that die at any step of appending and compacting, while others act between any two steps.

A seed is a history. What landed on disk is known here to the record, so nothing is said twice to make up for a death.
"""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from blocks import NAMESPACE, delete, put, touch

from deepinfer_kvstore import compaction, follower, journal_set
from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.index import Index, Totals
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.record import RECORD_BYTES, Op, Record, unpack_record

WRITERS = range(3)
NODES = {-1: "node-0", -2: "node-0", -3: "node-1"}
"""Processes that follow the journals, and their indexes. Writers look into the first."""
DEATHS, FILES = 8, 24
"""A history ends after so many deaths of writers, the last, and files that compaction removed."""
pwrite = os.pwrite


class Killed(BaseException):
    """A process is gone: `writer`, and who acted in the midst of its step."""

    def __init__(self, writer: int) -> None:
        self.writer = writer


class History:
    """Three writers and their nodes on one directory."""

    def __init__(self, parent: Path, seed: int) -> None:
        self.chance = Random(seed)
        self.parent = parent
        self.journals = parent / "journals"
        self.journals.mkdir()
        self.said: list[Record] = []
        self.alive: dict[int, JournalWriter] = {}
        self.epochs = dict.fromkeys(WRITERS, 0)
        self.acting: list[int] = []
        self.taken: list[int] = []
        self.deaths = self.removed = 0
        self.nodes = {node: (self.index(name), self.journal_set()) for node, name in NODES.items()}

    def index(self, name: str) -> Index:
        return Index.open(self.parent / name, NAMESPACE)

    def journal_set(self) -> JournalSet:
        return JournalSet([self.journals], NAMESPACE)

    def step(self) -> None:
        """Before each step that one who acts does on the disk: others act, and it may die."""
        if len(self.acting) < 3 and self.chance.random() < 0.3:
            self.act()
        if self.deaths < DEATHS and self.chance.random() < 0.01:
            raise Killed(self.acting[-1])

    def act(self) -> None:
        what = self.chance.random()
        if what < 0.3:
            node = self.chance.choice(list(NODES))
            if node not in self.acting:
                index, journals = self.nodes[node]
                if what < 0.05:
                    index.begin_anew()
                self.do(node, lambda: index.sync(journals))
        else:
            number = self.chance.choice(WRITERS)
            journal = self.alive.get(number)
            if journal is None:
                if number not in self.acting + self.taken:
                    self.do(number, lambda: self.start(number))
            elif what < 0.4 and number not in self.acting:
                self.do(number, lambda: self.compact(journal))
            elif not journal._lock.locked():
                self.do(number, lambda: self.say(journal))

    def do(self, actor: int, deed: Callable[[], object]) -> None:
        inner = actor in self.acting  # a thread of it compacts meanwhile, and dies with it
        self.acting.append(actor)
        try:
            deed()
        except Killed as death:
            self.bury(actor)
            if inner or death.writer != actor:
                raise
        finally:
            self.acting.pop()

    def bury(self, actor: int) -> None:
        if actor in NODES:
            before = self.nodes[actor]
            self.nodes[actor] = self.index(NODES[actor]), self.journal_set()
            close(*before)
        journal = self.alive.pop(actor, None)
        for file in journal._files if journal else []:
            os.close(file)
        self.deaths += bool(journal)

    def start(self, number: int) -> None:
        self.epochs[number] += 1
        self.alive[number] = JournalWriter([self.journals], number, self.epochs[number], NAMESPACE)

    def say(self, journal: JournalWriter) -> None:
        writer, chance = journal.name.writer, self.chance
        seen = self.nodes[-1][0].entries()
        records = []
        for _ in range(chance.randint(1, 8)):
            generation = (self.epochs[writer] << 32) + len(self.said) + len(records) + 1
            created = chance.randint(1, 1000)
            slot = chance.randrange(6)
            life = put(chance.randrange(12), slot=slot, writer=writer, generation=generation, created=created)
            begun = [life] * 4
            if seen and chance.random() < 0.4:
                life, begun = Record(Op.PUT, *chance.choice(seen)), []
            used = touch(life, chance.randint(1, 1000 + 2 * len(self.said)), chance.randrange(3))
            records.append(chance.choice([*begun, *[used] * 4, delete(life)]))
        path, before = self.journals / str(journal.name), (1 + journal.records) * RECORD_BYTES
        try:
            journal.append(records)
        finally:
            landed = path.read_bytes()[before:]
            for at in range(0, len(landed) - RECORD_BYTES + 1, RECORD_BYTES):
                record = unpack_record(landed[at : at + RECORD_BYTES])
                assert record
                self.said.append(record)

    def compact(self, journal: JournalWriter) -> None:
        dead = [number for number in WRITERS if number not in [*self.alive, *self.acting, *self.taken]]
        dead = self.chance.choice([[], dead])
        before = list(self.taken)
        self.taken += dead
        try:
            self.removed += Compactor(journal, self.nodes[-1][0]).compact(dead).files
        finally:
            self.taken = before

    def write(self, file: int, data: memoryview, offset: int) -> int:
        """`os.pwrite`; of one who dies in it, a part."""
        try:
            self.step()
        except Killed:
            pwrite(file, data[: self.chance.randrange(len(data))], offset)
            if not offset:  # the header of a new file, of which only the dead knew
                os.close(file)
            raise
        return pwrite(file, data, offset)

    def stepping(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, a step where it is done to a journal."""

        def call(file: int | Path, *arguments: Any, **options: Any) -> Any:
            if isinstance(file, int) or file.suffix == ".log":
                self.step()
            return real(file, *arguments, **options)

        return call


def close(index: Index, journals: JournalSet) -> None:
    index.close()
    journals.close()


def folded(index: Index, journals: JournalSet) -> tuple[list[tuple[Key, Entry]], Totals, list[object]]:
    """Blocks, sums, and what is known of each slot, deleted ones too."""
    index.sync(journals)
    found = index.entries(), index.totals(), [index.lives_of(writer, 0) for writer in WRITERS]
    close(index, journals)
    return found


@pytest.mark.parametrize("seed", range(24))
def test_whoever_dies_in_whatever_step_all_agree_on_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    history = History(tmp_path, seed)
    monkeypatch.setattr(compaction, "_BATCH", 4)
    monkeypatch.setattr(follower, "TRANSACTION_RECORDS", 16)
    monkeypatch.setattr(journal_set, "SCAN_BYTES", 4 * RECORD_BYTES)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", history.write)
        for name in ("open", "pread"):
            disk.setattr(os, name, history.stepping(getattr(os, name)))
        disk.setattr(Path, "unlink", history.stepping(Path.unlink))
        while history.deaths < DEATHS or history.removed < FILES:
            history.act()
    (tmp_path / "plain").mkdir()
    plain = JournalWriter([tmp_path / "plain"], 9, 1, NAMESPACE)
    plain.append(history.said)
    plain.close()
    expected = folded(history.index("expected"), JournalSet([tmp_path / "plain"], NAMESPACE))
    assert any(expected[2])
    assert folded(history.index("fresh"), history.journal_set()) == expected
    for index, journals in history.nodes.values():
        journals.close()
        assert folded(index, history.journal_set()) == expected
    for writer in list(history.alive):
        history.bury(writer)

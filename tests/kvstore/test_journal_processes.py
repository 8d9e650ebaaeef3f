"""Writers that append and compact, and nodes that follow them, each a process that may be killed at any moment."""

import random
import subprocess
import sys
import time
from pathlib import Path

from blocks import NAMESPACE

from deepinfer_kvstore.entry import Entry
from deepinfer_kvstore.index import Index, Totals
from deepinfer_kvstore.journal_set import JournalSet
from deepinfer_kvstore.keys import Key
from deepinfer_kvstore.record import RECORD_BYTES

WRITER = """
import itertools, os, random, sys
from pathlib import Path
from blocks import NAMESPACE, delete, put, touch
from deepinfer_kvstore.compaction import Compactor
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal import JournalWriter
from deepinfer_kvstore.journal_set import JournalSet, scan
root, writer, epoch = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(1000 * writer + epoch)
plain = JournalWriter([root / "plain"], writer, epoch, NAMESPACE)
compacted = JournalWriter([root / "compacted"], writer, epoch, NAMESPACE)
for earlier in range(1, epoch):  # each may have been killed between its two appends
    try:
        said = [record for records in scan([root / "plain"], f"{writer:08x}.{earlier:08x}.log") for record in records]
    except FileNotFoundError:  # killed before it made one
        continue
    plain.append(said[-8:])
    compacted.append(said[-8:])
index = Index.open(root / "node-0", NAMESPACE)
journals = JournalSet([root / "compacted"], NAMESPACE)
compactor = Compactor(compacted, index)
parent = os.getppid()
for turn in itertools.count():
    if (root / "stop").exists() or os.getppid() != parent:
        break
    records = []
    for place in range(chance.randint(1, 8)):
        number, owner = chance.randrange(40), chance.choice([writer, chance.randrange(3)])
        life = put(number, slot=chance.randrange(20), writer=owner, generation=(epoch << 32) + 8 * turn + place)
        if owner == writer:
            records.append(chance.choice([life, life, touch(life, 2000 + turn, chance.randrange(3)), delete(life)]))
        else:
            seen = index.entries(limit=40)
            if seen:
                key, entry = chance.choice(seen)
                life = life._replace(key=key, entry=entry)
                records.append(chance.choice([touch(life, 3000 + turn, chance.randrange(3)), delete(life)]))
    plain.append(records)
    compacted.append(records)
    if chance.random() < 0.2:
        index.sync(journals)
    if chance.random() < 0.05:
        compactor.compact()
"""
NODE = """
import sys, time
from pathlib import Path
from blocks import NAMESPACE
from deepinfer_kvstore.index import Index
from deepinfer_kvstore.journal_set import JournalSet
root, node = Path(sys.argv[1]), sys.argv[2]
index = Index.open(root / f"node-{node}", NAMESPACE)
journals = JournalSet([root / "compacted"], NAMESPACE)
while True:
    index.sync(journals)
    time.sleep(0.002)
"""


def folded(root: Path, journals: str, node: str) -> tuple[list[tuple[Key, Entry]], Totals]:
    index = Index.open(root / node, NAMESPACE)
    index.sync(JournalSet([root / journals], NAMESPACE))
    found = index.entries(), index.totals()
    index.close()
    return found


class Processes:
    """Three writers and two nodes; who was killed is begun again, in its next epoch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scripts = {("writer", str(n)): WRITER for n in range(3)} | {("node", str(n)): NODE for n in range(2)}
        self.epochs = dict.fromkeys(self.scripts, 0)
        self.running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        for name, script in self.scripts.items():
            if name not in self.running:
                self.epochs[name] += 1
                command = [sys.executable, "-c", script, str(self.root), name[1], str(self.epochs[name])]
                self.running[name] = subprocess.Popen(command, cwd=Path(__file__).parent)

    def wait_for_records(self, records: int) -> None:
        """Until each writer has said so many in its epoch; -1: none need have begun."""
        deadline = time.monotonic() + 120
        while any(self._said(name) < records for name in self.scripts if name[0] == "writer"):
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended by itself"
            assert time.monotonic() < deadline, "writers stand still"
            time.sleep(0.005)

    def kill(self, name: tuple[str, str]) -> None:
        process = self.running.pop(name)
        assert process.poll() is None, f"{name} ended by itself"
        process.kill()
        process.wait()

    def end_writers(self) -> None:
        """Between two turns: of one who is killed between its two appends, only one set of journals has the last."""
        (self.root / "stop").touch()
        for name, process in self.running.items():
            if name[0] == "writer":
                assert process.wait(120) == 0

    def kill_all(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def _said(self, name: tuple[str, str]) -> int:
        try:
            path = self.root / "plain" / f"{int(name[1]):08x}.{self.epochs[name]:08x}.log"
            return path.stat().st_size // RECORD_BYTES - 1
        except FileNotFoundError:
            return -1


def test_nodes_agree_whatever_is_killed_and_compacted(tmp_path: Path) -> None:
    """Their indexes equal that of journals which were never compacted."""
    for name in ("plain", "compacted"):
        (tmp_path / name).mkdir()
    chance = random.Random(3)
    processes = Processes(tmp_path)
    try:
        for _ in range(8):
            processes.begin()
            processes.wait_for_records(chance.choice([-1, 0, 1000]))  # killed as they start, say again, or work
            time.sleep(chance.random() / 4)
            for name in chance.sample(sorted(processes.running), 2):
                processes.kill(name)
        processes.begin()
        processes.wait_for_records(1000)
        processes.end_writers()
    finally:
        processes.kill_all()
    plain = sum(path.stat().st_size for path in (tmp_path / "plain").iterdir())
    compacted = sum(path.stat().st_size for path in (tmp_path / "compacted").iterdir())
    assert compacted < plain
    expected = folded(tmp_path, "plain", "expected")
    assert expected[1].keys > 0
    for node in ("node-0", "node-1", "fresh"):
        assert folded(tmp_path, "compacted", node) == expected

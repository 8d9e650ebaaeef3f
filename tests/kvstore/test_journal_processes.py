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

WRITER = """
import os, random, sys
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
for turn in range(100_000):
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


def test_nodes_agree_whatever_is_killed_and_compacted(tmp_path: Path) -> None:
    """Their indexes equal that of journals which were never compacted."""
    for name in ("plain", "compacted"):
        (tmp_path / name).mkdir()
    chance = random.Random(3)
    scripts = {("writer", str(number)): WRITER for number in range(3)} | {("node", str(n)): NODE for n in range(2)}
    epochs = dict.fromkeys(scripts, 0)
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    try:
        for _ in range(8):
            for name, script in scripts.items():
                if name not in running:
                    epochs[name] += 1
                    arguments = [str(tmp_path), name[1], str(epochs[name])]
                    running[name] = subprocess.Popen(
                        [sys.executable, "-c", script, *arguments], cwd=Path(__file__).parent
                    )
            time.sleep(0.4 + chance.random() / 2)
            for name in chance.sample(sorted(running), 2):
                assert running[name].poll() is None, f"{name} ended by itself"
                running[name].kill()
                running.pop(name).wait()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    plain = sum(path.stat().st_size for path in (tmp_path / "plain").iterdir())
    compacted = sum(path.stat().st_size for path in (tmp_path / "compacted").iterdir())
    assert compacted < plain
    expected = folded(tmp_path, "plain", "expected")
    assert expected[1].keys > 0
    for node in ("node-0", "node-1", "fresh"):
        assert folded(tmp_path, "compacted", node) == expected

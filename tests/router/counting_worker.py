"""A worker process for tests of shared counts: does what it is told on stdin, one line each, and answers on stdout.

book RANK PROMPT_TOKENS | release | fold | own: what it has, as JSON.
"""

import json
import sys
from pathlib import Path
from time import monotonic

from deepinfer_router.engine_spec import EngineSpec
from deepinfer_router.fleet import Fleet
from deepinfer_router.lease import Lease
from deepinfer_router.roles import Role
from deepinfer_router.shared_counts import SharedCounts
from deepinfer_router.work import Work


def main(directory: str, ranks: int) -> None:
    fleet = Fleet()
    engine = fleet.add(EngineSpec("http://a", ranks=ranks))
    counts = SharedCounts(fleet, Path(directory), monotonic)
    leases: list[Lease] = []
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "book":
            rank, tokens = map(int, numbers)
            leases.append(fleet.book(engine.targets[rank], Work(prompt_tokens=tokens), Role.DECODE, tokens / 1000))
        elif what == "release" and leases:
            leases.pop(len(leases) // 2).release()
        elif what == "spin":
            # Writes as fast as it can, always as many tokens at one target as at the next.
            for number in range(int(numbers[0])):
                pair = [fleet.book(target, Work(prompt_tokens=number), Role.DECODE) for target in engine.targets]
                counts.fold()
                for lease in pair:
                    lease.release()
                counts.fold()
        counts.fold()
        print(json.dumps([target.own for target in engine.targets]), flush=True)
    counts.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

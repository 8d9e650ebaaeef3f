"""A process that answers, of items 0 to N - 1, what a file of results lacks: killed by its test again and again."""

import sys
from pathlib import Path

from deepinfer_vllm.evaluation.results_file import ResultsFile

if __name__ == "__main__":
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    with ResultsFile(path, {"seed": 0}) as results:
        for number in range(count):
            if str(number) not in results.records:
                results.append({"id": str(number), "text": f"{number} " * 400})

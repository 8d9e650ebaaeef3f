"""Files of questions: the forms that are read, and one line for those that are not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepinfer_vllm.evaluation.errors import EvaluationError
from deepinfer_vllm.evaluation.questions import text_of
from deepinfer_vllm.evaluation.scoring import score
from deepinfer_vllm.evaluation.task import Item, Task, read_task


def read(tmp_path: Path, *lines: Any) -> Task:
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_task(str(path))


def test_the_task_that_comes_along() -> None:
    """Fifty items of every kind and form; each right answer is scored as right, however it is given."""
    task = read_task("builtin:mixed")
    assert len(task.items) == 50 and task.name == "mixed"
    assert Counter(item.kind for item in task.items) == {"choice": 18, "exact": 16, "integer": 16}
    assert sum(item.raw for item in task.items) == 6
    for item in task.items:
        answer = item.answers[0]
        for reply in (answer, f"It must be so.\nAnswer: **{answer}**.", rf"Hence $\boxed{{{answer}}}$."):
            assert score(item, reply, strict=reply != answer).correct, (item.id, reply)
        assert not score(item, "I do not know.").correct


def test_forms_of_a_line(tmp_path: Path) -> None:
    task = read(
        tmp_path,
        {"question": "How many?", "answer": "1 + 1 = 2\n#### 1,002", "source": "GSM8K's form may hold more"},
        "",
        {"problem": "How many?", "answer": "073"},
        {"question": "Which?", "choices": ["x", "y"], "answer": 1, "id": 7},
        {"question": "Which?", "choices": ["x", "y"], "answer": "A", "id": "a"},
        {"question": "Who?", "answer": ["Ann  Lee", "ann lee", "Lee"]},
        {"prompt": "2 + 2 =", "kind": "exact", "answer": "4", "stop": ["\n"], "id": "p"},
        {"question": "How many?", "answer": -3.0},
    )
    assert task.items == (
        Item("1", "integer", "How many?", ("1002",)),
        Item("3", "integer", "How many?", ("73",)),
        Item("7", "choice", "Which?", ("B",), ("x", "y")),
        Item("a", "choice", "Which?", ("A",), ("x", "y")),
        Item("6", "exact", "Who?", ("ann lee", "lee")),
        Item("p", "exact", "2 + 2 =", ("4",), (), True, ("\n",)),
        Item("8", "integer", "How many?", ("-3",)),
    )


def test_what_the_model_is_asked(tmp_path: Path) -> None:
    choice, exact, number, raw = read(
        tmp_path,
        {"question": "Which?", "choices": ["x", "y"], "answer": 1},
        {"question": "Who?", "answer": "Ann"},
        {"question": "How many?", "answer": 3},
        {"prompt": "2 + 2 =", "answer": 4},
    ).items
    assert text_of(choice) == 'Which?\n\nA) x\nB) y\n\nEnd with "Answer: " and the letter of the right option.'
    assert text_of(exact).startswith("Who?\n\n") and text_of(number).endswith(r"in \boxed{}.")
    assert text_of(raw) == "2 + 2 ="


GOOD = {"question": "?", "answer": "x"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", 'line 2: a line is {"question": ..., "answer": ...}'),
        ("[" * 100_000, "line 2: nested too deeply"),
        ({"answer": 1}, "one of question, problem and prompt is needed; there is none"),
        ({**GOOD, "prompt": "?"}, "there is question and prompt"),
        ({"question": " ", "answer": 1}, "question is no text, or an empty one"),
        ({"question": ["?"], "answer": 1}, "question is no text"),
        ({"question": "?"}, "answer None is no text of letters or digits"),
        ({"question": "?", "answer": "..."}, "answer '...' is no text of letters or digits"),
        ({"question": "?", "answer": []}, "nor a list of such"),
        ({**GOOD, "kind": "essay"}, "kind 'essay': one of choice, exact, integer"),
        ({**GOOD, "kind": "exact", "hint": 1}, "unknown field 'hint'"),
        ({**GOOD, "kind": "integer"}, "answer 'x' is no integer"),
        ({"question": "?", "kind": "integer", "answer": "4.5"}, "answer '4.5' is no integer"),
        ({**GOOD, "kind": "choice"}, "a choice needs choices"),
        ({**GOOD, "kind": "exact", "choices": ["x", "y"]}, "only a choice has them"),
        ({**GOOD, "choices": ["x"]}, "1 choices: 2 to 26 are needed"),
        ({**GOOD, "choices": ["x"] * 27}, "27 choices"),
        ({**GOOD, "choices": ["x", "y"]}, "answer 'x' is no letter from A to B, nor a number from 0 to 1"),
        ({"question": "?", "answer": 2, "choices": ["x", "y"]}, "answer 2 is no letter"),
        ({"question": "?", "answer": True, "choices": ["x", "y"]}, "answer True is no letter"),
        ({**GOOD, "choices": "xy"}, "choices is no list of texts"),
        ({**GOOD, "stop": [1]}, "stop is no list of texts"),
        ({**GOOD, "id": 1.5}, "id 1.5 is neither text nor a whole number"),
        ({**GOOD, "id": 1}, "the id '1' is that of an earlier line"),
        ({**GOOD, "id": "\ud800"}, "half of a surrogate pair"),
        ({"question": "a\udfffb", "answer": "x"}, "half of a surrogate pair"),
        ({"question": "?", "answer": "A", "choices": ["x", "\udc80"]}, "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_one_message(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(EvaluationError) as caught:
        read(tmp_path, GOOD, line)
    message = str(caught.value)
    assert says in message and "line 2: " in message and "\n" not in message


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b'{"question": "\xff"}')
    (tmp_path / "empty").write_text("\n \n")
    for name, says in {
        "bytes": "not UTF-8 at byte 14",
        "empty": "no question in it",
        "absent": "No such file or directory",
        ".": "Is a directory",
    }.items():
        with pytest.raises(EvaluationError, match=says):
            read_task(str(tmp_path / name))
    with pytest.raises(EvaluationError, match="no such task; there is builtin:mixed"):
        read_task("builtin:../mixed")

"""Files of prompts: what they hold is read, and what they must not hold is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_vllm.spec_decode.prompts import Prompt, PromptsError, read_prompts


def test_texts_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('one\n\n{"prompt": "as it is"}\n')
    assert read_prompts(tmp_path / "a.txt") == [Prompt(text="one"), Prompt(text='{"prompt": "as it is"}')]
    messages = [{"role": "user", "content": "hi"}]
    lines = (
        '{"prompt": "one"}\n \n{"messages": [{"role": "user", "content": "hi"}], "id": 3}\n{"prompt_token_ids": [0, 5]}'
    )
    (tmp_path / "a.jsonl").write_text(lines)
    assert read_prompts(tmp_path / "a.jsonl") == [
        Prompt(text="one"),
        Prompt(messages=messages),
        Prompt(token_ids=[0, 5]),
    ]


BAD = """{
[]
3
{}
{"prompt": ""}
{"prompt": 3}
{"messages": []}
{"messages": ["hi"]}
{"prompt_token_ids": []}
{"prompt_token_ids": [1.5]}
{"prompt_token_ids": [true]}
{"prompt_token_ids": [-1]}"""


@pytest.mark.parametrize("line", BAD.split("\n"))
def test_lines_of_another_form(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n' + line)
    with pytest.raises(PromptsError, match=r"a\.jsonl, line 2: .*a line is \{\"prompt\"") as caught:
        read_prompts(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


def test_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\n \n")
    (tmp_path / "b").write_bytes(b"one\n\xff")
    for name, message in (("a", "no prompt in it"), ("b", "not UTF-8 at byte 4"), ("c", "No such file")):
        with pytest.raises(PromptsError, match=message):
            read_prompts(tmp_path / name)

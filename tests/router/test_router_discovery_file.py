"""Engines that a file lists, while the file changes."""

import os
from pathlib import Path

import pytest
from listening_source import Heard, listening

from deepinfer_router.discovery import sources
from deepinfer_router.discovery_config import DiscoveryConfig


def source(path: Path):  # noqa: ANN201 # whatever `sources` makes
    config = DiscoveryConfig.model_validate({"file": {"path": str(path), "poll_s": 0.02}})
    (found,) = sources(config.model_dump(mode="json"))
    return found


def replace(path: Path, text: str) -> None:
    """As editors and ConfigMaps do it."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(
        "- http://a:1\n- {url: b:2, id: second, roles: [decode], ranks: 2, models: [m], engine_class: h200}"
    )
    with listening(source(path)) as heard:
        heard.until(lambda: heard.sets)
        assert heard.sets[0] == [
            {
                "url": "http://a:1",
                "id": "a:1",
                "roles": ["prefill", "decode"],
                "models": [],
                "ranks": 1,
                "capacity_tokens": None,
                "engine_class": "",
            },
            {
                "url": "http://b:2",
                "id": "second",
                "roles": ["decode"],
                "models": ["m"],
                "ranks": 2,
                "capacity_tokens": None,
                "engine_class": "h200",
            },
        ]
        replace(path, '{"engines": ["http://c:3"]}')
        heard.until(lambda: heard.urls() == ["http://c:3"])
        replace(path, "[]")
        heard.until(lambda: heard.sets[-1] == [])
    assert heard.lines == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "empty: write [] where there are no engines"),
        ("[a", "not YAML: "),
        ("- {url: 'a:1', rank: 2}", "engines.0.rank: there is no such setting: did you mean 'ranks'?"),
        ("[a:1, a:1]", "engines: 'a:1' is named twice: give each its own address, or an id"),
        ("3", "should be a valid dictionary"),
    ],
)
def test_a_broken_file_is_told_of_and_the_old_engines_stay(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("[a:1]")
    with listening(source(path)) as heard:
        heard.until(lambda: heard.urls() == ["http://a:1"])
        replace(path, text)
        heard.until(lambda: heard.lines)
        assert heard.lines[0].startswith(f"{path}: ") and line in heard.lines[0]
        path.unlink()
        heard.until(lambda: heard.lines[-1] == f"{path}: No such file or directory")
        replace(path, "[b:1]")
        heard.until(lambda: heard.urls() == ["http://b:1"])
    assert len(heard.sets) == 2


def test_a_file_may_come_later(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    with listening(source(path)) as heard:
        heard.until(lambda: heard.lines)
        path.write_text("[a:1]")
        heard.until(lambda: heard.urls() == ["http://a:1"])


def test_what_a_source_raises_does_not_end_it(tmp_path: Path) -> None:
    class Failing:
        name = "failing"
        runs = 0

        def run(self, found: object, failed: object, stop: object) -> None:
            self.runs += 1
            raise RuntimeError("odd answer")

    failing = Failing()
    with listening(failing) as heard:  # type: ignore[arg-type]
        heard.until(lambda: heard.lines)
    assert isinstance(heard, Heard) and heard.lines == ["RuntimeError: odd answer"]

"""What drafting did, read from two API servers before one engine; and the demo's last step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepinfer_vllm import demo
from deepinfer_vllm.demo_drafts import ANSWER_TOKENS, SPECULATIVE_FLAGS, Drafted, continue_texts, write_pair
from deepinfer_vllm.server_process import SMALL_CPU_ENVIRONMENT, SMALL_CPU_FLAGS, ServerProcess
from serving.conftest import START_LIMIT_SECONDS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("drafts") / "pair")


@pytest.fixture(scope="module")
def drafting(pair: Path) -> Iterator[ServerProcess]:
    flags = (*SMALL_CPU_FLAGS, *SPECULATIVE_FLAGS, "--api-server-count", "2")
    every_draft = {"DEEPINFER_VLLM_DSPARK_BUDGET": "fixed"}  # a budget goes by the clock
    with ServerProcess(pair, pair.parent / "server.log", flags, SMALL_CPU_ENVIRONMENT | every_draft) as process:
        process.wait_until_healthy(START_LIMIT_SECONDS)
        yield process


def test_what_two_api_servers_were_told_adds_up(drafting: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    before = Drafted.read(drafting.url)
    assert (before.verifications, before.verified, before.accepted) == (0, (), ())

    def texts(_: int) -> list[tuple[str, str]]:
        client, model = demo.client_of(drafting.url)  # a connection of its own, to whichever server takes it
        return continue_texts(client, model)

    with ThreadPoolExecutor(4) as threads:
        first, *others = list(threads.map(texts, range(4)))
    assert all(len(set(answers)) == 1 for answers in zip(first, *others, strict=True))
    tokens = 4 * len(first) * ANSWER_TOKENS
    found = Drafted.read(drafting.url)
    # Each answer's last step may have given more tokens than were asked for.
    assert tokens <= found.verifications + sum(found.accepted) <= tokens + 4 * len(first) * 5
    assert found.length > 1.2 and list(found.accepted) == sorted(found.accepted, reverse=True)
    assert all(stood <= checked for stood, checked in zip(found.accepted, found.verified, strict=True))
    demo.show_drafts(found)
    assert f"{found.length:.2f} tokens a step over {found.verifications} steps" in capsys.readouterr().out


def test_drafts_of_which_none_stood_end_the_demo() -> None:
    with pytest.raises(demo.DemoError, match="no draft stood, of 5 that were checked"):
        demo.show_drafts(Drafted(3, (3, 2), (0, 0)))

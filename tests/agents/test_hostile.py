"""Hostile programs: each ends its own episode alone, within limits, and leaves nothing behind (`make test-agents`)."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from podium.agents.chat import tool_format
from podium.agents.programs import server
from podium.agents.programs.episode import program_rollouts
from podium.agents.programs.program import FileProgram
from podium.agents.programs.report import EpisodeResult
from podium.agents.setup import ProgramLimits, SampledGroups
from podium.engines.live.engine import LiveEngine
from podium.isolation.workers import MARK
from podium.records import Completion, Prompt, SamplingSettings
from podium.testing import tiny_model
from tests.agents.hostile_program import ACTS
from tests.unit.agents_setup import tool_tokenizer

HERE = Path(__file__).parent
SECONDS = 6.0
"""That a program may take by itself; importing it and starting Python are not part of it."""

REWARDED = {
    "wrong_session": 404.0,
    "wrong_token": 401.0,
    "huge_promise": 413.0,
    "huge_body": 413.0,
    "deep_body": 400.0,
    "odd_bodies": 400.0,
    "many_at_a_time": 1.0,
}
"""What an act returns that is answered as it should be."""

ENDED = {
    "raises": "raised RuntimeError: by itself",
    "leaves": "raised SystemExit: good bye",
    "leaves_at_once": "exit code 3",
    "kills_itself": "SIGKILL",
    "kills_its_group": "SIGKILL",
    "crashes": "SIGSEGV",
    "hangs": "agent_timeout",
    "loops": "agent_timeout",
    "ignores_signals": "agent_timeout",
    "slow_sender": "raised ",
    "slow_reader": "agent_timeout",
    "forks": "agent_timeout",
    "returns_nan": "a reward is a finite number",
    "returns_an_object": "a reward is a finite number",
}
"""Words of why an episode was ended."""

AS_HONEST = sorted(ACTS.keys() - REWARDED.keys() - ENDED.keys() - {"honest", "ten_thousand_requests"})
"""Acts that play as the honest one does beside what else they do."""


def program() -> FileProgram:
    return FileProgram(f"{HERE / 'hostile_program.py'}:run", HERE)


def played(acts: list[str], folder: str, seconds: float = SECONDS) -> SampledGroups:
    tokenizer = tool_tokenizer()
    chat = tool_format(tokenizer, {}, needs_tools=True)
    content = [{"role": "user", "content": "begin"}]
    ids = tuple(chat.prompt(content)[0])
    prompts = [
        Prompt(
            id=i if act != "honest" else 900 + i,
            row=i,
            token_ids=ids,
            text="",
            content=content,
            columns={"act": act, "n": i if act != "honest" else 900 + i, "folder": folder},
        )
        for i, act in enumerate(acts)
    ]
    ends = frozenset({2, *range(10, 60)})
    settings = SamplingSettings(num_completions=1, max_tokens=1500, seed=1, end_ids=ends)
    engine = LiveEngine(tiny_model("llama", max_position_embeddings=4096), tokenizer)
    limits = ProgramLimits(timeout=seconds, max_turns=None, context_length=4096)
    return program_rollouts(program(), engine, prompts, settings, chat=chat, limits=limits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    yield str(tmp_path_factory.mktemp("run"))
    tempfile.tempdir = None


@pytest.fixture(scope="module")
def round_of_all(folder: str) -> dict[str, tuple[EpisodeResult, Completion]]:
    """One round of all acts, the honest one first; and what was there before it and after."""
    names = ["honest", *(name for name in ACTS if name != "honest")]
    server.READ_SECONDS = 3.0
    result = played(names, folder)
    completions = [each for group in result.groups for each in group.completions]
    return dict(zip(names, zip(result.environments, completions, strict=True), strict=True))


def test_there_are_at_least_24() -> None:
    assert len(ACTS) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("act", REWARDED)
def test_what_is_forbidden_is_answered(round_of_all: Any, act: str) -> None:
    result, _ = round_of_all[act]
    assert (result.reward, result.problem) == (REWARDED[act], "")


@pytest.mark.slow
@pytest.mark.parametrize("act", ENDED)
def test_an_end_is_the_episodes_own(round_of_all: Any, act: str) -> None:
    result, _ = round_of_all[act]
    assert ENDED[act] in result.problem
    assert result.reward is None


@pytest.mark.slow
@pytest.mark.parametrize("act", AS_HONEST)
def test_the_others_play_on(round_of_all: Any, act: str) -> None:
    result, completion = round_of_all[act]
    assert result.problem == ""
    assert len(completion.sequences) == 2  # what a client gave up is none
    assert result.reward == len(completion.messages[0]["content"])


@pytest.mark.slow
def test_ten_thousand_requests_are_capped(round_of_all: Any) -> None:
    result, completion = round_of_all["ten_thousand_requests"]
    assert result.capped
    assert completion.num_drawn <= 1500
    assert result.reward == 1.0 or "agent_timeout" in result.problem


@pytest.mark.slow
def test_an_honest_program_draws_what_it_draws_among_honest_ones(round_of_all: Any, folder: str) -> None:
    [group] = played(["honest"], folder).groups
    _, completion = round_of_all["honest"]
    assert [x.token_ids for x in group.completions[0].sequences] == [x.token_ids for x in completion.sequences]


@pytest.mark.slow
def test_nothing_is_left_behind(round_of_all: Any, folder: str) -> None:
    """No process of an episode but the workers themselves, no folder, no thread of the endpoint."""
    played(["honest"], folder)  # a round more, so that the workers of the last were used again
    time.sleep(0.3)
    workers = {each.mark: each.process for each in program().workers().workers}
    left = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = each.environ().get(MARK, "")
            if mark in workers and each.pid != getattr(workers[mark], "pid", 0):
                left.append(each.cmdline())
    assert len(workers) > 8
    assert left == []
    assert list(Path(tempfile.gettempdir()).glob("podium-episode-*")) == []
    assert [each.name for each in threading.enumerate() if each.name.startswith("podium-endpoint")] == []
    assert len(os.listdir("/proc/self/fd")) < 400


def test_the_run_is_bit_equal_beside_hostile_programs(folder: str) -> None:
    names = ["honest", "raises", "leaves_at_once", "kills_itself", "honest", "returns_nan"]
    one, other = (played(names, folder) for _ in range(2))
    facts = [
        [[(x.token_ids, x.logps) for x in c.sequences] for group in result.groups for c in group.completions]
        for result in (one, other)
    ]
    assert facts[0] == facts[1]

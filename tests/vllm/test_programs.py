"""Programs whose turns a vLLM server samples: the same contract as beside the live engine, and a server that dies.

The server is the one of test_vllm.py: its routes over a tiny model.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from podium import GRPOConfig
from podium.agents.programs.episode import program_rollouts
from podium.agents.programs.program import FunctionProgram
from podium.agents.setup import SampledGroups
from podium.engines.base import Interrupted
from podium.engines.vllm import engine as vllm_engine
from podium.engines.vllm.engine import Member, ServerEngine
from podium.engines.vllm.server import ServerGone, VllmServer, first_up
from podium.engines.vllm.weights import Folder
from podium.errors import ConfigError
from podium.records import Completion, SamplingSettings
from podium.testing import save_tiny_model
from podium.trainer.assembly import program_of
from podium.trainer.run import Arguments
from tests.agents.test_sessions import (
    CHAT,
    FORMS,
    LIMITS,
    MODEL,
    SETTINGS,
    TOKENIZER,
    Program,
    Recorded,
    exact,
    of,
    prompt_of,
    sampled,
    trained,
    user,
)
from tests.vllm.stand_in import StandIn

PATIENCE = 120.0
"""Seconds of waiting for a server, of which none pass unless it stays away."""


class Recording(StandIn):
    """A server that keeps what it has sampled, and may hold requests back."""

    def __init__(self, folder: str) -> None:
        self.made: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
        self.hold: Callable[[str], None] = lambda text: None
        super().__init__(folder, longest=4096)

    def completions(self, body: Any) -> Any:
        self.hold(TOKENIZER.decode(body["prompt"]))
        return super().completions(body)

    def choice(self, body: Any, g: int) -> dict[str, Any]:
        made = super().choice(body, g)
        self.made.append((tuple(body["prompt"]), tuple(made["token_ids"]), tuple(made["logprobs"]["token_logprobs"])))
        return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny", max_position_embeddings=4096)


@pytest.fixture
def server(folder: str) -> Iterator[Recording]:
    with Recording(folder) as running:
        yield running


@pytest.fixture
def engine(server: Recording, tmp_path: Path) -> ServerEngine:
    """Of the server, with the weights of `MODEL`."""
    http = VllmServer(server.url, seconds=PATIENCE)
    made = ServerEngine([Member(http, "tiny", Folder(tmp_path / "weights", torch.float32))], TOKENIZER)
    made.sync(MODEL, 0)
    return made


def played(
    engine: ServerEngine, body: Program, settings: SamplingSettings = SETTINGS, rows: int = 2
) -> tuple[SampledGroups, Recorded]:
    program = Recorded(body)
    prompts = [prompt_of(i) for i in range(rows)]
    return program_rollouts(FunctionProgram(program), engine, prompts, settings, chat=CHAT, limits=LIMITS), program


def turns(completions: list[Completion]) -> Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """What was drawn in each turn: the tokens before it, its own, and their log-probabilities."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()
    for each in (sequence for completion in completions for sequence in completion.sequences):
        assert each.prompt is not None
        logps = iter(each.logps)
        for turn in each.turns:
            ids = each.token_ids[turn.start : turn.stop]
            before = (*each.prompt.token_ids, *each.token_ids[: turn.start])
            found[before, ids, tuple(next(logps) for _ in ids)] += 1
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_tokens_trained_are_the_tokens_the_server_sampled(
    engine: ServerEngine, server: Recording, form: Program
) -> None:
    result, program = played(engine, form)
    assert [each.problem for each in result.environments] == [""] * 4
    assert result.metrics["programs/forks"] == FORMS[form][1]
    assert turns(of(result)) == Counter(server.made)
    assert trained(of(result)) == sampled(program.answers)
    assert Counter((before, ids) for before, ids, _ in server.made) == Counter(program.answers)


def test_random_numbers_follow_the_session(engine: ServerEngine, server: Recording) -> None:
    """Twice the same; and no two requests draw with the same numbers."""
    one, other = of(played(engine, exact)[0]), of(played(engine, exact)[0])
    assert [each.token_ids for each in one] == [each.token_ids for each in other]
    seeds = [body["seed"] for route, body in server.requests if route == "/v1/completions"]
    assert seeds.count(seeds[0]) == 2
    assert len(set(seeds)) == len(seeds) / 2 == 12


def test_a_session_goes_on_while_another_waits_for_the_server(engine: ServerEngine, server: Recording) -> None:
    """The first request of row 0 is not answered before row 1 has had its three answers."""
    over = threading.Event()
    server.hold = lambda text: None if "Question 1" in text else over.wait(PATIENCE) or pytest.fail("held for ever")
    rows: list[str] = []

    def body(client: OpenAI, messages: list[Any], ask: Any) -> float:
        row = messages[0]["content"]
        exact(client, messages, ask)
        rows.append(row)
        if rows.count("Question 1") == 2:
            over.set()
        return 1.0

    result, program = played(engine, body)
    assert [each.problem for each in result.environments] == [""] * 4
    assert rows[:2] == ["Question 1"] * 2
    assert len(program.answers) == 12


def test_requests_of_one_program_are_sampled_at_the_same_time(engine: ServerEngine, server: Recording) -> None:
    both = threading.Barrier(2)
    server.hold = lambda text: both.wait(PATIENCE) and None if "way" in text else None

    def body(client: OpenAI, messages: list[Any], ask: Any) -> float:
        threads = [threading.Thread(target=ask, args=([user(f"way {i}")],)) for i in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return 1.0

    result, program = played(engine, body)
    assert len(program.answers) == 8
    assert turns(of(result)) == Counter(server.made)


# ---- a server that dies ----


def start_again(server: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server come back as soon as it is waited for."""

    def waited(*args: Any) -> VllmServer:
        server.die_after = None
        server.start()
        return first_up(*args)

    monkeypatch.setattr(vllm_engine, "first_up", waited)


def test_a_server_that_dies_in_the_middle_and_comes_back(
    engine: ServerEngine, server: Recording, caplog: Any, monkeypatch: Any
) -> None:
    """Sessions go on with the tokens that they have had; what was not answered is drawn again, the same."""
    undisturbed = turns(of(played(engine, exact)[0]))
    start_again(server, monkeypatch)
    server.die_after, server.requests = 7, []
    result, program = played(engine, exact)
    assert "is gone" in caplog.text
    assert "has weights 'default'" in caplog.text
    assert turns(of(result)) == undisturbed
    assert trained(of(result)) == sampled(program.answers)
    assert len(program.answers) == 12
    assert [route for route, _ in server.requests].count("/collective_rpc") == 1


def test_a_server_that_was_restarted_between_two_requests(engine: ServerEngine, server: Recording, caplog: Any) -> None:
    """What it has sampled from its own weights is given to nobody."""
    alone = replace(SETTINGS, num_completions=1)
    undisturbed = turns(of(played(engine, exact, alone, rows=1)[0]))

    def body(client: OpenAI, messages: list[Any], ask: Any) -> float:
        messages += [ask(messages), user("more")]
        server.stop()
        server.start()
        with torch.no_grad():
            server.model.lm_head.weight.mul_(-3.0)
        for text in ("and more", "end"):
            messages += [ask(messages), user(text)]
        return 1.0

    result, _ = played(engine, body, alone, rows=1)
    assert "sampling again" in caplog.text
    assert "Sending them again" in caplog.text
    assert turns(of(result)) == undisturbed


def test_a_server_that_stays_away_ends_the_round_and_its_programs(
    engine: ServerEngine, server: Recording, monkeypatch: Any
) -> None:
    monkeypatch.setattr(vllm_engine, "first_up", lambda servers, _: first_up(servers, 0.1))
    server.die_after = 5
    errors: list[str] = []

    def body(client: OpenAI, messages: list[Any], ask: Any) -> float:
        try:
            return exact(client, messages, ask)
        except Exception as error:
            errors.append(str(error))
            raise

    with pytest.raises(ServerGone, match="No vLLM server answers") as raised:
        played(engine, body)
    assert "start it again" in raised.value.fix
    assert len(errors) == 4
    assert all("round is over" in each or "session is over" in each for each in errors)


def test_a_round_is_given_up_and_the_next_is_played(engine: ServerEngine) -> None:
    engine.interrupt()
    with pytest.raises(Interrupted):
        played(engine, exact)
    engine.sync(MODEL, 0)
    assert len(played(engine, exact)[1].answers) == 12


# ---- in a run ----


def test_an_engine_of_vllm_in_this_process_is_refused(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_vllm=True, use_cpu=True)
    with pytest.raises(ConfigError, match="or a vLLM server; here vLLM in the trainer's process samples") as raised:
        program_of(Arguments(model=None, agent=run), args)
    assert raised.value.code == "C065"


def run(base_url: str, api_key: str, row: Any) -> float:
    """Two turns."""
    client, messages = OpenAI(base_url=base_url, api_key=api_key, max_retries=0), list(row["prompt"])
    for _ in range(2):
        answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
        messages += [answer, user("more")]
    return float(len(messages[1].content))


@pytest.fixture
def trained_run(make_trainer: Callable, folder: str, server: Recording) -> Callable:
    def made(**given: Any) -> Any:
        rows = [{"prompt": [user(f"Row {i}")]} for i in range(8)]
        served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "agent": run}
        small = {"per_device_train_batch_size": 8, "learning_rate": 0.05, "max_completion_length": 400}
        ends = {"generation_kwargs": {"eos_token_id": [2, *range(10, 60)]}, "vllm_server_timeout": PATIENCE}
        given = {**served, **small, **ends, "processing_class": TOKENIZER, **given}
        trainer = make_trainer(None, model=folder, rows=rows, **given)
        trainer.train()
        return trainer

    return made


def test_a_run_is_proved_and_corrected(trained_run: Callable, server: Recording) -> None:
    trainer = trained_run(prove_first_batch=True)
    passed = {check.name: check.passed for check in trainer.proof.checks}
    for name in ("trained tokens are the sampled ones", "rollout and training log-probabilities"):
        assert passed[name], name
    assert False not in passed.values()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["programs/requests"] for row in logged] == [2.0, 2.0]
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for row in logged)
    assert server.weight_version.endswith("step-1")
    own = turns([each for scored in trainer.scored for each in scored.group.completions])
    assert own <= Counter(server.made)
    assert own.total() == 16


@pytest.mark.slow
def test_a_round_ahead_is_played_on_the_server(trained_run: Callable, server: Recording) -> None:
    trainer = trained_run(async_rollouts=1, max_steps=3)
    stale = [row["rollouts/staleness"] for row in trainer.state.log_history if "rollouts/staleness" in row]
    assert stale == [0, 1, 1]
    assert np.isfinite([row["loss"] for row in trainer.state.log_history if "loss" in row]).all()

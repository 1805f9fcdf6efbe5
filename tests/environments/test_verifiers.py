"""Environments of verifiers, which has an interpreter of its own: PODIUM_VERIFIERS (`make test-environments`)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.isolation.user_files import function_from_file
from podium.recipe import load
from podium.testing import save_tiny_model
from tests.unit.agents_setup import tool_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = os.environ.get("PODIUM_VERIFIERS", "")
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="PODIUM_VERIFIERS is not set")

GUESS = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Guess(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def found(self, trace):
        return float(trace.last_reply == str(self.data.number))

    @vf.reward(weight=0.5)
    async def short(self, trace):
        return 1.0 / len(trace.assistant_messages)

    @vf.reward(weight=0.0)
    async def numeric(self, trace):
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def turns(self, trace):
        return float(len(trace.assistant_messages))


class Numbers(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in (3, 5):
            yield Guess(Data(prompt="A number from 1 to 7?", system_prompt="Guess.", number=number), self.config.task)


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == str(task.data.number):
                    break
                text = segment.last_reply
                below = text.isdigit() and int(text) < task.data.number
                segment = await interaction.turn("higher" if below else "lower")


__all__ = ["Game", "Numbers"]
"""

ORACLES = """
import json


def place(row, messages):
    return "```json\\n" + json.dumps(json.loads(row["task"])["solution"]) + "\\n```"


def bisect(row, messages):
    low, high = 1, 7
    said = 0
    for message in messages:
        if message["role"] == "assistant":
            said = int(message["content"])
        elif message["content"] == "higher":
            low = said + 1
        elif message["content"] == "lower":
            high = said - 1
    return str((low + high) // 2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the program, its recipe and the environment that is written here."""
    for name in ("agent_verifiers.py", "agent_verifiers.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "oracles.py").write_text(ORACLES)
    (tmp_path / "packages" / "guess_v1").mkdir(parents=True)
    (tmp_path / "packages" / "guess_v1" / "__init__.py").write_text(GUESS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def served(folder: Path, name: str, *settings: str) -> Iterator[None]:
    """Serve an environment, with its rows in `marble.jsonl`, the dataset of the recipe."""
    variables = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    port = ["--port", "8807"]
    command = [PYTHON, str(EXAMPLES / "verifiers_server.py")]
    rows = subprocess.check_output([*command, "rows", name, *settings, "--take", "4", *port], env=variables)
    (folder / "marble.jsonl").write_bytes(rows)
    serving = [*command, "serve", name, *settings, *port]
    with subprocess.Popen(serving, env=variables, cwd=EXAMPLES, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "serving at http://127.0.0.1:8807\n"
            yield
        finally:
            server.terminate()


def played_by(oracle: str) -> dict[str, dict[str, Any]]:
    """What `podium agents test` says of each policy."""
    words = ["agent_verifiers.py:run", "--data", "marble.jsonl", "--oracle", f"oracles.py:{oracle}", "--json"]
    result = CliRunner().invoke(app, ["agents", "test", *words])
    assert result.exit_code == 0, result.output
    return {each["policy"]: each for each in json.loads(result.stdout)["played"]}


def trained(folder: Path) -> dict[str, Any]:
    """What the recipe logged for one step with a tiny model."""
    model = save_tiny_model(folder / "model", max_position_embeddings=4096)
    tool_tokenizer().save_pretrained(model)
    changes = {"model": str(model), "max_steps": 1, "use_cpu": True, "output_dir": str(folder / "run")}
    trainer = load("agent_verifiers.yaml", changes).trainer()
    trainer.train()
    [logged] = [each for each in trainer.state.log_history if "reward" in each]
    return logged


@needs_verifiers
@pytest.mark.slow
def test_an_environment_of_one_turn_from_pypi(folder: Path) -> None:
    with served(folder, "marble-v1", "taskset.task.rewards.answered_legally.weight=0.5"):
        said = played_by("place")
        assert said["oracle"]["reward"] == 1.5
        assert said["silence"]["reward"] == 0.0
        assert {each["ended"] for each in said.values()} == {"returned"}
        logged = trained(folder)
    assert logged["programs/failed"] == 0
    assert logged["programs/requests"] == 1
    assert {"agent/scored", "agent/answered_legally"} <= logged.keys()
    assert "agent/closeness" not in logged


@needs_verifiers
@pytest.mark.slow
def test_an_environment_of_several_turns_with_weights(folder: Path) -> None:
    with served(folder, "guess-v1"):
        said = played_by("bisect")
        assert (said["oracle"]["reward"], said["oracle"]["turns"]) == (pytest.approx(2 + 0.5 / 3), 3)  # 4, 2, 3
        assert said["refusal"]["reward"] == pytest.approx(0.5 / 3)
        logged = trained(folder)
    assert logged["programs/failed"] == 0
    assert 1 < logged["programs/requests"] <= 3  # some use up their tokens in the first turn


@pytest.mark.parametrize(
    ("played", "returned"),
    [
        ({"rewards": {"right": 2.0, "short": -0.5}, "metrics": {}, "errors": []}, {"right": 2.0, "short": -0.5}),
        ({"rewards": {}, "metrics": {"turns": 1.0}, "errors": []}, None),
        ({"rewards": {"right": 1.0}, "metrics": {}, "errors": ["TaskError: no"]}, RuntimeError("TaskError: no")),
    ],
)
def test_rewards_are_taken_as_they_come(played: dict[str, Any], returned: Any) -> None:
    """Unscored episodes have no reward, and errors end them."""
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(played).encode())

        def log_message(self, *_: Any) -> None:
            pass

    run = function_from_file(EXAMPLES / "agent_verifiers.py", "run", "agent_verifiers.py", rule="")
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        row = {"task": "{}", "server": f"http://127.0.0.1:{server.server_port}"}
        if isinstance(returned, RuntimeError):
            with pytest.raises(RuntimeError, match=str(returned)):
                run("url", "key", row)
        else:
            assert run("url", "key", row) == returned
    assert asked == [{"base_url": "url", "api_key": "key", "task": "{}"}]


def test_a_server_that_is_not_there_is_named() -> None:
    run = function_from_file(EXAMPLES / "agent_verifiers.py", "run", "agent_verifiers.py", rule="")
    with pytest.raises(
        RuntimeError, match=r"no environment at http://127\.0\.0\.1:9: start `verifiers_server.py serve`"
    ):
        run("url", "key", {"task": "{}", "server": "http://127.0.0.1:9"})

"""One thing that each optional package does. All of their tests: tests/vllm, agents, environments, tinker."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.agents.environments import EnvironmentPools, reset
from podium.agents.table import resolve_environment
from podium.testing import save_tiny_model
from podium.tinker.server import TinkerServer
from tests.tinker.test_server import KEY, Counting
from tests.unit.agents_setup import make
from tests.vllm.stand_in import StandIn


def test_a_vllm_server_samples_from_the_weights_of_each_step(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    with StandIn(save_tiny_model(tmp_path / "tiny")) as server:
        trainer = make_trainer(
            model=str(tmp_path / "tiny"), use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url
        )
        trainer.train()
        assert server.weight_version.endswith("-1")
        trained = trainer.model.state_dict()
        trainer.generate_completions([{"prompt": "1+1=", "answer": "2"}])
        assert all(
            tensor.allclose(trained[name], atol=1e-2) for name, tensor in server.model.state_dict().items()
        )  # as the server keeps them


def ask(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """A program of one request; its reward is how long the answer is."""
    body = json.dumps({"model": "m", "messages": row["prompt"]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return float(len(json.load(answer)["choices"][0]["message"]["content"]))


def test_a_program_draws_its_turns_and_gives_the_reward() -> None:
    trainer = make(agent=ask, reward_funcs=[], config={"max_completion_length": 8})
    trainer.train()
    [logged] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logged["programs/requests"] == 1
    assert logged["programs/failed"] == 0
    assert logged["reward"] > 0


@pytest.mark.parametrize(
    ("name", "row", "actions"),
    [
        ("builtin:guess", {"number": 3}, ["5", "3"]),
        ("gymnasium:FrozenLake-v1?is_slippery=false", {}, ["down", "down", "right", "down", "right", "right"]),
    ],
)
def test_an_environment_of_a_library_is_won(name: str, row: dict[str, Any], actions: list[str]) -> None:
    pytest.importorskip(name.partition(":")[0] if name.startswith("gymnasium") else "podium")
    [environment] = EnvironmentPools(resolve_environment(name)).take([None])
    reset(environment, row, named=False, seed=1)
    steps = [environment.take_step(action) for action in actions]
    assert [step.done for step in steps] == [False] * (len(actions) - 1) + [True]
    assert sum(step.reward for step in steps) == pytest.approx(1.0)


def test_the_tinker_server_answers() -> None:
    server = TinkerServer(Counting(), KEY, 0)
    threading.Thread(target=server.run, daemon=True).start()
    host, port = server._http.server_address[:2]
    request = urllib.request.Request(f"http://{host}:{port}/api/v1/get_server_capabilities", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
    server._http.shutdown()
    server._http.server_close()

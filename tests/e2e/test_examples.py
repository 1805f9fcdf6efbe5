"""The examples run, learn, and do what their texts say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from podium.recipe import load
from podium.testing import save_tiny_model
from tests.unit.agents_setup import tool_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; its `main` has not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    if "MODEL" not in os.environ:
        monkeypatch.setenv("MODEL", "not-loaded")
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_loop_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = imported("loop", monkeypatch).main(["--tiny", "--steps", "15"])
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-3:]) > 0.6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert lines[-1].startswith(f"step  15  reward {rewards[-1]:.3f}")


def test_loop_is_a_pure_function_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = imported("loop", monkeypatch)
    first, again, other = (loop.main(["--tiny", "--steps", "1", "--seed", seed]) for seed in "112")
    assert first == again
    assert first != other


@pytest.mark.slow
def test_a_loop_over_the_openai_client_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    rewards = imported("agent_loop", monkeypatch).main(str(tmp_path / "run"), "1", folder)
    assert len(rewards) == 1
    recorded = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"programs/failed": 0' in recorded
    assert '"programs/requests": 1' in recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("planner", "openai"), ("code", "openai"), ("sdk", "agents"), ("smol", "smolagents")]
)
def test_the_recipe_of_an_agent_is_trained(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(EXAMPLES.parent)
    changes = {"model": str(tmp_path / "model"), "max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True}
    tool_tokenizer().save_pretrained(save_tiny_model(tmp_path / "model", max_position_embeddings=4096))
    trainer = load(f"examples/agent_{name}.yaml", {**changes, "output_dir": str(tmp_path / "run")}).trainer()
    trainer.train()
    [logged] = [each for each in trainer.state.log_history if "reward" in each]
    assert logged["programs/failed"] == 0
    assert logged["programs/requests"] >= 1


def answering(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *texts: str) -> None:
    """A client whose answers are these, one after the other."""
    messages = [SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))]) for text in texts]
    create = partial(next, iter(messages))
    chat = SimpleNamespace(completions=SimpleNamespace(create=lambda **_: create()))
    monkeypatch.setattr(module, "OpenAI", lambda **_: SimpleNamespace(chat=chat))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["Look up pens", "31", "31 coins"], 1.0),
        (["Look up keys", "31", "31 coins"], 0.8),
        (["Look up pens", "24", "24 coins"], 0.3),
        (["31 coins"], 0.0),
    ],
)
def test_rewards_of_a_planner_with_a_worker(texts: list[str], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = imported("agent_planner", monkeypatch)
    answering(monkeypatch, planner, *texts)
    row = {"prompt": "How much?", "thing": "pens", "price": "31", "list": "cups 24\nhats 71\npens 31"}
    assert planner.run("url", "key", row) == pytest.approx(expected)


def test_a_coding_agent_is_told_its_error_and_paid_for_the_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = imported("agent_code", monkeypatch)
    tests = json.dumps([{"call": "double", "args": [x], "expected": 2 * x} for x in (0, 4)])
    right, wrong, broken = (f"```python\n{code}\n```" for code in DOUBLES)
    for texts, expected in (([wrong, right], 1.0), ([broken, wrong], 0.6), ([broken, "no code"], 0.0)):
        answering(monkeypatch, agent, *texts)
        assert agent.run("url", "key", [], tests) == pytest.approx(expected)
    assert agent.judged(DOUBLES[1], json.loads(tests))[1] == "double(4) is 16, not 8."


DOUBLES = ("def double(x):\n    return 2 * x", "def double(x):\n    return x * x", "def double(x:")


def test_loop_uses_no_trainer() -> None:
    text = (EXAMPLES / "loop.py").read_text()
    assert "import" in text
    assert not re.search(r"^(from|import) .*(trainer|trl)", text, re.MULTILINE)


def described_as(name: str) -> str:
    """A logged name as the glossary has it."""
    name = re.sub(r"^rewards/.*/", "rewards/<name>/", name)
    return re.sub(r"^time/reward/.*_seconds", "time/reward/<name>_seconds", name)


@pytest.mark.slow
def test_a_script_for_trl_runs_with_its_import_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    out = tmp_path / "run"
    for name, value in {"MODEL": model, "MAX_STEPS": "2", "OUTPUT_DIR": str(out)}.items():
        monkeypatch.setenv(name, value)
    imported("from_trl", monkeypatch).main()

    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    logged = set(state["log_history"][0])
    rewards = ("xmlcount", "soft_format", "strict_format", "int", "correctness")
    assert {f"rewards/{name}_reward_func/mean" for name in rewards} <= logged
    assert {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "num_tokens"} <= logged
    glossary = (EXAMPLES.parent / "docs" / "algorithm.md").read_text().split("## Metrics")[1]
    assert not [name for name in logged if f"`{described_as(name)}`" not in glossary and name != "step"]
    adapter = load_file(out / "adapter_model.safetensors")
    assert any("gate_proj.lora_A" in name for name in adapter)
    assert "q_proj" in json.loads((out / "adapter_config.json").read_text())["target_modules"]


def test_the_script_for_trl_mentions_podium_where_it_says() -> None:
    """One import replaced, one line for the model that needs no network, and nothing else."""
    lines = [line for line in (EXAMPLES / "from_trl.py").read_text().splitlines() if re.match(r"(from|import) ", line)]
    assert [line for line in lines if "podium" in line] == [
        "from podium import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer",
        "from podium.models.builtin import resolve_model",
    ]


GOOD = "<reasoning>\n3 + 4\n</reasoning>\n<answer>\n7\n</answer>\n"
LOOSE = "Well: <reasoning>3 + 4</reasoning> <answer>8</answer>"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("correctness_reward_func", [2.0, 0.0, 0.0]),
        ("int_reward_func", [0.5, 0.5, 0.0]),
        ("strict_format_reward_func", [0.5, 0.0, 0.0]),
        ("soft_format_reward_func", [0.5, 0.5, 0.0]),
        ("xmlcount_reward_func", [0.5, 0.5, 0.0]),
    ],
)
def test_rewards_of_the_script_for_trl(monkeypatch: pytest.MonkeyPatch, reward: str, expected: list[float]) -> None:
    script = imported("from_trl", monkeypatch)
    completions = [[{"role": "assistant", "content": text}] for text in (GOOD, LOOSE, "seven")]
    prompts = [[{"role": "user", "content": "3 + 4?"}]] * 3
    assert getattr(script, reward)(prompts=prompts, completions=completions, answer=["7"] * 3) == expected


def test_word_problems_are_solved_by_their_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    script = imported("from_trl", monkeypatch)
    for row in script.word_problems(50):
        has, more = map(int, re.findall(r"\d+", row["question"]))
        result = has + more if "finds" in row["question"] else has - more
        assert script.extract_hash_answer(row["solution"]) == str(result)

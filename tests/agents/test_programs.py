"""Training of programs that talk to an OpenAI endpoint: the official client, exact repeats, resumed runs, gradients."""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import TrainerCallback

import podium
from podium.agents.programs.sessions import ProgramSession
from podium.errors import AgentError, ConfigError, ProofError
from podium.recipe import load
from podium.records import Sample
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer import samples
from tests.unit.agents_setup import tool_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:You are using")

ROWS = [{"prompt": [{"role": "user", "content": f"Row {i}"}], "level": i} for i in range(8)]
SHORT = {"generation_kwargs": {"eos_token_id": [2, *range(10, 60)]}, "max_completion_length": 400}
"""Turns of a few random tokens."""

AGENT = '''
from openai import OpenAI


def run(base_url, api_key, row, level):
    """Three turns, a worker between the first and the second, and a reward from the text alone."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def ask(messages):
        return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content

    messages, texts = list(row["prompt"]), []
    for turn in range(3):
        texts.append(ask(messages))
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": f"more {turn}"}]
        if turn == 0:
            texts.append(ask([{"role": "system", "content": "You work."}, {"role": "user", "content": str(level)}]))
    print("played", level)
    return {"length": float(sum(map(len, texts))), "letters": float(sum(c.isalpha() for c in "".join(texts)))}
'''


def config(folder: Path, **changes: Any) -> podium.GRPOConfig:
    given = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "product_precision": "float32",
        "learning_rate": 1e-3,
        **SHORT,
    }
    return podium.GRPOConfig(str(folder), **{**given, **changes})


def trainer(folder: Path, agent: Any, **changes: Any) -> podium.GRPOTrainer:
    model = tiny_model("llama", max_position_embeddings=4096)
    given = {"processing_class": tool_tokenizer(), "train_dataset": ROWS, **changes.pop("given", {})}
    return podium.GRPOTrainer(model, args=config(folder, **changes), agent=agent, **given)


def weights(made: podium.GRPOTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in made.model.parameters()]


@pytest.fixture
def agent_file(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT)
    return f"{tmp_path / 'agent.py'}:run"


@pytest.mark.slow
def test_a_file_is_trained_bit_equal_twice_and_after_it_was_stopped(tmp_path: Path, agent_file: str) -> None:
    runs = [trainer(tmp_path / name, agent_file, save_strategy="steps", save_steps=1) for name in ("a", "b")]
    for each in runs:
        each.train()
    assert all(torch.equal(x, y) for x, y in zip(*map(weights, runs), strict=True))
    logs = runs[0].state.log_history
    assert logs[0]["programs/requests"] == 4.0
    assert logs[0]["programs/forks"] == 1.0
    assert logs[0]["programs/failed"] == 0.0
    assert logs[0]["agent/letters"] > 0
    assert all(len(each.branches) == 1 for scored in runs[0].scored for each in scored.group.completions)
    assert all("played" in log for scored in runs[0].scored for log in scored.extras["program log"])
    resumed = trainer(tmp_path / "c", agent_file)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(x, y) for x, y in zip(weights(runs[0]), weights(resumed), strict=True))
    proof = json.loads((tmp_path / "a" / "proof.json").read_text())
    passed = {each["name"]: each["passed"] for each in proof["checks"]}
    assert passed["trained tokens are the sampled ones"]
    assert passed["targets are the drawn tokens"]
    assert passed["later turns from the kept cache"]


@pytest.mark.slow
def test_a_round_ahead_is_played_while_the_one_before_is_trained(tmp_path: Path, agent_file: str) -> None:
    changes: dict[str, Any] = {"async_rollouts": 1, "max_steps": 3}
    whole = trainer(tmp_path / "a", agent_file, **changes, save_strategy="steps", save_steps=1)
    whole.train()
    assert len(list((tmp_path / "a" / "checkpoint-2").glob("ahead-*.npz"))) == 1
    resumed = trainer(tmp_path / "b", agent_file, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(torch.equal(x, y) for x, y in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.slow
def test_a_shifted_mask_stops_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent_file: str
) -> None:
    made = samples.samples_of

    def shifted(*given: Any) -> list[Sample]:
        return [replace(each, actions=np.roll(each.actions, 1)) for each in made(*given)]

    monkeypatch.setattr(samples, "samples_of", shifted)
    with pytest.raises(ProofError) as raised:
        trainer(tmp_path / "run", agent_file).train()
    [found] = [each.what for each in raised.value.findings if each.code == "P017"]
    assert "was given to the policy and is a target" in found or "was drawn and is no target" in found


@pytest.mark.slow
def test_a_token_that_is_rendered_again_stops_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent_file: str
) -> None:
    """One token of a later turn is not the one that was drawn."""
    made = ProgramSession.settle

    def again(self: ProgramSession, placed: Any, drawn: Any, **times: Any) -> Any:
        answer = made(self, placed, drawn, **times)
        if len(placed.branch.turns) > 1 and len(drawn.token_ids) > 1:
            placed.branch.token_ids[-2] = (placed.branch.token_ids[-2] + 40) % 200 + 60
        return answer

    monkeypatch.setattr(ProgramSession, "settle", again)
    with pytest.raises(ProofError) as raised:
        trainer(tmp_path / "run", agent_file).train()
    assert any(each.code == "P018" and "first in turn 2" in each.what for each in raised.value.findings)


class Gradients(TrainerCallback):
    """Keeps those of a step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_forks_share_the_advantage_and_shared_tokens_are_trained_once(tmp_path: Path) -> None:
    """Against a sum by hand over the answers that the programs were given."""
    answers: dict[int, list[tuple[float, list[Any]]]] = defaultdict(list)
    lock = threading.Lock()

    def run(base_url: str, api_key: str, row: Any, level: int) -> float:
        client, own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0), []

        def ask(messages: list[Any]) -> str:
            made = client.chat.completions.create(
                model="policy", messages=messages, extra_body={"return_token_ids": True}
            )
            own.append((made.prompt_token_ids, made.choices[0].token_ids))  # type: ignore[attr-defined]
            return made.choices[0].message.content or ""

        first = ask(row["prompt"])
        talk = [*row["prompt"], {"role": "assistant", "content": first}]
        for text in ("one way", "another"):  # both go on with the first answer
            ask([*talk, {"role": "user", "content": text}])
        ask([{"role": "user", "content": "something else"}])
        with lock:
            answers[level].append((float(sum(own[0][1]) % 7), own))
        return float(sum(own[0][1]) % 7)

    kept = Gradients()
    changes = {"loss_type": "dapo", "scale_rewards": "none", "max_steps": 1, "max_grad_norm": 1e9, "learning_rate": 0.0}
    made = trainer(tmp_path, run, **changes, prove_first_batch=False, given={"callbacks": [kept]})
    made.train()
    model = tiny_model("llama", max_position_embeddings=4096)
    count = sum(len(ids) for group in answers.values() for _, own in group for _, ids in own)
    loss = torch.zeros(())
    for group in answers.values():
        mean = np.mean([reward for reward, _ in group])
        for reward, own in group:
            for before, ids in own:
                logps = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
                loss = loss - (reward - mean) * logps.gather(1, torch.tensor(ids)[:, None]).sum() / count
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(kept.kept[name], p.grad, atol=2e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert {len(c.sequences) for s in made.scored for c in s.group.completions} == {3}


def test_the_recipes_functions_score_where_a_program_returns_none(tmp_path: Path) -> None:
    def run(base_url: str, api_key: str, row: Any) -> None:
        client = OpenAI(base_url=base_url, api_key=api_key)
        with client.chat.completions.stream(model="policy", messages=row["prompt"]) as stream:
            stream.until_done()

    def length(completions: list[Any], level: list[int], **_: Any) -> list[float]:
        return [float(len(each[0]["content"])) for each in completions]

    made = trainer(tmp_path, run, max_steps=1, given={"reward_funcs": length})
    made.train()
    assert made.scored[0].names_K == ("length", "agent")
    assert np.isnan(made.scored[0].rewards_GK[:, 1]).all()
    assert (made.scored[0].rewards_GK[:, 0] > 0).any()
    assert made.evaluate(ROWS[:2])["eval_programs/requests"] == 1.0


@pytest.mark.slow
def test_a_command_is_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "my_agent.py"
    script.write_text(
        "import json, os\nfrom openai import OpenAI\n"
        "row = json.load(open(os.environ['PODIUM_ROW']))\n"
        "answer = OpenAI().chat.completions.create(model='policy', messages=row['prompt'])\n"
        "print('level', row['level'])\nprint(len(answer.choices[0].message.content))\n"
    )
    made = trainer(tmp_path / "run", {"command": [sys.executable, str(script)]}, max_steps=1)
    made.train()
    for scored in made.scored:
        lengths = [float(len(each.messages[0]["content"])) for each in scored.group.completions]
        assert scored.rewards_GK[:, 0].tolist() == lengths
        assert all(log.startswith("level") for log in scored.extras["program log"])


def test_a_recipe_names_an_agent_and_needs_no_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    lines = ["model: ./model", "dataset: rows.jsonl", "agent: agent.py:run", "max_steps: 1", "num_generations: 2"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "per_device_train_batch_size: 4", "use_cpu: true"]))
    assert [each.code for each in podium.check("run.yaml") if each.severity == "error"] == []
    made = load("run.yaml").trainer()
    assert [reward.name for reward in made.run.scoring.rewards] == ["agent"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines[:2], "agent: agent.py:walk", *lines[3:]]))
    [found] = [each for each in podium.check("run.yaml") if each.severity == "error"]
    assert found.code == "C065"
    assert "no function `walk`" in found.what
    assert "It has OpenAI, run" in found.what
    (tmp_path / "own.py").write_text(
        "class Solver:\n    def solve(self, base_url, answer, **row):\n        return 1.0\n"
    )
    (tmp_path / "run.yaml").write_text("\n".join([*lines[:2], "agent: own.py:Solver.solve", *lines[3:]]))
    [found] = [each for each in podium.check("run.yaml") if each.severity == "error"]
    call = "def solve(base_url, answer, **row): return Solver().solve(base_url, answer, **row)"
    assert found.fix == f"a function in own.py, `{call}`; then own.py:solve"


def test_checks_say_nothing_of_prompts_that_the_program_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a text, one longer than the context: neither lengths, nor a limit, nor a conversation to make of them."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    (tmp_path / "agent.py").write_text("def run(base_url, api_key, row):\n    return 1.0\n")
    rows = [{"prompt": "7" * (5000 if i == 3 else 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {"model": "./model", "dataset": "rows.jsonl", "num_generations": 2, "per_device_train_batch_size": 8}
    recipe |= {"max_prompt_length": 3, "max_completion_length": 300, "use_cpu": True, "max_steps": 1}

    def found(**more: Any) -> dict[str, str]:
        (tmp_path / "run.yaml").write_text(json.dumps({**recipe, **more}))
        return {each.code: each.what for each in podium.check("run.yaml")}

    assert {"D014", "D045"} < found(rewards=["answer_format"]).keys()
    with_agent = found(agent="agent.py:run")
    assert not {"D014", "D015", "D032", "D045"} & with_agent.keys()
    assert with_agent["D040"].startswith("rows.jsonl: 40 rows; the agent writes the prompts")
    assert "at most 300 tokens" in with_agent["D040"]
    assert load("run.yaml").trainer().run.agents.context_length == 512


@pytest.mark.parametrize(
    ("agent", "changes", "words"),
    [
        ("nowhere.py:run", {}, "there is no file nowhere.py"),
        (3, {}, "must be a function in a file, or a command"),
        ({"command": ["no-such-command"]}, {}, "there is no command no-such-command"),
        (lambda base_url, colour: 1.0, {}, "asks for `colour`"),
        (lambda base_url: 1.0, {"rollout_engine": "transformers"}, "takes requests while it samples"),
        (lambda base_url: 1.0, {"given": {"tools": [print]}}, "so does `tools`"),
        (lambda base_url: 1.0, {"teacher_model": "policy"}, "the program writes its prompts"),
    ],
)
def test_mistakes_are_one_message_before_weights_are_loaded(
    tmp_path: Path, agent: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        trainer(tmp_path, agent, **changes)
    assert raised.value.code == ("C063" if "teacher_model" in changes else "C065")


def test_a_run_of_which_every_program_fails_stops_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def run(row):\n    print('I was here')\n    return {}['key']\n")
    with pytest.raises(AgentError, match=r"(?s)All 8 episodes .*raised KeyError: 'key'.*I was here"):
        trainer(tmp_path / "run", f"{tmp_path / 'agent.py'}:run").train()


def test_a_round_of_which_every_program_fails_is_left_out_once_one_has_worked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that a program needs may be away for a minute."""
    calls = iter(range(1000))

    def run(base_url: str, api_key: str, row: Any) -> float:
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        made = client.chat.completions.create(model="policy", messages=row["prompt"])
        if 8 <= next(calls) < 16:
            raise ConnectionError("the search is away")
        return float(len(made.choices[0].message.content or ""))

    made = trainer(tmp_path, run, max_steps=3)
    made.train()
    told = [row["programs/failed"] for row in made.state.log_history if "programs/failed" in row]
    assert told == [0, 1, 0]
    assert "8 of 8 episodes" in caplog.text
    assert "the search is away" in caplog.text


def test_a_base_model_answers_completions(tmp_path: Path) -> None:
    """Text in, text and tokens out; stream or not, with log-probabilities."""

    def run(base_url: str, api_key: str, row: Any) -> float:
        client = OpenAI(base_url=base_url, api_key=api_key)
        made = client.completions.create(model="policy", prompt="1 + 1 =", max_tokens=5, logprobs=1, temperature=0.1)
        assert made.podium["not_as_asked"] == ["temperature"]  # type: ignore[attr-defined]
        assert made.podium["settings"]["temperature"] == 1.0  # type: ignore[attr-defined]
        choice = made.choices[0]
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == made.usage.completion_tokens <= 5  # type: ignore[union-attr]
        parts = list(client.completions.create(model="policy", prompt="2 + 2 =", stream=True))
        assert parts[-1].choices[0].finish_reason in ("stop", "length")
        return float(len(choice.text))

    made = trainer(tmp_path, run, max_steps=1, given={"processing_class": tiny_tokenizer()})
    made.train()
    assert {len(c.sequences) for s in made.scored for c in s.group.completions} == {2}

"""On-policy distillation: advantages of tokens by a teacher, on tiny models."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import podium
from podium import GRPOConfig, GRPOTrainer
from podium.errors import ConfigError, DataError, overrule
from podium.models import loading
from podium.runs.monitors import OF_SIGNAL
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer import samples

_spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).parents[1] / "vllm" / "stand_in.py")
assert _spec is not None
assert _spec.loader is not None
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)

ROWS = [{"prompt": f"{n}+1="} for n in range(8)]


def spread(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def trainer(folder: Path, teacher: str, rows: Sequence[Mapping[str, Any]] = ROWS, **settings: Any) -> GRPOTrainer:
    settings = {"max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", **settings}
    args = GRPOConfig(
        str(folder),
        teacher_model=teacher,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        report_to="none",
        use_cpu=True,
        product_precision="float32",
        **settings,
    )
    return GRPOTrainer(tiny_model(), spread, args, rows, processing_class=tiny_tokenizer())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments and results of `distilled`."""
    seen, original = list[tuple[Any, ...]](), samples.distilled

    def watched(*given: Any) -> Any:
        seen.append((*given, original(*given)))
        return seen[-1][-1]

    monkeypatch.setattr(samples, "distilled", watched)
    return seen


def plain(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Log-probabilities of a completion's tokens, from the model's own logits."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_the_advantage_of_a_token_is_the_teachers(teacher: str, tmp_path: Path, calls: list[Any]) -> None:
    run = trainer(tmp_path, teacher, teacher_coef=0.5, max_steps=1)
    student = tiny_model().eval()
    run.train()
    theirs = AutoModelForCausalLM.from_pretrained(teacher).eval()
    total = 0.0
    count = 0
    assert len(calls) == 8
    for sample, _, _, coef, found in calls:
        assert coef == 0.5
        text = (sample.prompt_ids, sample.token_ids)
        gap = plain(theirs, *text) - plain(student, *text)
        np.testing.assert_allclose(found.advantages_A, sample.advantage + 0.5 * gap, atol=1e-4)
        total -= gap.sum()
        count += len(gap)
    [logged] = [row["teacher/kl"] for row in run.state.log_history if "teacher/kl" in row]
    assert logged == pytest.approx(total / count, abs=1e-4)


def test_a_teacher_that_forbids_drawn_tokens_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path / "run", save_tiny_model(tmp_path / "teacher", seed=5), max_steps=1)
    head = run.run.objective.teacher.model.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[::2] = -1e9
    run.train()
    [finding] = [finding for finding in run.health.found if finding.code == "C063"]
    assert "drawn tokens of this round a probability of 0" in finding.what


@pytest.mark.slow
def test_a_teacher_behind_a_server_is_the_same(teacher: str, tmp_path: Path, calls: list[Any]) -> None:
    """Rehearsed with vLLM's routes over the same tiny model."""
    trainer(tmp_path / "a", teacher, max_steps=1).train()
    here = [call[-1] for call in calls]
    calls.clear()
    with stand_in.StandIn(teacher) as server:
        run = trainer(tmp_path / "b", server.url, max_steps=1)
        run.train()
        asked = [body for route, body in server.requests if route == "/v1/completions"]
    there = [call[-1] for call in calls]
    assert len(asked) == 8
    assert all(body["prompt_logprobs"] == 0 and body["max_tokens"] == 1 for body in asked)
    for one, other in zip(here, there, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.advantages_A, other.advantages_A, atol=1e-4)


def test_a_server_is_asked_before_weights(tmp_path: Path, no_weights: None) -> None:
    with pytest.raises(ConfigError, match="No vLLM server answers") as raised:
        trainer(tmp_path, "http://127.0.0.1:9")
    assert raised.value.code == "C063"
    with pytest.raises(ConfigError, match="at temperature 1 alone"):
        GRPOConfig("out", teacher_model="http://127.0.0.1:9", temperature=0.8)
    with stand_in.StandIn(extended(tmp_path / "other")) as server, pytest.raises(ConfigError, match="other tokenizer"):
        trainer(tmp_path, server.url)


@pytest.mark.slow
def test_a_server_without_log_probabilities_is_named(teacher: str, tmp_path: Path) -> None:
    with stand_in.StandIn(teacher, break_answer=lambda answer: {"choices": [{}]}) as server:
        run = trainer(tmp_path, server.url, max_steps=1)
        with pytest.raises(podium.errors.EngineError, match="gives no `prompt_logprobs`"):
            run.train()


@pytest.mark.slow
def test_the_weight_moves_on_a_straight_line(teacher: str, tmp_path: Path, calls: list[Any]) -> None:
    trainer(tmp_path, teacher, max_steps=3, teacher_coef=1.0, teacher_coef_end=0.0).train()
    assert [call[3] for call in calls] == [1.0] * 8 + [0.5] * 8 + [0.0] * 8


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_without_a_reward(teacher: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher, max_steps=40, learning_rate=3e-3, reward_weights=[0.0])
    run.train()
    divergence = [row["teacher/kl"] for row in run.state.log_history if "teacher/kl" in row]
    assert len(divergence) == 40
    assert np.mean(divergence[-5:]) < 0.7 * np.mean(divergence[:5])
    said = {name for row in run.state.log_history for name in row if name.startswith("finding/")}
    assert not said & {f"finding/{code}" for code in OF_SIGNAL}, "rewards of weight 0 teach nothing, and need not"


def test_the_policy_teaches_itself_behind_another_prompt(tmp_path: Path, calls: list[Any]) -> None:
    rows = [{**row, "teacher_prompt": f"The answer is {n + 1}. {row['prompt']}"} for n, row in enumerate(ROWS)]
    run = trainer(tmp_path, "policy", rows, max_steps=1, reward_weights=[0.0])
    run.train()
    student, tokenizer = tiny_model().eval(), tiny_tokenizer()
    for sample, _, _, _, found in calls:
        n = int(tokenizer.decode(sample.prompt_ids).partition("+")[0])
        other = tokenizer(rows[n]["teacher_prompt"])["input_ids"]
        gap = plain(student, other, sample.token_ids) - plain(student, sample.prompt_ids, sample.token_ids)
        np.testing.assert_allclose(found.advantages_A, gap, atol=1e-4)
        assert np.abs(gap).max() > 1e-3


def test_a_resumed_run_is_the_same(teacher: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2}
    how["prove_first_batch"] = False
    whole = trainer(tmp_path / "a", teacher, **how)
    whole.train()
    for step in (1, 2):  # in the middle of a round, and at its end
        again = trainer(tmp_path / f"b{step}", teacher, **how)
        again.train(resume_from_checkpoint=str(tmp_path / f"a/checkpoint-{step}"))
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_policy", refused)
    monkeypatch.setattr(loading, "load_to_sample", refused)


def extended(folder: Path) -> str:
    """A teacher whose tokenizer has a token more."""
    save_tiny_model(folder, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<answer>"])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("door", ["trainer", "check"])
def test_another_tokenizer_is_refused_before_weights(door: str, tmp_path: Path) -> None:
    other = extended(tmp_path / "other")
    says = "has another tokenizer: 1 tokens have other ids, as '<answer>' (there 260, here none)"
    if door == "trainer":
        with pytest.raises(ConfigError) as raised:
            trainer(tmp_path, other)
        assert says in raised.value.what
        assert not overrule("C063"), "nothing could run against it"
        return
    args = GRPOConfig("out", teacher_model=other, per_device_train_batch_size=4, num_generations=4)
    model = save_tiny_model(tmp_path / "model")
    [found] = [each for each in podium.check(model, spread, args, ROWS) if each.code == "C063"]
    assert says in found.what
    assert found.severity == "error"


@pytest.mark.usefixtures("no_weights")
def test_a_teacher_that_is_not_there_is_refused_before_weights(tmp_path: Path) -> None:
    with pytest.raises(podium.errors.ModelError, match="There is no folder"):
        trainer(tmp_path, "./nowhere")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("door", ["trainer", "check"])
@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ("policy", "the difference is always 0"),
        ("short", "reads 8 tokens at most, and a rollout may have 4 of its prompt and 8 of its completion"),
    ],
)
def test_a_teacher_that_cannot_judge_is_refused_before_weights(
    teacher: str, says: str, door: str, tmp_path: Path
) -> None:
    if teacher == "short":
        teacher = save_tiny_model(tmp_path / "short")
        config = AutoConfig.from_pretrained(teacher)
        config.max_position_embeddings = 8
        config.save_pretrained(teacher)
    if door == "trainer":
        with pytest.raises(ConfigError, match=says):
            trainer(tmp_path / "run", teacher)
        return
    args = GRPOConfig(
        "out", teacher_model=teacher, per_device_train_batch_size=4, num_generations=4, max_completion_length=8
    )
    [found] = [x for x in podium.check(save_tiny_model(tmp_path / "model"), spread, args, ROWS) if x.code == "C063"]
    assert says in found.what
    assert found.severity == "error"


@pytest.mark.usefixtures("no_weights")
def test_a_teachers_prompt_that_is_too_long_is_refused_before_weights(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "9+1=", "teacher_prompt": "Ten. " * 200}]
    with pytest.raises(DataError, match="row 8"):
        trainer(tmp_path, "policy", rows)


def test_a_weight_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="teacher_coef 2 without teacher_model"):
        GRPOConfig("out", teacher_coef=2.0)
    with pytest.raises(ConfigError, match="teacher_coef_end 0 without teacher_model"):
        GRPOConfig("out", teacher_coef_end=0.0)

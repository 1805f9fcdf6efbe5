"""A real `trl.GRPOTrainer` and Podium's with the same tools, environments and episodes move weights alike.

Both run whole, with `model.generate` replaced by the same script. Among the episodes: no call, one, two in one turn,
two in a row, a failed one, an unknown tool, a result that does not fit, and a last turn that is cut.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor
from trl.chat_template_utils import qwen2_5_chat_template

from podium import GRPOConfig
from podium.records import Sample
from podium.testing import save_tiny_model, tiny_tokenizer
from podium.trainer import samples
from podium.trainer.trainer import GRPOTrainer
from tests.unit.agents_setup import called, multiply

SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:You are using")

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Row {i}"}], "number": i} for i in range(2)])
FIRST = (
    "No call.",
    called("multiply", a=1, b=2),
    called("multiply", a=3, b=2) + "\n" + called("multiply", a=4, b=2),
    called("multiply", a=5, b=2),
    called("multiply", a=6),
    called("nothing", a=1),
    called("multiply", a=10**70, b=10**70),
    called("multiply", a=8, b=2),
)
"""First turns by completion."""
AFTER = {
    "2": "Two.",
    "8": "Eight, after six.",
    "10": called("multiply", a=50, b=2),
    "100": "Hundred.",
    "16": "Long. " * 60,
}
"""Later turns by the last result."""
MAX_LENGTH = 320


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = qwen2_5_chat_template
    made.model_max_length = 10**6
    return made


def next_turn(text: str, row: int) -> str:
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    return AFTER.get(results[-1], "It failed.") if results else FIRST[row]


def install(trainer: Any) -> None:
    """Have the script sample in place of the model."""
    own = trainer.processing_class

    def generate(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        texts = [own.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)]
        turns = [own(next_turn(text, i))["input_ids"] + [own.eos_token_id] for i, text in enumerate(texts)]
        turns = [turn[:MAX_LENGTH] for turn in turns]
        width = max(map(len, turns))
        padded = [[*turn, *[own.pad_token_id] * (width - len(turn))] for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    trainer.model.generate = generate


def score(completions: Sequence[Any], **_: Any) -> list[float]:
    """Different in every completion of a group."""
    return [0.3 * i - 0.01 * len(str(completion)) for i, completion in enumerate(completions)]


def settings(folder: Any, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": MAX_LENGTH,
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **changes,
    }


def moved(trainer: Any) -> Tensor:
    install(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    return torch.cat([(p - old).flatten() for p, old in zip(trainer.model.parameters(), before, strict=True)])


def both(model: str, given: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, Tensor, Any, Tensor]:
    """TRL's trainer and Podium's after training, each with the movement of its weights."""
    same = {"model": model, "train_dataset": ROWS, "processing_class": tokenizer(), **arguments}
    theirs = trl.GRPOTrainer(args=trl.GRPOConfig(**given), **same)
    expected = moved(theirs)
    same["processing_class"] = tokenizer()
    ours = GRPOTrainer(args=GRPOConfig(**given, prove_first_batch=False, product_precision="float32"), **same)
    return theirs, expected, ours, moved(ours)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1, max_position_embeddings=4096)


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


def distance(got: Tensor, expected: Tensor) -> float:
    assert expected.norm() > 1e-3, "nothing moved, so nothing is compared"
    return float((got - expected).norm() / expected.norm())


SAME_IN_THE_LOG = (
    "num_tokens", "reward", "reward_std", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "completions/mean_terminated_length", "tools/call_frequency",
    "tools/failure_frequency", "grad_norm",
)  # fmt: skip


def assert_same_log(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        names = [name for name in SAME_IN_THE_LOG if name in other]
        assert {name: mine[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-3)


OTHERS = [(loss_type, beta) for loss_type in ("dapo", "grpo", "dr_grpo") for beta in (0.0, 0.04)][:-1]


@pytest.mark.parametrize(("loss_type", "beta"), [("dr_grpo", 0.04), *[pytest.param(*x, marks=SLOW) for x in OTHERS]])
def test_tools_move_weights_as_trl(model: str, tmp_path: Any, loss_type: str, beta: float) -> None:
    given = settings(tmp_path, loss_type=loss_type, beta=beta)
    theirs, expected, ours, got = both(model, given, {"reward_funcs": score, "tools": [multiply]})
    assert distance(got, expected) < 3e-5
    assert_same_log(ours, theirs)
    first = theirs.state.log_history[0]
    assert first["tools/call_frequency"] == 9 / 8
    assert first["tools/failure_frequency"] == pytest.approx(2 / 9)
    finishes = [each.finish for scored in ours.scored for each in scored.group.completions]
    assert finishes == ["stop"] * 6 + ["context", "length"]
    assert first["completions/clipped_ratio"] == 1 / 8


@pytest.mark.slow
def test_a_mask_that_is_shifted_by_one_is_caught(model: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = samples.samples_of

    def shifted(*args: Any) -> list[Sample]:
        return [dataclasses.replace(each, actions=np.roll(each.actions, 1)) for each in right(*args)]

    monkeypatch.setattr(samples, "samples_of", shifted)
    given = settings(tmp_path, loss_type="dapo")
    _, expected, _, got = both(model, given, {"reward_funcs": score, "tools": [multiply]})
    assert distance(got, expected) > 1e-2


class Shop:
    """An environment whose prompts differ, with a reward of its own."""

    asked = 0

    def reset(self, number: int, **_: Any) -> str:
        self.total = 0
        return f" of {number + 5}"

    def multiply(self, a: int, b: int) -> int:
        """Multiply.

        Args:
            a: The first factor.
            b: The second factor.
        """
        self.total += a * b % 7
        return a * b

    def get_reward(self) -> float:
        return float(self.total)


@pytest.mark.slow
def test_environments_move_weights_as_trl(model: str, tmp_path: Any) -> None:
    given = settings(tmp_path, loss_type="dapo", beta=0.04)
    arguments = {"reward_funcs": score, "environment_factory": Shop}
    theirs, expected, ours, got = both(model, given, arguments)
    assert distance(got, expected) < 3e-5
    assert_same_log(ours, theirs)
    name = "rewards/Shop/mean"
    assert ours.state.log_history[0][name] == theirs.state.log_history[0][name] > 0


@pytest.mark.slow
def test_prompts_that_differ_in_a_group_move_weights_as_trl(model: str, tmp_path: Any) -> None:
    class Dice(Shop):
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            self.number = type(self).made

        def reset(self, number: int, **_: Any) -> str:
            self.total = 0
            return f" {'x' * self.number}"

    given = settings(tmp_path, loss_type="grpo")

    def fresh() -> type:
        return type("Dice", (Dice,), {"made": 0})

    same = {"model": model, "train_dataset": ROWS, "reward_funcs": score}
    theirs = trl.GRPOTrainer(
        args=trl.GRPOConfig(**given), environment_factory=fresh(), processing_class=tokenizer(), **same
    )
    expected = moved(theirs)
    args = GRPOConfig(**given, prove_first_batch=False, product_precision="float32")
    ours = GRPOTrainer(args=args, environment_factory=fresh(), processing_class=tokenizer(), **same)
    assert distance(moved(ours), expected) < 3e-5
    assert_same_log(ours, theirs)


def test_rollout_func_with_a_mask_moves_weights_as_trl(model: str, tmp_path: Any) -> None:
    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        own = trainer.processing_class
        completions = [
            own(f"drawn {i} given {i} drawn")["input_ids"] + [own.eos_token_id] for i, _ in enumerate(prompts)
        ]
        return {
            "prompt_ids": [own.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts],
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": [[int(not 8 <= at < 15) for at, _ in enumerate(ids)] for ids in completions],
            "bonus": [float(i) for i, _ in enumerate(prompts)],
        }

    def bonus(bonus: list[float], **_: Any) -> list[float]:
        return [each % 3 for each in bonus]

    given = settings(tmp_path, loss_type="dapo")
    theirs, expected, ours, got = both(model, given, {"reward_funcs": bonus, "rollout_func": rollout})
    assert distance(got, expected) < 3e-5
    assert_same_log(ours, theirs)

"""A device without memory left: one message that says what holds it and what to type; budgets that know the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.engines.live import engine
from podium.errors import ModelError
from podium.models import devices, memory
from podium.models.memory import fewer_rows, smaller_packs
from podium.records import RolloutRequest
from podium.testing import tiny_model

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize(
    ("where", "doing", "fix"),
    [
        ("step.forward_backward", "training", "tokens_per_pack: "),
        ("rollouts.draw", "sampling", "per_device_train_batch_size: 8"),
    ],
)
def test_it_says_what_is_held_and_what_to_lower(where: str, doing: str, fix: str, make_trainer: Any) -> None:
    trainer = make_trainer()
    owner, _, method = where.partition(".")
    setattr(getattr(trainer, owner), method, full)
    with pytest.raises(ModelError) as error:
        trainer.train()
    message = str(error.value)
    assert f"used up while {doing}" in message
    assert "Held all the time: weights 0.0 GB" in message
    assert "Tried to allocate 2.00 GiB." in message
    assert "See the documentation" not in message
    assert (error.value.code, fix in message) == ("M024", True)


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "says"),
    [(4096, False, "tokens_per_pack: 2048"), (128, False, "gradient_checkpointing"), (128, True, "max_completion")],
)
def test_packs_get_smaller_before_anything_else(tokens: int, checkpointing: bool, says: str) -> None:
    assert says in smaller_packs(tokens, checkpointing=checkpointing)


def test_fewer_completions_at_once_still_make_whole_groups() -> None:
    assert "per_device_train_batch_size: 16" in fewer_rows(48, 16)
    assert "num_generations: 8" in fewer_rows(16, 16)


@pytest.mark.parametrize(("free", "rows"), [(None, 512), (1 << 40, 512), (40 << 20, 205), (1 << 20, 4)])
def test_rows_follow_the_free_memory(free: int | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.KINDS, "cpu", devices.KINDS["cuda"])
    monkeypatch.setattr(engine, "free_bytes", lambda _: free)
    model = tiny_model("llama")  # 2 layers of 2 key/value heads of 8, float32: 256 bytes a token
    request = RolloutRequest(token_ids=(1,) * 40, prompt_id=0, num_completions=4, max_tokens=458)
    found = engine.rows_that_fit(model, [request], torch.device("cpu"))
    assert found == pytest.approx(rows, abs=8)


def test_packs_follow_the_free_memory(make_trainer: Any, as_if_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for free in (None, 8 << 30, 1 << 30, 1 << 20):
        monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
        sizes.append(make_trainer().run.policy.tokens_per_pack)
    usual, large, small, least = sizes
    assert usual > large > small > least == 128
    assert large & (large - 1) == 0 or large % (1 << (large.bit_length() - 2)) == 0

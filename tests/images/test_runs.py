"""Runs on images from their first step to their saved model, on tiny models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.families import tiny
from podium import GRPOConfig, GRPOTrainer
from podium.errors import ConfigError, DataError, PodiumError
from podium.models.images import _in_order as in_order
from podium.models.packing import unscored
from podium.trainer.teacher import as_teacher_sees
from tests.images.tiny import picture, processor_of

FAMILY = "qwen2_5_vl"
ROWS = [
    {"prompt": [{"role": "user", "content": "What is this?"}], "image": picture(seed), "answer": str(seed)}
    for seed in range(6)
]


def varied(completions: list[Any], **_: Any) -> list[float]:
    """How many characters of a completion differ."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def made(folder: Path, rows: Sequence[Any] = ROWS, *, streamed: bool = False, **changes: Any) -> GRPOTrainer:
    data = Dataset.from_list([*rows])
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "on_finding": {"W120": "ignore"},
        **changes,
    }
    return GRPOTrainer(
        model=tiny(FAMILY),
        reward_funcs=varied,
        args=GRPOConfig(str(folder), **settings),
        train_dataset=data.to_iterable_dataset() if streamed else data,
        processing_class=processor_of(FAMILY),
    )


class StopAfter(TrainerCallback):
    """Ends a run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.steps


def digest(trainer: GRPOTrainer) -> str:
    whole = hashlib.sha256()
    for _, tensor in sorted(trainer.model.state_dict().items()):
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "steps_per_generation": 2},
        {"async_rollouts": 2},
        {"train_image_encoder": True, "beta": 0.05, "num_iterations": 2},
    ],
    ids=["rounds of several steps", "rounds ahead", "encoder and reference"],
)
@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_goes_on_bit_by_bit(tmp_path: Path, changes: dict[str, Any], cut: int) -> None:
    """A round that is saved has no pixels: they are read again from its rows."""
    whole = made(tmp_path / "whole", **changes)
    whole.train()
    stopped = made(tmp_path / "parts", **changes)
    stopped.add_callback(StopAfter(cut))
    stopped.train()
    assert digest(stopped) != digest(whole)
    resumed = made(tmp_path / "parts", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(whole)


def test_the_saved_model_reads_images_with_its_own_processor(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=1, save_strategy="no", train_image_encoder=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "processor_config.json").is_file()
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    saved = trainer.model.state_dict()
    assert {*again.state_dict()} == {*saved}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


def rolled(features: Any, index_X: Any) -> Any:
    return in_order(features, index_X.roll(1))


def lost(features: Any, index_X: Any) -> Any:
    return in_order([0 * x for x in features], index_X)


@pytest.mark.parametrize("wrong", [rolled, lost])
def test_images_that_do_not_reach_their_tokens_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any, Any], Any]
) -> None:
    """The proof compares with the model's own forward on pixels."""
    monkeypatch.setattr("podium.models.images._in_order", wrong)
    trainer = made(tmp_path, max_steps=1, save_strategy="no", train_image_encoder=True)
    with pytest.raises(PodiumError, match="P0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_token_of_an_image_in_a_text_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows are checked when they are drawn."""
    monkeypatch.setattr("podium.data.survey.TRAINER_ROWS", 2)
    spelled = {**ROWS[0], "prompt": [{"role": "user", "content": "<image>"}], "image": None}
    trainer = made(tmp_path, [*ROWS[:2], spelled], save_strategy="no", shuffle_dataset=False, streamed=True)
    with pytest.raises(DataError, match="a row of the stream has no image, and its text has `<image>`"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_completion_of_text_has_no_token_that_stands_for_an_image(tmp_path: Path) -> None:
    """It may be trained on in one forward with images, of which the model counts these tokens."""
    text = {"prompt": [{"role": "user", "content": "What is this?"}], "image": None, "answer": "9"}
    trainer = made(tmp_path, [text, *ROWS], save_strategy="no")
    model = trainer.model
    likely = model.config.image_token_id
    with torch.no_grad():
        model.get_output_embeddings().weight[likely] *= 100  # the first or the last token of each distribution
        own = model(input_ids=torch.arange(4, 68)[None]).logits.argmax(-1)
    assert (own == likely).float().mean() > 0.2
    [scored] = trainer.generate_completions([text], num_generations=16)
    assert not any(likely in completion.token_ids for completion in scored.group.completions)


@pytest.mark.parametrize("asks", ["What is this?", "What is this? A square."])
@pytest.mark.parametrize("teacher", ["policy", "other"])
def test_a_teacher_sees_the_images_of_the_row(tmp_path: Path, teacher: str, asks: str) -> None:
    """Behind its own prompt as behind the row's: where that says the same, the policy is its own equal."""
    if teacher == "other":
        tiny(FAMILY).save_pretrained(tmp_path / "other")
        processor_of(FAMILY).tokenizer.save_pretrained(tmp_path / "other")
    rows = [{**row, "teacher_prompt": [{"role": "user", "content": asks}]} for row in ROWS]
    source = teacher if teacher == "policy" else str(tmp_path / teacher)
    changes = {"teacher_model": source, "product_precision": "float32"}
    trainer = made(tmp_path / "run", rows, save_strategy="no", max_steps=1, **changes)
    trainer.train()
    assert (abs(trainer.state.log_history[0]["teacher/kl"]) < 1e-5) == (asks == "What is this?")


def test_a_teacher_of_text_alone_is_refused_before_weights(tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path / "text")
    processor_of(FAMILY).tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"row 0 has images, and .*text, the teacher, is shown text alone"):
        made(tmp_path, teacher_model=str(tmp_path / "text"))


def test_what_was_given_later_keeps_its_place_behind_a_teachers_prompt(tmp_path: Path) -> None:
    trainer = made(tmp_path, save_strategy="no")
    builder = trainer.run.rows.builder
    own, longer = (
        builder({"prompt": [{"role": "user", "content": text}], "image": picture(0)}, id=0, row_index=0)
        for text in ("What is this?", "What is this? A square.")
    )
    assert own is not None
    assert longer is not None
    given = replace(own.images[0], start=len(own.token_ids) + 3)
    sample = unscored(own.token_ids, [5] * 60, (*own.images, given))
    [seen] = as_teacher_sees([sample], {0: longer})
    assert seen.prompt_ids == longer.token_ids
    assert seen.images[0] == longer.images[0]
    assert [images.start for images in seen.images] == [0, len(longer.token_ids) + 3]


def test_images_that_begin_after_the_rows_that_were_searched_are_not_sampled_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a model computes behind images, Gemma's attention to both sides for example, is known from a trial alone."""
    monkeypatch.setattr("podium.trainer.assembly.SEARCHED_ROWS", 2)
    rows = [{**row, "image": None} for row in ROWS[:2]] + ROWS[2:]
    trainer = made(tmp_path, rows, save_strategy="no", shuffle_dataset=False)
    with pytest.raises(DataError, match=r"row 2 has images, .* was not tried"):
        trainer.train()
    made(tmp_path, rows[1:], save_strategy="no", max_steps=1).train()


def test_rows_that_are_read_once_may_have_images(tmp_path: Path) -> None:
    """The model is tried with an image that is drawn for it, as the first row cannot be looked at."""
    stream = Dataset.from_list(ROWS).to_iterable_dataset().map(lambda row: row)
    settings = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=tiny("gemma3"),
        reward_funcs=varied,
        args=settings,
        train_dataset=stream,
        processing_class=processor_of("gemma3"),
    )
    assert trainer.step.policy.forward.path == "padded"
    trainer.train()

"""A run records itself, findings are said, and stop it or send it back, on a tiny model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import podium
from podium.errors import ConfigError, DataError
from podium.runs.doctor import examine
from podium.runs.find_model import ModelSource, find_model
from podium.runs.shipping.card import model_card


def one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_every_step_is_recorded_whatever_is_logged(make_trainer: Callable) -> None:
    trainer = make_trainer(max_steps=3, logging_steps=100, hub_token="hf_secret")
    trainer.train()
    run = podium.Run.load(trainer.args.output_dir)
    assert run.metrics["step"].tolist() == [1, 2, 3]
    assert (
        run.metrics[["loss", "grad_norm", "reward", "learning_rate", "entropy", "time/monitor_seconds"]]
        .notna()
        .all(None)
    )
    assert (run.metrics["health/update_ratio"] > 0).all()
    assert run.metrics["health/logp_gap_mean"].max() < 1e-4
    assert run.rollouts.groupby("step").size().tolist() == [16, 16, 16]
    assert run.rollouts["policy_step"].tolist() == (run.rollouts["step"] - 1).tolist()
    by_step = run.rollouts.groupby("step")["reward"].mean()
    assert by_step.tolist() == pytest.approx(run.metrics["reward"].tolist())
    assert run.config["learning_rate"] == 0.1
    assert run.environment["data"]["rows"] == 12
    assert "sha256" in run.environment["rewards"]["digits"]
    for path in ("environment.json", "config.yaml"):
        assert "hf_secret" not in (run.folder / path).read_text()


def test_what_is_logged_is_what_is_recorded(make_trainer: Callable) -> None:
    trainer = make_trainer(
        max_steps=2, beta=0.1, num_iterations=2, per_device_train_batch_size=8, gradient_accumulation_steps=2
    )
    trainer.train()
    run = podium.Run.load(trainer.args.output_dir)
    for entry, row in zip(trainer.state.log_history, run.history, strict=False):
        for name in ("loss", "grad_norm", "reward", "kl", "entropy", "time/train_seconds"):
            if name in entry:
                assert row.values[name] == pytest.approx(entry[name], rel=1e-3, abs=1e-4), name


def test_a_resumed_run_goes_on_with_its_record(make_trainer: Callable) -> None:
    make_trainer(save_strategy="steps", save_steps=1).train()
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    folder = Path(trainer.args.output_dir)
    whole = podium.Run.load(folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    again = podium.Run.load(folder)
    assert again.metrics["step"].tolist() == [1, 2]
    assert again.rollouts["completion"].tolist() == whole.rollouts["completion"].tolist()
    assert [path.name for path in (folder / "earlier-1").iterdir()] == ["checkpoint-2"], "what is done again, alone"


@pytest.mark.slow
def test_a_resumed_run_is_looked_at_as_one_that_was_never_stopped(make_trainer: Callable) -> None:
    """Nothing is said twice, and what takes several steps to show is seen across the stop."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    never = podium.Run.load(trained(make_trainer(one, max_steps=6, **settings)))
    expected = never.findings[["code", "severity", "step", "what"]]
    assert expected["step"].min() == 3, "after the checkpoint, with a step before it"
    for step in (2, 4):
        resumed = make_trainer(one, max_steps=6, **settings)
        resumed.train(resume_from_checkpoint=str(never.folder / f"checkpoint-{step}"))
        found = podium.Run.load(resumed.args.output_dir).findings
        assert found[["code", "severity", "step", "what"]].equals(expected)


def test_a_run_that_is_done_takes_no_step_when_it_is_resumed(make_trainer: Callable) -> None:
    """In the middle of an epoch: the Trainer by itself looks whether it is done after a step."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    folder = trained(make_trainer(**settings))
    resumed = make_trainer(**settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert podium.Run.load(folder).metrics["step"].tolist() == [1, 2]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    saved = load_file(folder / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in resumed.model.state_dict().items() if name in saved)


@pytest.mark.slow
def test_a_run_in_the_place_of_a_longer_one_keeps_its_own_checkpoints(make_trainer: Callable) -> None:
    """Checkpoints are rotated by their steps: the longer run's would have outlived all of the new one's."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    folder = trained(make_trainer(max_steps=3, **settings))
    assert trained(make_trainer(max_steps=2, seed=7, **settings)) == folder
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2"]
    assert sorted(path.name for path in (folder / "earlier-1").glob("checkpoint-*")) == ["checkpoint-3"]
    assert podium.Run.load(folder / "earlier-1").metrics["step"].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_that_dies_does_not_show_the_earlier_end(make_trainer: Callable) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    first = make_trainer(max_steps=2, **settings)
    folder = trained(first)
    first.save_model()
    measured = [folder / "evaluation" / name for name in ("before.json", "after.json", "comparison.json")]
    measured[0].parent.mkdir()
    for path in (*measured, folder / "report.html"):
        path.write_text("{}")
    assert find_model(str(folder)).base == str(folder)
    make_trainer(max_steps=2, **settings).train(resume_from_checkpoint=True)
    assert find_model(str(folder)).base == str(folder), "nothing was trained since"
    trained(make_trainer(max_steps=3, **settings), resume_from_checkpoint=True)  # and does not save its model
    assert find_model(str(folder)).base == str(folder / "checkpoint-3")
    assert sorted(path.name for path in measured[0].parent.iterdir()) == ["before.json"]
    assert not (folder / "report.html").exists()
    moved = folder / "earlier-1"
    assert sorted(path.name for path in moved.rglob("*.*")) == ["after.json", "comparison.json", "report.html"]
    assert "after 2 optimizer steps" in model_card(ModelSource(base=str(folder)), address="x")
    trained(make_trainer(max_steps=3, **settings), resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert load_file(folder / "earlier-2" / "model.safetensors"), "of a step that is done again"


def test_a_new_run_shows_nothing_of_the_one_before(make_trainer: Callable) -> None:
    first = make_trainer(max_steps=2, lr_scheduler_type="constant")
    folder = trained(first)
    first.save_model()
    for name in ("notes.txt", "report.html", "evaluation/after.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    trained(make_trainer(max_steps=1))
    assert not any((folder / name).exists() for name in ("config.json", "report.html", "evaluation", "tokenizer.json"))
    assert find_model(str(folder / "earlier-1")).base == str(folder / "earlier-1")
    assert podium.Run.load(folder / "earlier-1").evaluations == {"after": {}}
    assert (folder / "notes.txt").exists(), "no file of a run"


def test_the_model_that_a_run_begins_with_is_not_moved(make_trainer: Callable) -> None:
    first = make_trainer(max_steps=2)
    folder = trained(first)
    first.save_model()
    trained(make_trainer(model=str(folder), max_steps=1, save_strategy="steps", save_steps=1))
    assert (folder / "model.safetensors").is_file()
    assert find_model(str(folder)).base == str(folder / "checkpoint-1"), "which is newer"


def trained(trainer: Any, **how: Any) -> Path:
    trainer.train(**how)
    return Path(trainer.args.output_dir)


def test_findings_are_said_recorded_and_tracked(make_trainer: Callable, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(one, max_steps=4, max_completion_length=16)
    with caplog.at_level(logging.INFO, logger="podium.trainer.health"):
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("M102")]
    assert len(said) == 1
    assert "Constant reward" in said[0]
    codes = podium.Run.load(trainer.args.output_dir).findings["code"].tolist()
    assert codes.count("M102") == 1
    assert any(entry.get("finding/M102") == 1 for entry in trainer.state.log_history)
    assert examine(trainer.args.output_dir).issues[0].finding.code == "M102"


def test_a_finding_stops_the_run_with_a_checkpoint(make_trainer: Callable) -> None:
    trainer = make_trainer(one, max_steps=9, on_finding={"M102": "stop"})
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.health.decision == "stop"
    assert (Path(trainer.args.output_dir) / "checkpoint-3/trainer_state.json").is_file()


@pytest.mark.parametrize(("wish", "steps"), [({}, 3), ({"M138": "ignore"}, 4)])
def test_strict_stops_at_an_error_that_is_not_ignored(make_trainer: Callable, wish: Any, steps: int) -> None:
    """There are gradients, and no weight moves; the warnings of the same run (M102) end nothing."""
    trainer = make_trainer(max_steps=4, strict=True, on_finding=wish)
    trainer.create_optimizer()
    trainer.optimizer.step = lambda *_, **__: None
    trainer.train()
    assert trainer.state.global_step == steps


def test_strict_does_not_stop_at_a_warning(make_trainer: Callable) -> None:
    trainer = make_trainer(one, max_steps=4, strict=True)
    trainer.train()
    assert trainer.state.global_step == 4
    assert "M102" in podium.Run.load(trainer.args.output_dir).findings["code"].tolist()


def test_a_finding_sends_the_run_back_to_a_healthy_checkpoint(make_trainer: Callable) -> None:
    """The weights are spoilt once, in step 4; the run returns to step 2 or 3, slower, and gets through."""
    trainer = make_trainer(max_steps=6, save_strategy="steps", save_steps=1, on_finding='{"M131": "rollback"}')
    spoilt: list[int] = []

    def spoil(grad: Any) -> Any:
        if trainer.state.global_step == 3 and not spoilt:
            spoilt.append(3)
            return grad * float("nan")
        return grad

    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(spoil)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    run = podium.Run.load(folder)
    assert spoilt == [3]
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.metrics[["loss", "grad_norm"]].notna().all(axis=None)
    rates = run.metrics["learning_rate"].tolist()
    assert rates[3] == pytest.approx(0.5 * 0.1 * 3 / 6)
    [went_back] = run.findings[run.findings["code"] == "M191"].to_dict("records")
    assert "M131 in step 4: went back to step 3" in went_back["what"]
    assert trainer.state.global_step == 6


@pytest.mark.slow
def test_without_a_checkpoint_a_rollback_is_a_stop(make_trainer: Callable) -> None:
    trainer = make_trainer(one, max_steps=9, on_finding={"M102": "rollback"})
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.health.decision == "stop"


def test_recording_can_be_switched_off(make_trainer: Callable) -> None:
    trainer = make_trainer(record=False)
    trainer.train()
    assert not (Path(trainer.args.output_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [({"M999": "stop"}, "no finding"), ({"M101": "explode"}, "one of stop, rollback, ignore"), ("[M101]", "like")],
)
def test_wrong_actions_are_said(make_trainer: Callable, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(on_finding=given)


# ---- TRL's record of a run ----


def test_doctor_reads_trainer_states(make_trainer: Callable, tmp_path: Path) -> None:
    history = [{"step": s, "reward": 0.5, "kl": 0.01 if s < 5 else 3.0, "loss": 0.0} for s in range(1, 10)]
    state = tmp_path / "out/checkpoint-9/trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"log_history": [*history, {"step": 9, "train_runtime": 1.0}]}))
    for place in (state, tmp_path / "out"):
        report = examine(place)
        assert report.issues[0].finding.code == "M132"
        assert not report.has_completions
        assert len(report.history) == 9


def test_doctor_reads_no_other_logs(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    table.write_text("step,reward,kl\n" + "".join(f"{s},0.5,{s}\n" for s in range(1, 9)))
    with pytest.raises(DataError, match=r"TRL's trainer_state\.json"):
        examine(table)

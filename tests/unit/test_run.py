"""The run folder: what is written is read back, also half-written, resumed, capped and without parts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podium
from podium.errors import DataError, Finding
from podium.records import Completion, Group, Prompt, ScoredGroup, StepMetrics
from podium.runs import checkpoint
from podium.runs.environment import _hidden_flags
from podium.runs.recording import FILES_TO_JOIN, RunFolder, rollout_rows
from podium.runs.redaction import without_secrets
from podium.runs.run import Run


def scored(prompt_id: int = 0, texts: tuple[str, ...] = ("7", "8"), **columns: Any) -> ScoredGroup:
    prompt = Prompt(
        id=prompt_id, row=prompt_id, token_ids=(1, 2), text=f"3+4= ({prompt_id})", content="", columns=columns
    )
    completions = tuple(
        Completion(token_ids=(3,) * len(text), logps=(-0.5,) * len(text), finish="stop", text=text, policy_step=0)
        for text in texts
    )
    rewards = np.array([[float(i), math.nan] for i in range(len(texts))])
    return ScoredGroup(
        group=Group(prompt=prompt, completions=completions), names_K=("right", "style"), rewards_GK=rewards
    )


def rows(step: int, groups: int = 2, **kwargs: Any) -> list[Any]:
    made = [scored(i, **kwargs) for i in range(groups)]
    size = len(made[0].group.completions)
    return rollout_rows(
        made, [np.zeros(size)] * groups, [np.ones(size, bool)] * groups, weights_K=np.array([2.0, 1.0]), step=step
    )


def folder(path: Path, **settings: Any) -> RunFolder:
    made = RunFolder(path / "run", **settings)
    made.begin(resumed_step=None)
    return made


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    writer = folder(tmp_path)
    writer.add_metrics(StepMetrics(step=1, values={"reward": 0.5, "loss": math.nan}))
    writer.add_metrics(StepMetrics(step=1, values={"eval_reward": 0.25}))
    writer.add_finding(Finding(code="M101", severity="warning", what="w", step=1))
    writer.add_rollouts(rows(1, answer="7"))
    run = podium.Run.load(tmp_path / "run")
    assert run.metrics[["step", "reward", "eval_reward"]].values.tolist() == [[1, 0.5, 0.25]]
    assert math.isnan(run.history[0].values["loss"])
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["values"]["loss"] is None
    assert run.findings.to_dict("records")[0]["code"] == "M101"
    table = run.rollouts
    assert table["completion"].tolist() == ["7", "8", "7", "8"]
    assert table["reward"].tolist() == [0.0, 2.0, 0.0, 2.0]
    assert table["reward/style"].isna().all()
    assert table["contains_answer"].tolist() == [True, False, True, False]
    assert run.config == run.environment == run.proof == run.evaluations == {}


def test_a_row_may_have_several_right_answers():
    [found] = rows(1, 1, texts=("7", "8", "9"), answer=["7", "8"])
    assert found["answer"] == ["7 or 8"] * 3
    assert found["contains_answer"] == [True, True, False]


def test_types_are_those_of_the_contract(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    writer = folder(tmp_path)
    writer.add_rollouts(rows(1))
    [path] = (tmp_path / "run/rollouts").glob("*.parquet")
    schema = {field.name: str(field.type) for field in pq.read_schema(path)}
    expected = {"step": "int32", "prompt_id": "int64", "completion_index": "int16", "mean_logp": "float"}
    assert expected.items() <= schema.items()
    assert {
        "reward/right": "double",
        "advantage": "float",
        "trained": "bool",
        "finish": "string",
    }.items() <= schema.items()
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_half_written_line_is_left_out_and_does_not_eat_the_next(tmp_path: Path) -> None:
    writer = folder(tmp_path)
    writer.add_metrics(StepMetrics(step=1, values={"reward": 1.0}))
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "values": {"rew')
    assert [each.step for each in Run.load(tmp_path / "run").history] == [1]
    writer.add_metrics(StepMetrics(step=3, values={"reward": 1.0}))
    assert [each.step for each in Run.load(tmp_path / "run").history] == [1, 3]


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    writer = folder(tmp_path)
    for step in (1, 2, 3, 4):
        writer.add_metrics(StepMetrics(step=step, values={"reward": float(step)}))
        writer.add_finding(Finding(code="M101", severity="note", what="w", step=step))
        writer.add_rollouts(rows(step))
    RunFolder(tmp_path / "run").begin(resumed_step=2)
    run = Run.load(tmp_path / "run")
    assert [each.step for each in run.history] == [1, 2]
    assert run.findings["step"].tolist() == [1, 2]
    assert sorted(set(run.rollouts["step"])) == [1, 2]


def test_a_run_that_starts_anew_keeps_the_old_record_apart(tmp_path: Path) -> None:
    folder(tmp_path).add_metrics(StepMetrics(step=9, values={"reward": 1.0}))
    folder(tmp_path).add_metrics(StepMetrics(step=1, values={"reward": 2.0}))
    assert [each.step for each in Run.load(tmp_path / "run").history] == [1]
    assert [each.step for each in Run.load(tmp_path / "run/earlier-1").history] == [9]


def test_many_rounds_become_few_files_and_nothing_is_lost(tmp_path: Path) -> None:
    writer = folder(tmp_path)
    for step in range(1, FILES_TO_JOIN + 6):
        writer.add_rollouts(rows(step))
    assert len(list((tmp_path / "run/rollouts").glob("*.parquet"))) == 6
    assert len(Run.load(tmp_path / "run").rollouts) == 4 * (FILES_TO_JOIN + 5)
    RunFolder(tmp_path / "run").begin(resumed_step=10)
    assert Run.load(tmp_path / "run").rollouts["step"].max() == 10


def test_the_size_cap_holds_and_groups_stay_whole(tmp_path: Path) -> None:
    writer = folder(tmp_path, rollouts_megabytes=0.1)
    for step in range(1, 60):
        writer.add_rollouts(rows(step, groups=8))
    sizes = [path.stat().st_size for path in (tmp_path / "run/rollouts").glob("*.parquet")]
    assert sum(sizes) <= 0.11e6
    frame = Run.load(tmp_path / "run").rollouts
    assert set(frame.groupby(["step", "prompt_id"]).size()) == {2}
    per_step = frame.groupby("step")["prompt_id"].nunique()
    assert per_step.iloc[0] == 8
    assert per_step.iloc[-1] < 8


def test_hostile_text_survives(tmp_path: Path) -> None:
    writer = folder(tmp_path)
    texts = ("\x1b]0;x\x07", "a\ud800b", "<script>", "\u202e\x00")
    writer.add_rollouts(rows(1, groups=1, texts=texts))
    assert Run.load(tmp_path / "run").rollouts["completion"].tolist() == [texts[0], "a?b", texts[2], texts[3]]


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not the folder of a run"):
        Run.load(tmp_path)


def test_secrets_are_hidden() -> None:
    assert _hidden_flags(["podium", "--hub_token", "hf_x", "--api-key=abc", "--seed", "1"]) == [
        *("podium", "--hub_token", "<hidden>", "--api-key=<hidden>", "--seed", "1")
    ]
    text = without_secrets({"a": ["hf_" + "x" * 30], "env": {"X": "1"}})
    assert text == {"a": ["<hidden>"]}


def test_stages_read_as_one_run(tmp_path: Path) -> None:
    """Steps are numbered through, what counts up goes on, and one stage may be going on, the next not yet there."""
    names = ("a", "b", "c")
    for name, steps in zip(names, (3, 2), strict=False):
        writer = RunFolder(tmp_path / f"0-{name}")
        writer.begin(resumed_step=None)
        for step in range(1, steps + 1):
            writer.add_metrics(StepMetrics(step=step, values={"reward": step / 10, "num_tokens": 100.0 * step}))
        writer.add_finding(Finding(code="M101", severity="warning", what="w", step=steps))
        writer.add_rollouts(rows(steps))
    entries = [{"name": name, "folder": f"0-{name}", "type": "grpo", "max_steps": 4} for name in names]
    (tmp_path / "stages.json").write_text(json.dumps({"stages": entries}))
    run = Run.load(tmp_path)
    assert [(part.name, part.offset, part.last_step) for part in run.parts] == [("a", 0, 3), ("b", 3, 5)]
    assert [each.step for each in run.history] == [1, 2, 3, 4, 5]
    assert [each.values["num_tokens"] for each in run.history] == [100, 200, 300, 400, 500]
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["time"].notna().all()
    assert run.findings["step"].tolist() == [3, 5]
    assert run.rollouts[["step", "policy_step"]].drop_duplicates().values.tolist() == [[3, 0], [5, 3]]
    assert run.config["max_steps"] == 12
    assert not run.parts[1].run.parts


@pytest.mark.parametrize(
    "stages",
    ["none", [5], [{"name": "a"}], [{"name": "a", "folder": "..", "type": "grpo"}],
     [{"name": "a", "folder": "x/y", "type": "grpo"}], [{"name": "a", "folder": "x", "type": "grpo", "steps": "5"}],
     [{"name": 1, "folder": "x", "type": "grpo"}]],
)  # fmt: skip
def test_a_damaged_list_of_stages_leads_nowhere(stages: Any, tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "stages.json").write_text(json.dumps({"stages": stages}))
    assert Run.load(tmp_path).parts == ()
    assert Run.load(tmp_path).history == ()


def test_a_damaged_record_is_read_as_far_as_it_goes_or_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "values": {"reward": 1}}\n{"step": "x", "values": {}}\n{"step": 3, "values": [1]}\n'
    )
    (tmp_path / "findings.jsonl").write_text('{"code": "M101", "what": "half a pair: \\ud800"}\n')
    assert [(each.step, each.values) for each in Run.load(tmp_path).history] == [(2, {"reward": 1.0})]
    assert len(Run.load(tmp_path).metrics) == 1
    assert list(Run.load(tmp_path).findings["what"]) == ["half a pair: ?"]
    for broken in (b"a: [", b"\xff\xfe\xff"):
        (tmp_path / "config.yaml").write_bytes(broken)
        with pytest.raises(DataError, match=r"config.yaml cannot be read"):
            _ = Run.load(tmp_path).config


STORED = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "podium_state.json",
    "trainer_state.json",
)


def stored(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    checkpoint.write_manifest(folder)
    return folder


def test_a_manifest_names_every_file_that_resuming_needs(tmp_path: Path) -> None:
    assert checkpoint.damage(stored(tmp_path / "checkpoint-1", STORED)) is None
    weights_alone = ("model.safetensors", "trainer_state.json")  # `save_only_model`
    assert checkpoint.damage(stored(tmp_path / "checkpoint-2", weights_alone)) is None
    for step, lost in enumerate(STORED[1:], 3):
        names = tuple(name for name in STORED if name != lost)
        wrong = checkpoint.damage(stored(tmp_path / f"checkpoint-{step}", names))
        assert wrong is not None
        assert lost.split(".")[0] in wrong
    (tmp_path / "checkpoint-1" / "manifest.json").write_text('{"files": {}}')
    assert checkpoint.damage(tmp_path / "checkpoint-1") == "its manifest.json does not name any file"


def test_auto_goes_on_where_a_run_or_a_stage_has_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.resolve_auto(tmp_path / "none", asked="auto") is None
    for asked in (None, False, True, "checkpoint-3"):
        assert checkpoint.resolve_auto(tmp_path, asked=asked) == asked
    stored(tmp_path / "checkpoint-1", STORED)
    assert checkpoint.resolve_auto(tmp_path, asked="auto") is True
    staged = tmp_path / "staged"
    (staged / "earlier-1" / "01-warm" / "checkpoint-2").mkdir(parents=True)
    (staged / "01-warm").mkdir()
    (staged / "stages.json").write_text('{"stages": [{"folder": "01-warm"}, {"folder": "02-on"}]}')
    assert checkpoint.resolve_auto(staged, asked="auto") is None
    (staged / "01-warm" / "checkpoint-1").mkdir()
    assert checkpoint.resolve_auto(staged, asked="auto") is True


def test_a_checkpoint_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append(f"{status.st_dev}:{status.st_ino}")
        fsync(descriptor)

    def renamed(old: str, new: str) -> None:
        events.append("renamed")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "rename", renamed)
    with checkpoint.atomic_folder(tmp_path / "checkpoint-1") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"w")
        (folder / "state.json").write_text("{}")
    final = tmp_path / "checkpoint-1"
    written = {f"{path.stat().st_dev}:{path.stat().st_ino}" for path in (final, *final.rglob("*"))}
    assert written <= set(events[: events.index("renamed")])
    assert f"{tmp_path.stat().st_dev}:{tmp_path.stat().st_ino}" in events[events.index("renamed") :]


@pytest.mark.parametrize(("limit", "best", "left"), [(2, 1, [3, 1]), (2, 3, [3, 2]), (1, 1, [3, 1]), (1, 3, [3])])
def test_the_best_checkpoint_counts_among_those_that_are_kept(
    limit: int, best: int, left: list[int], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoint.rotate(tmp_path, limit, str(tmp_path / f"checkpoint-{best}"))
    assert sorted((checkpoint.step_of(each) for each in tmp_path.iterdir()), reverse=True) == left


@pytest.mark.parametrize("odd", [5, "x", None, [0], True, {}])
def test_values_of_a_wrong_kind_count_as_missing(tmp_path: Path, odd: Any) -> None:
    """In `environment.json` and `proof.json` of a damaged run; doctor and report read the rest."""
    from podium.runs.doctor import examine
    from podium.runs.report.page import proof

    keys = ("settings", "model", "reward_weights", "agents")
    (tmp_path / "environment.json").write_text(json.dumps({"podium": "1", **dict.fromkeys(keys, odd)}))
    (tmp_path / "proof.json").write_text(json.dumps({"checks": odd}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "values": {"reward": 0.5}}) + "\n")
    run = Run(tmp_path)
    assert run.environment["podium"] == "1"
    assert proof(run.proof) is None
    examine(tmp_path)


def test_a_whole_number_beyond_its_range_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(podium.errors.ConfigError) as error:
        podium.GRPOConfig(str(tmp_path), async_rollouts=-1)
    assert "async_rollouts=0" in error.value.fix or "async_rollouts: 0" in error.value.fix


BETTER = {"is_better": True, "metric": "accuracy", "main": {"a": 0.2, "b": 0.97}}


@pytest.mark.parametrize(
    ("comparison", "severity", "outcome"),
    [
        (BETTER, "warning", "solved"),
        ({**BETTER, "main": {"a": 0.2, "b": 0.9}}, "warning", "with warnings"),
        ({**BETTER, "metric": "reward"}, "note", "better or not known"),
        ({"is_better": False}, "error", "with warnings"),
        ({"is_better": False}, "note", "no better"),
        ({}, "note", "better or not known"),
    ],
)
def test_the_record_says_what_it_asks_of_its_user(
    tmp_path: Path, comparison: dict[str, Any], severity: Any, outcome: str
) -> None:
    writer = folder(tmp_path)
    writer.add_finding(Finding(code="M101", severity=severity, what="w"))
    writer.write_json("evaluation/comparison.json", comparison)
    assert Run.load(tmp_path / "run").outcome == outcome


def test_a_recorded_finding_has_a_whole_step_or_none(tmp_path: Path) -> None:
    """Also beside findings without one, where a table would make every step a float and the others NaN."""
    writer = folder(tmp_path)
    for step in (12, None):
        writer.add_finding(Finding(code="M101", severity="note", what="w", step=step))
    with (tmp_path / "run" / "findings.jsonl").open("a") as file:
        file.write('{"code": "M102", "severity": "odd", "step": "soon", "facts": [], "settings": null}\n')
    reported = Run.load(tmp_path / "run").reported
    assert [repr(finding.step) for finding in reported] == ["12", "None", "None"]
    assert (reported[2].severity, reported[2].facts, reported[2].settings) == ("note", {}, ())

"""Runs in stages on a tiny model, from Python and from the command line: what crosses a border, and what is left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from podium import Run, Stages
from podium.cli import main
from podium.errors import ConfigError
from podium.runs.doctor import examine
from podium.testing import save_tiny_model
from podium.trainer.checkpointing import EndsOnSignal

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in range(4)]
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_completion_length": 6,
    "learning_rate": 3e-3,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "prove_first_batch": False,
    "use_cpu": True,
}
SFT = {"name": "warm", "type": "sft", "max_steps": 4, "per_device_train_batch_size": 8, "max_length": 64}


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(c.isdigit() for c in text)) + 0.1 * (len(text) % 3) for text in completions]


class Look(TrainerCallback):
    """What every stage begins with."""

    def __init__(self) -> None:
        self.begun: list[dict[str, torch.Tensor]] = []
        self.rates: list[float] = []
        self.moments: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append({name: value.clone() for name, value in kwargs["model"].state_dict().items()})
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
        taken = [int(entry["step"]) for entry in kwargs["optimizer"].state_dict()["state"].values()]
        self.moments.append(max(taken, default=0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.slow
def test_full_weights_and_all_that_is_carried(model: str, tmp_path: Path) -> None:
    """SFT, then GRPO to a gate, then one that goes on with the optimizer and the schedule, from the same reference."""
    seen = Look()
    run = Stages(
        [
            SFT,
            {"name": "gate", "rewards": digits, "max_steps": 5, "until": "reward >= 0 for 2 steps"},
            {"name": "on", "rewards": digits, "max_steps": 3, "schedule": "continue", "beta": 0.1},
            {"name": "anew", "rewards": digits, "max_steps": 1, "optimizer": "reset", "reference": "last_stage"},
        ],
        model=model,
        train_dataset=Dataset.from_list(ROWS),
        output_dir=str(tmp_path / "run"),
        callbacks=[seen],
        **SETTINGS,
    )
    trainer = run.train()
    folder = tmp_path / "run"
    ends = json.loads((folder / "stages.json").read_text())["stages"]
    assert [(each["steps"], each["ended_by"]) for each in ends] == [
        (4, "bound"),
        (2, "gate"),
        (3, "bound"),
        (1, "bound"),
    ]
    borders = [load_file(folder / each["folder"] / each["checkpoint"] / "model.safetensors") for each in ends[:-1]]
    for border, begun in zip(borders, seen.begun[1:], strict=True):
        assert all(torch.equal(border[name], begun[name]) for name in border), "a stage starts where one has ended"
    assert any(not torch.equal(borders[0][name], seen.begun[0][name]) for name in borders[0]), "SFT has learnt"
    assert seen.moments == [0, 0, 2, 0], "moments are kept by the third stage alone"
    assert seen.rates == pytest.approx([3e-3, 3e-3, 3e-3 * (1 - 2 / 8), 3e-3])
    assert trainer.run.objective.reference is None, "beta is the third stage's own"
    losses = [each.values["loss"] for each in Run.load(folder / "01-warm").history]
    assert losses[-1] < losses[0]

    again = Stages(
        [SFT, {"name": "far", "rewards": digits, "max_steps": 1}, {"name": "b", "rewards": digits, "max_steps": 1}],
        model=model,
        train_dataset=Dataset.from_list(ROWS),
        output_dir=str(tmp_path / "again"),
        **{**SETTINGS, "beta": 0.1},
    ).train()
    warm = load_file(tmp_path / "again" / "01-warm" / "checkpoint-4" / "model.safetensors")
    stages = [SFT, {"name": "far", "rewards": digits, "max_steps": 1}]
    Stages(stages, model=model, train_dataset=ROWS, output_dir=str(tmp_path / "again"), **SETTINGS).train()
    moved = {path.name for path in (tmp_path / "again" / "earlier-1").iterdir()}
    assert {"01-warm", "02-far", "model.safetensors", "config.json"} <= moved
    reference = again.run.objective.reference.copy.state_dict()
    assert all(torch.equal(reference[name], warm[name]) for name in warm), "the result of SFT, through two stages"
    assert any(not torch.equal(again.model.state_dict()[name], warm[name]) for name in warm)


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["in SFT", "in GRPO"])
def test_a_signal_ends_the_run_inside_its_stage(at: int, model: str, tmp_path: Path) -> None:
    stop = EndsOnSignal()

    class Signal(TrainerCallback):
        begun = -1

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun += 1

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            stop.asked = 15 if self.begun == at else 0

    settings = {"model": model, "train_dataset": ROWS, "output_dir": str(tmp_path / "run"), **SETTINGS}
    stages = [SFT, {"name": "far", "rewards": digits, "max_steps": 3}]
    Stages(stages, callbacks=[Signal(), stop], **settings).train()
    recorded = json.loads((tmp_path / "run" / "stages.json").read_text())["stages"]
    assert [each.get("ended_by") for each in recorded] == ["bound"] * at + [None] * (2 - at)
    Stages(stages, **settings).train(resume_from_checkpoint=True)
    recorded = json.loads((tmp_path / "run" / "stages.json").read_text())["stages"]
    assert [each["steps"] for each in recorded] == [4, 3]


def test_an_adapter_goes_through_sft_and_grpo(model: str, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    run = Stages(
        [{**SFT, "completion": "{answer}"}, {"name": "right", "rewards": [digits], "max_steps": 2}],
        model=model,
        train_dataset=ROWS,
        output_dir=str(tmp_path / "run"),
        lora={"r": 4, "target_modules": "all-linear"},
        **{**SETTINGS, "beta": 0.05},
    )
    trainer = run.train()
    policy = trainer.model
    assert isinstance(policy, PeftModel)
    named = dict(policy.named_parameters())
    warm = load_file(tmp_path / "run" / "01-warm" / "checkpoint-4" / "adapter_model.safetensors")
    for name, value in warm.items():
        inside = name.removesuffix(".weight")
        assert torch.equal(named[f"{inside}.ref.weight"], value), "the reference is what SFT has made"
        assert not named[f"{inside}.ref.weight"].requires_grad
    assert any(not torch.equal(named[f"{n.removesuffix('.weight')}.default.weight"], v) for n, v in warm.items())
    assert any(bool(value.abs().sum()) for name, value in warm.items() if "lora_B" in name), "SFT has trained it"
    base = policy.get_base_model().state_dict()
    assert all(torch.equal(base[key.replace(".weight", ".base_layer.weight")], value) for key, value in before.items()
               if key.replace(".weight", ".base_layer.weight") in base)  # fmt: skip
    own = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "run")
    final = dict(own.named_parameters())
    assert all(torch.equal(final[name], named[name]) for name in final if ".default." in name)


@pytest.mark.slow
def test_a_stage_that_is_done_and_not_noted_takes_no_step_more(model: str, tmp_path: Path) -> None:
    """As after a kill between the last checkpoint of a stage and the line about its end; in the middle of an epoch."""

    def run() -> Stages:
        stages = [{**SFT, "max_steps": 3}, {"name": "on", "rewards": digits, "max_steps": 3, "save_strategy": "steps"}]
        settings = {**SETTINGS, "save_steps": 1, "logging_steps": 1}
        return Stages(stages, model=model, train_dataset=ROWS, output_dir=str(tmp_path / "run"), **settings)

    run().train()
    folder = tmp_path / "run"
    tokens = [each.values["num_tokens"] for each in Run.load(folder / "01-warm").history]
    weights = load_file(folder / "model.safetensors")
    record = json.loads((folder / "stages.json").read_text())
    for number in (1, 0):  # the second stage was the last to run, then the first
        for entry in record["stages"][number:]:
            for name in ("steps", "ended_by", "checkpoint"):
                entry.pop(name, None)
        (folder / "stages.json").write_text(json.dumps(record))
        if number == 0:
            shutil.rmtree(folder / "02-on")
        run().train(resume_from_checkpoint=True)
        ends = json.loads((folder / "stages.json").read_text())["stages"]
        assert [(each["steps"], each["ended_by"]) for each in ends] == [(3, "bound"), (3, "bound")]
        again = load_file(folder / "model.safetensors")
        assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert [each.values["num_tokens"] for each in Run.load(folder / "01-warm").history] == tokens


def test_a_metric_that_nobody_measures_is_said_at_the_first_step(model: str, tmp_path: Path) -> None:
    run = Stages(
        [{"name": "a", "rewards": digits, "max_steps": 3, "until": "rewrd > 1"}],
        model=model,
        train_dataset=ROWS,
        output_dir=str(tmp_path / "run"),
        **SETTINGS,
    )
    with pytest.raises(ConfigError, match=r"waits for `rewrd`, which is not logged. Did you mean `reward`\?"):
        run.train()
    assert len(Run.load(tmp_path / "run").history) == 1


@pytest.mark.slow
def test_a_gate_on_held_out_prompts(model: str, tmp_path: Path) -> None:
    """Two evaluations, after the first and the second step."""
    run = Stages(
        [
            {
                "name": "a",
                "rewards": digits,
                "max_steps": 9,
                "until": "eval_rewards/digits/mean >= 0 for 2 evaluations",
                "eval_strategy": "steps",
                "eval_steps": 1,
            },
            {"name": "b", "rewards": digits, "max_steps": 1},
        ],
        model=model,
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        output_dir=str(tmp_path / "run"),
        **SETTINGS,
    )
    run.train()
    assert [part.last_step for part in Run.load(tmp_path / "run").parts] == [2, 3]


RECIPE = """\
model: {model}
dataset: rows.jsonl
eval_dataset: rows.jsonl
stages:
  - name: first
    rewards: [mine.py:digits]
    max_steps: 2
  - name: second
    rewards: [mine.py:digits, mine.py:short]
    max_steps: 2
eval_samples: 1
eval_rows: 2
num_generations: 4
per_device_train_batch_size: 16
max_completion_length: 6
learning_rate: 1.0e-4
save_strategy: "no"
report_to: none
output_dir: out
"""
MINE = """
def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]

def short(completions, **_):
    return [-float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_the_command_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run in its folder: trained, reported, diagnosed, looked at, and found to be done."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=model))
    monkeypatch.chdir(tmp_path)

    def podium(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["podium", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        assert not ended.value.code, said.err
        return said.out

    out = podium("train", "run.yaml")
    assert "Stage 1 of 2, first: mine.py:digits; 2 steps" in out
    assert "Stage second: 2 steps, its end was reached" in out
    assert "Model saved in out" in out
    run = Run.load("out")
    assert [each.step for each in run.history] == [1, 2, 3, 4]
    tokens = [each.values["num_tokens"] for each in run.history]
    assert tokens == sorted(tokens)
    assert sorted(run.rollouts["step"].unique()) == [1, 2, 3, 4]
    assert run.evaluations.keys() >= {"before", "after"}
    assert run.config["max_steps"] == 4
    assert all("short" in run.evaluations[when]["means"] for when in ("before", "after")), "as the last stage judges"
    page = Path("out/report.html").read_text()
    assert '"stages":[{"name":"first","first":1,"last":2},{"name":"second","first":3,"last":4}]' in page
    conditions = examine("out").issues
    assert all(condition.finding.what.startswith(("stage first: ", "stage second: ")) for condition in conditions)
    assert AutoModelForCausalLM.from_pretrained("out")
    assert "All 2 stages are done" in podium("train", "run.yaml", "--resume_from_checkpoint", "true", "--no-eval")

    final = load_file("out/model.safetensors")
    record = json.loads(Path("out/stages.json").read_text())
    record["stages"][1] = {key: record["stages"][1][key] for key in ("name", "folder", "type", "max_steps", "until")}
    Path("out/stages.json").write_text(json.dumps(record))
    shutil.rmtree("out/02-second")
    out = podium("train", "run.yaml", "--resume_from_checkpoint", "true")
    assert "Stage 2 of 2" in out
    assert "Stage 1 of 2" not in out
    again = load_file("out/model.safetensors")
    assert all(torch.equal(again[name], final[name]) for name in final), "looked at first, and begun at the border"

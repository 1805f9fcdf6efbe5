"""Settings and the life of a run's folder: what a user mistypes, changes between stop and resume, or runs out of.

Each case says what was done, and what `podium check` or the trainer says now. Cures are applied where they are a line.
"""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from peft import LoraConfig

from podium import GRPOConfig, GRPOTrainer
from podium.checks import check_recipe
from podium.errors import CheckpointError, ConfigError, Finding, PodiumError
from podium.testing import save_tiny_model

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
REWARD = (
    "def right(completions, answer):\n    return [float(c.strip() == a.strip()) for c, a in zip(completions, answer)]\n"
)
RECIPE = {
    "model": "./model",
    "dataset": "rows.jsonl",
    "rewards": ["mine.py:right"],
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-5,
    "max_steps": 8,
    "output_dir": "out",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_model(tmp_path_factory.mktemp("saved") / "model"))


@pytest.fixture
def folder(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, rows and a reward."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def check(**keys: Any) -> list[Finding]:
    """What `podium check` finds; a key that is None is left out."""
    values = {key: value for key, value in {**RECIPE, **keys}.items() if value is not None}
    Path("run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return [finding for finding in check_recipe("run.yaml") if finding.severity != "note" or finding.code[0] == "K"]


def defect(line: str, done: str, *says: str, cured: bool | None = None, **given: Any) -> Any:
    """A case of a line: what is said, whether the cure is a line to apply, and what was given."""
    values = (*says, given) if len(says) == 1 else (*says, cured is not False, given)
    return pytest.param(*values, marks=pytest.mark.defect(line, done), id=f"{line} {done}")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("base", "says"),
    [
        pytest.param(
            "/gone/base",
            "it belongs to /gone/base, which is not there",
            marks=pytest.mark.defect("W12", "an adapter whose base is missing"),
        ),
        pytest.param(None, "it does not say to which", marks=pytest.mark.defect("N", "an adapter that names no base")),
    ],
)
def test_an_adapter_without_its_base(base: str | None, says: str, folder: Path, now: Callable) -> None:
    for file in ("config.json", "model.safetensors"):
        (folder / "model" / file).unlink()
    (folder / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    [finding] = [each for each in check() if each.code == "M012"]
    now(f"{finding.what}; fix: {finding.fix}")
    assert says in finding.what
    assert finding.fix.startswith("write where its model is into ")
    assert "from_pretrained" not in finding.fix


@pytest.mark.defect("F14", "no raw lines of retries beside the findings")
def test_retries_are_not_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    from podium.console.terminal import quiet

    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    try:
        quiet()
        assert not hub.isEnabledFor(logging.WARNING)
    finally:
        hub.setLevel(before)


@pytest.mark.defect("B11", "check runs the recipe's reward file, and says so")
def test_check_says_that_it_runs_files(now: Callable) -> None:
    from typer.testing import CliRunner

    from podium.cli import app

    said = " ".join(CliRunner().invoke(app, ["check", "--help"]).output.split())
    now(next(line for line in said.split(". ") if "Python files" in line))
    assert "Python files that the recipe names (rewards, datasets) are run" in said


# ---- in Python ----


@pytest.mark.parametrize(
    ("says", "given"),
    [
        defect("K1", "warmup_ratio", "write `warmup_steps`; below 1 it is a share of all steps", warmup_ratio=0.1),
        defect("K1", "num_generation", "Did you mean `num_generations`?", num_generation=4),
        defect("K1", "evaluation_strategy", "write `eval_strategy`", evaluation_strategy="no"),
        defect("K1", "vllm_device", "leave it out: `vllm_mode: colocate`", vllm_device="cuda:0"),
        defect("K1", "max_seq_length", "write `max_completion_length`", max_seq_length=512),
        defect("K1", "group_by_length", "leave it out: packs have no padding", group_by_length=True),
        defect("K1", "lora_r in GRPOConfig", "peft_config=LoraConfig(r=16)", lora_r=8),
        defect("T12", 'learning_rate="fast"', "learning_rate is 'fast'; it must be a number", learning_rate="fast"),
        defect("N", 'max_steps="ten"', "max_steps is 'ten'; it must be a whole number", max_steps="ten"),
    ],
)
def test_arguments_in_python(given: dict[str, Any], says: str, now: Callable) -> None:
    with pytest.raises((TypeError, PodiumError)) as error:
        GRPOConfig("out", **given)
    now(f"{type(error.value).__name__}: {error.value}")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("says", "given"),
    [
        defect("K1", "GRPOTrainer(tokenizer=...)", "`processing_class`", tokenizer=1),
        defect("K1", "GRPOTrainer(dataset=...)", "write `train_dataset`", dataset=[]),
        defect("N", "GRPOTrainer(learning_rate=...)", "args=GRPOConfig(learning_rate=...)", learning_rate=1e-5),
        defect("N", "GRPOTrainer(config=...)", "write `args`", config=1),
        defect("N", "GRPOTrainer(reward_function=...)", "Did you mean `reward_funcs`?", reward_function=len),
    ],
)
def test_arguments_of_the_trainer(given: dict[str, Any], says: str, now: Callable) -> None:
    with pytest.raises(TypeError) as error:
        GRPOTrainer("model", len, **given)
    now(f"TypeError: {error.value}")
    assert says in str(error.value)


@pytest.mark.defect("T12", "numbers as text are read as a recipe's are")
def test_numbers_as_text(now: Callable) -> None:
    args = GRPOConfig("out", learning_rate="1e-5", max_steps="08", num_generations="4", beta=".1", use_cpu="true")
    now(f"learning_rate {args.learning_rate}, max_steps {args.max_steps}, use_cpu {args.use_cpu}")
    assert (args.learning_rate, args.max_steps, args.num_generations, args.beta, args.use_cpu) == (
        1e-5,
        8,
        4,
        0.1,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param(
            {"report_to": "clearml"},
            "report_to names clearml, whose package is not installed",
            marks=pytest.mark.defect("T2", "in Python"),
        ),
        pytest.param({"report_to": ["wandbb"]}, "Did you mean `wandb`?", marks=pytest.mark.defect("E7", "in Python")),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 1},
            "there are no rows to evaluate on",
            marks=pytest.mark.defect("T3", "in Python"),
        ),
        pytest.param(
            {"optim": "adamw_torch_8bit"},
            "needs the package torchao",
            marks=pytest.mark.defect("N", "optim without its package, in Python"),
        ),
    ],
)
def test_refused_before_weights(make_trainer: Callable, settings: dict[str, Any], says: str, now: Callable) -> None:
    with pytest.raises(PodiumError) as error:
        make_trainer(model="./nowhere", **settings)
    now(str(error.value))
    assert says in str(error.value)


# ---- weights and config.json ----


def edited(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param(
            {"num_hidden_layers": 3},
            "config.json describes 9 tensors (`model.layers.2.input_layernorm.weight`, ...) that are not in the files: random numbers",
            marks=pytest.mark.defect("S1", "one layer more in config.json"),
        ),
        pytest.param(
            {"num_hidden_layers": 1},
            "the files hold 9 tensors (`model.layers.1.input_layernorm.weight`, ...) that are not described by config.json: they would be left out",
            marks=pytest.mark.defect("S1", "one layer less in config.json"),
        ),
        pytest.param(
            {"intermediate_size": 48},
            "`model.layers.0.mlp.down_proj.weight` is 32 x 64 in the files and 32 x 48 by config.json (and 5 others)",
            marks=pytest.mark.defect("S1", "another width in config.json"),
        ),
        pytest.param(
            {"attention_bias": True},
            "config.json describes 8 tensors (`model.layers.0.self_attn.k_proj.bias`",
            marks=pytest.mark.defect("S1", "biases in config.json alone"),
        ),
    ],
)
def test_weights_of_another_configuration(
    values: dict[str, Any], says: str, folder: Path, make_trainer: Callable, now: Callable
) -> None:
    edited(folder / "model", **values)
    [finding] = [each for each in check() if each.code == "M022"]
    now(finding.what)
    assert says in finding.what
    with pytest.raises(PodiumError) as error:
        make_trainer(model="./model")
    assert says in str(error.value)


def sharded(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def tied(folder: Path) -> None:
    save_tiny_model(folder, "gemma3", tie_word_embeddings=True)


def consolidated(folder: Path) -> None:
    """Mistral's repositories hold the weights a second time, under other names."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, folder / "consolidated.safetensors")


def pickled(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(made, marks=pytest.mark.defect("S1", f"no false alarm: {made.__name__}"))
        for made in (sharded, tied, consolidated, pickled)
    ],
)
def test_weights_that_fit(made: Callable[[Path], None], folder: Path, now: Callable) -> None:
    made(folder / "model")
    found = [each.what for each in check() if each.code == "M022"]
    now("; ".join(found) or "nothing found")
    assert not found


# ---- resume ----


@pytest.fixture
def run(folder: Path, make_trainer: Callable) -> Callable[..., Any]:
    """`run(**settings)`: a trainer in `run`, which saves every step."""

    def make(**settings: Any) -> Any:
        given = {
            "model": "./model",
            "save_strategy": "steps",
            "save_steps": 1,
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
        }
        return make_trainer(**{**given, **settings})

    return make


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        pytest.param(
            {},
            {"optim": "adafactor"},
            "optim is adafactor, and checkpoint-2 holds the state of a run with adamw_torch",
            marks=pytest.mark.defect("F4", "optim: adafactor"),
        ),
        pytest.param(
            {},
            LORA,
            "checkpoint-2 holds all weights, and an adapter is trained here",
            marks=pytest.mark.defect("F4", "lora on a full checkpoint"),
        ),
        pytest.param(
            {},
            LORA,
            "checkpoint-2 holds all weights, and an adapter is trained here",
            marks=pytest.mark.defect("T7", "lora on a full checkpoint"),
        ),
        pytest.param(
            LORA,
            {},
            "checkpoint-2 holds an adapter, and all weights are trained here",
            marks=pytest.mark.defect("T7", "all weights on an adapter's checkpoint"),
        ),
        pytest.param(
            LORA,
            {"peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")},
            "lora: r is 8, and the adapter in checkpoint-2 has 4",
            marks=pytest.mark.defect("T7", "r: 8 on a checkpoint of r: 4"),
        ),
        pytest.param(
            LORA,
            {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")},
            "lora: target_modules is ['q_proj']",
            marks=pytest.mark.defect("N", "resume with other target_modules"),
        ),
        pytest.param(
            {},
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "eval_steps": 1,
                "eval_rows": ROWS[:4],
            },
            "lr_scheduler_type is reduce_lr_on_plateau",
            marks=pytest.mark.defect("N", "resume with a schedule of another kind"),
        ),
        pytest.param(
            {},
            {"frozen_parameters": "embed"},
            "frozen_parameters is embed, and checkpoint-2 holds the state of a run with none",
            id="other parameters are frozen",
        ),
    ],
)
def test_resume_that_cannot_go_on(
    run: Callable, before: dict[str, Any], after: dict[str, Any], says: str, folder: Path, now: Callable
) -> None:
    run(**before).train()
    with pytest.raises(CheckpointError) as error:
        run(**after, max_steps=3).train(resume_from_checkpoint="run/checkpoint-2")
    now(str(error.value))
    assert says in str(error.value)
    assert error.value.code == "K004"
    assert [path.name for path in sorted(Path("run").glob("*-*")) if path.is_dir()] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("settings", "group", "says"),
    [
        pytest.param(
            {"learning_rate": 1e-4},
            {"initial_lr": 1e-4},
            "learning_rate 0.001 -> 0.0001",
            marks=pytest.mark.defect("F4", "learning_rate"),
        ),
        pytest.param(
            {"weight_decay": 0.5},
            {"weight_decay": 0.5},
            "weight_decay 0.0 -> 0.5",
            marks=pytest.mark.defect("F4", "weight_decay"),
        ),
        pytest.param(
            {"adam_beta1": 0.5, "adam_beta2": 0.6},
            {"betas": (0.5, 0.6)},
            "adam_beta2 0.999 -> 0.6",
            marks=pytest.mark.defect("F4", "adam_beta1, adam_beta2"),
        ),
        pytest.param(
            {"adam_epsilon": 1e-5},
            {"eps": 1e-5},
            "adam_epsilon 1e-08 -> 1e-05",
            marks=pytest.mark.defect("N", "resume with another adam_epsilon"),
        ),
        pytest.param(
            {"temperature": 0.7},
            {},
            "temperature 1.0 -> 0.7",
            marks=pytest.mark.defect("F4", "temperature takes effect and is said"),
        ),
    ],
)
def test_resume_with_other_settings(
    run: Callable,
    settings: dict[str, Any],
    group: dict[str, Any],
    says: str,
    caplog: pytest.LogCaptureFixture,
    now: Callable,
) -> None:
    """They take effect, and one line says which they are."""
    run(max_steps=1).train()
    trainer = run(**settings)
    trainer.train(resume_from_checkpoint=True)
    [line] = [record.getMessage() for record in caplog.records if "made of something else" in record.getMessage()]
    now(line)
    assert says in line
    assert {key: trainer.optimizer.param_groups[0][key] for key in group} == group
    if "learning_rate" in settings:
        assert trainer.health.latest["learning_rate"] == pytest.approx(5e-5)  # halfway down a linear schedule
    assert trainer.optimizer.param_groups[1]["weight_decay"] == 0


@pytest.mark.defect("S3", "nothing changed: nothing is said")
def test_resume_as_before(run: Callable, caplog: pytest.LogCaptureFixture, now: Callable) -> None:
    run().train()
    run().train(resume_from_checkpoint="run/checkpoint-1")
    lines = [record.getMessage() for record in caplog.records if "made of something else" in record.getMessage()]
    now("; ".join(lines) or "nothing is said")
    assert not lines


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param(
            "reward", "the code of right (mine.py:1) is another", marks=pytest.mark.defect("S3", "reward code")
        ),
        pytest.param("data", "the training rows are others", marks=pytest.mark.defect("S3", "data")),
    ],
)
def test_resume_with_other_code_or_data(
    changed: str, says: str, folder: Path, caplog: pytest.LogCaptureFixture, now: Callable
) -> None:
    from podium.recipe import load

    keys = {
        **RECIPE,
        "max_steps": 1,
        "save_steps": 1,
        "report_to": "none",
        "logging_steps": 1,
        "prove_first_batch": False,
    }
    Path("run.yaml").write_text(yaml.safe_dump(keys))
    load("run.yaml").trainer().train()
    if changed == "reward":
        Path("mine.py").write_text(REWARD.replace("float(c", "2 * float(c"))
    else:
        Path("rows.jsonl").write_text(
            "".join(json.dumps({**row, "prompt": f"0{row['prompt']}"}) + "\n" for row in ROWS)
        )
    load("run.yaml", {"max_steps": 2}).trainer().train(resume_from_checkpoint=True)
    [line] = [record.getMessage() for record in caplog.records if "made of something else" in record.getMessage()]
    now(line)
    assert says in line
    assert "max_steps 1 -> 2" in line
    if changed == "reward":
        [note] = [each for each in check(**keys, resume_from_checkpoint="out/checkpoint-1") if each.code == "K002"]
        assert says in note.what


@pytest.mark.slow
@pytest.mark.defect("F4", "another model")
def test_resume_with_a_model_of_another_name(
    run: Callable, folder: Path, now: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the same model in another folder: a warning."""
    run(max_steps=1).train()
    (folder / "model").rename(folder / "other")
    run(model="./other", max_steps=2).train(resume_from_checkpoint="run/checkpoint-1")
    [line] = [each.getMessage() for each in caplog.records if "model is ./other" in each.getMessage()]
    now(line)
    assert "checkpoint-1 holds the weights of a run on ./model" in line


@pytest.mark.slow
@pytest.mark.defect("F4", "check says of a resumed run what train does")
def test_check_of_a_resumed_run(run: Callable, now: Callable) -> None:
    run(max_steps=1).train()
    found = check(output_dir="run", optim="adafactor", lora={"r": 4}, resume_from_checkpoint=True)
    said = [each.what for each in found if each.code == "K004"]
    now(" / ".join(said))
    assert any(
        "optim is adafactor, and checkpoint-1 holds the state of a run with adamw_torch" in what for what in said
    )
    assert any("holds all weights, and an adapter is trained here" in what for what in said)


# ---- the folder of a run ----


class Full:
    """Writes fail as on a full disk: torch hides the system's error, safetensors quotes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        import shutil

        import torch

        def save(*_: Any, **__: Any) -> None:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5120 vs 5012")

        def write(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        if where == "optimizer":
            monkeypatch.setattr(torch, "save", save)
            usage = shutil.disk_usage("/")
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        elif where == "weights":
            monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", write)
        else:
            monkeypatch.setattr("pyarrow.parquet.write_table", write)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("where", "file"),
    [
        pytest.param(
            "optimizer", "run/checkpoint-2", marks=pytest.mark.defect("T8", "the optimizer's state does not fit")
        ),
        pytest.param("weights", "run/checkpoint-2", marks=pytest.mark.defect("T8", "the weights do not fit")),
        pytest.param(
            "record", "run/rollouts/0000002-0.parquet", marks=pytest.mark.defect("T8", "the record does not fit")
        ),
    ],
)
def test_a_full_disk(run: Callable, where: str, file: str, monkeypatch: pytest.MonkeyPatch, now: Callable) -> None:
    from podium.runs import checkpoint

    run(max_steps=1).train()
    with monkeypatch.context() as full:
        trainer = run()
        Full(full, where)
        with pytest.raises(CheckpointError) as error:
            trainer.train(resume_from_checkpoint=True)
    now(str(error.value).replace(str(Path.cwd()), "."))
    assert f"{file} cannot be written: the disk is full" in str(error.value)
    assert "--resume_from_checkpoint true goes on from" in str(error.value)
    assert not list(Path("run").glob(".tmp-*"))
    assert checkpoint.damage(Path("run/checkpoint-1")) is None
    run().train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.defect("T8", "the final model does not fit")
def test_a_full_disk_at_the_end(run: Callable, monkeypatch: pytest.MonkeyPatch, now: Callable) -> None:
    trainer = run(max_steps=1)
    trainer.train()
    Full(monkeypatch, "weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be written: the disk is full") as error:
        trainer.save_model("run")
    now(str(error.value))


@pytest.mark.defect("T10", "the run's folder is deleted")
def test_the_folder_is_deleted(run: Callable, now: Callable) -> None:
    from transformers import TrainerCallback

    class Deletes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                shutil.rmtree("run")

    with pytest.raises(CheckpointError) as error:
        run(callbacks=[Deletes()], max_steps=3).train()
    now(str(error.value).replace(str(Path.cwd()), "."))
    assert "its folder is gone, removed or renamed while the run was writing there" in str(error.value)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """`other(folder)`: another process that trains there, until it is killed."""
    code = (
        "import fcntl, json, os, socket, sys, psutil\n"
        "file = open(sys.argv[1] + '/.running', 'a+')\n"
        "if sys.argv[2] == 'flock': fcntl.flock(file, fcntl.LOCK_EX)\n"
        "me = psutil.Process()\n"
        "file.write(json.dumps({'host': sys.argv[3] or socket.gethostname(), 'pid': me.pid, 'began': me.create_time()}))\n"
        "file.flush(); print('there', flush=True); sys.stdin.read()\n"
    )
    started = []

    def start(folder: Path, *, kind: str = "flock", host: str = "") -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", code, str(folder), kind, host]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().strip() == "there"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.defect("T9", f"a second run, {kind}")) for kind in ("flock", "no flock")],
)
def test_two_runs_in_one_folder(
    kind: str, run: Callable, other: Callable, monkeypatch: pytest.MonkeyPatch, now: Callable
) -> None:
    if kind == "no flock":
        without_flock(monkeypatch)
    trainer = run()
    process = other(Path("run"), kind=kind)
    Path("run/metrics.jsonl").write_text("")
    for attempt in (lambda: trainer.train(), lambda: trainer.train(resume_from_checkpoint=True)):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert f"where another run is writing: process {process.pid} on" in str(error.value)
    [found] = [each for each in check(output_dir="run") if each.code == "C036"]
    now(f"{found.what}; fix: {found.fix}")
    assert f"process {process.pid} on" in found.what
    assert Path("run/metrics.jsonl").exists(), "nothing was moved"
    process.kill()
    process.wait()
    assert not [each for each in check(output_dir="run") if each.code == "C036"]
    trainer.train()
    assert not Path("run/.running").exists()


@pytest.mark.slow
@pytest.mark.defect("T9", "a lock of another machine, where there is no flock")
def test_a_lock_of_another_machine(
    run: Callable, other: Callable, monkeypatch: pytest.MonkeyPatch, now: Callable
) -> None:
    without_flock(monkeypatch)
    trainer = run()
    other(Path("run"), kind="no flock", host="node7")
    with pytest.raises(ConfigError, match=r"on node7") as error:
        trainer.train()
    now(str(error.value).replace(str(Path.cwd()), "."))
    assert f"if it runs no more: rm {Path.cwd()}/run/.running" in str(error.value)
    Path("run/.running").unlink()
    trainer.train()


@pytest.mark.slow
@pytest.mark.defect("N", "a lock that a killed run's worker has inherited")
def test_a_lock_that_was_inherited(run: Callable, other: Callable) -> None:
    process = other(Path("run"))
    holder = Path("run/.running")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    holder.write_text(json.dumps({**json.loads(holder.read_text()), "pid": dead.pid}))
    assert process.poll() is None
    run().train()


@pytest.mark.slow
@pytest.mark.defect("N", "one trainer after another in one process and one folder")
def test_one_after_another(run: Callable) -> None:
    run(max_steps=1).train()
    run(max_steps=1).train()
    assert Path("run/earlier-1/checkpoint-1").is_dir()


@pytest.mark.defect("H13", "model.safetensors, of the final model and of a checkpoint")
def test_permissions_of_weights(run: Callable, now: Callable) -> None:
    before = os.umask(0o027)
    try:
        trainer = run(max_steps=1)
        trainer.train()
        trainer.save_model("run")
    finally:
        os.umask(before)
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in Path("run").rglob("*.safetensors")}
    now(str(modes))
    assert modes == {"run/model.safetensors": "0o640", "run/checkpoint-1/model.safetensors": "0o640"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.defect("H14", "SIGTERM: a checkpoint, and how to go on")),
        pytest.param(signal.SIGHUP, marks=pytest.mark.defect("ADend", "SIGHUP: a closed terminal, ssh lost")),
        signal.SIGUSR1,
        signal.SIGINT,
    ],
    ids=str,
)
def test_signals_that_end_a_run(
    number: signal.Signals, run: Callable, capsys: pytest.CaptureFixture[str], now: Callable
) -> None:
    from transformers import TrainerCallback

    from podium.cli.train import UNFINISHED, resumable
    from podium.runs import checkpoint
    from podium.trainer.checkpointing import EndsOnSignal

    class Terminates(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                os.kill(os.getpid(), number)

    stop = EndsOnSignal()
    trainer = run(callbacks=[Terminates(), stop], max_steps=6, save_strategy="no")
    with pytest.raises(typer.Exit) as ended, resumable([Path("run")], stop, is_main=True):
        trainer.train()
    said = capsys.readouterr().err
    now(" ".join(said.split()))
    assert ended.value.exit_code == UNFINISHED
    assert f"{number.name}: a checkpoint is saved after this step" in said
    assert "To go on from run/checkpoint-2: the same command with --resume_from_checkpoint true" in said
    assert trainer.state.global_step == 2
    assert checkpoint.damage(Path("run/checkpoint-2")) is None


@pytest.mark.defect("E13", "a refused resume moves no checkpoint")
def test_a_refused_resume_moves_nothing(run: Callable, now: Callable) -> None:
    run(max_steps=3).train()
    Path("run/checkpoint-1/weights-0.pt").touch()
    Path("run/checkpoint-1/manifest.json").unlink()
    with pytest.raises(CheckpointError) as error:
        run(optim="adafactor").train(resume_from_checkpoint="run/checkpoint-1")
    folders = sorted(path.name for path in Path("run").iterdir() if path.is_dir())
    now(f"{error.value} / {', '.join(folders)}")
    assert folders == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "rollouts"]


@pytest.mark.slow
@pytest.mark.defect("E13", "a checkpoint of another number of processes")
def test_a_checkpoint_of_other_processes(run: Callable, now: Callable) -> None:
    run(max_steps=2).train()
    Path("run/checkpoint-1/global_step1").mkdir()
    for rank in range(2):
        Path(f"run/checkpoint-1/global_step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"by 2 processes with DeepSpeed \(ZeRO-1 or 2\)") as error:
        run().train(resume_from_checkpoint="run/checkpoint-1")
    now(str(error.value))
    assert Path("run/checkpoint-2").is_dir()
    assert not Path("run/earlier-1").exists()


def pickled_weights(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors").unlink()
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def pickled_optimizer(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    torch.save({"a": Path("x")}, folder / "optimizer.pt")


def pickled_schedule(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    torch.save({"a": Path("x")}, folder / "scheduler.pt")


def empty_state(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "trainer_state.json").write_text("")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        pytest.param(
            pickled_weights,
            "a pickle that holds more than tensors and numbers; nothing in it was run",
            marks=pytest.mark.defect("B11", "resume from a pickle of weights"),
        ),
        pytest.param(
            pickled_optimizer,
            "a pickle that holds more than tensors and numbers; nothing in it was run",
            marks=pytest.mark.defect("B11", "resume from a pickle of an optimizer"),
        ),
        pytest.param(
            pickled_schedule,
            "a pickle that holds more than tensors and numbers; nothing in it was run",
            marks=pytest.mark.defect("B11", "resume from a pickle of a schedule"),
        ),
        pytest.param(
            empty_state,
            "trainer_state.json cannot be read",
            marks=pytest.mark.defect("N", "an empty trainer_state.json"),
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded(
    harm: Callable[[Path], None], says: str, run: Callable, now: Callable
) -> None:
    run(max_steps=1).train()
    harm(Path("run/checkpoint-1"))
    with pytest.raises(CheckpointError) as error:
        run().train(resume_from_checkpoint="run/checkpoint-1")
    now(str(error.value))
    assert says in str(error.value)
    assert "weights_only" not in str(error.value)


@pytest.mark.slow
@pytest.mark.defect("B11", "a stray scaler.pt")
def test_a_stray_scaler(run: Callable, now: Callable) -> None:
    run(max_steps=1).train()
    Path("run/checkpoint-1/manifest.json").unlink()
    torch.save({"scale": 1.0}, "run/checkpoint-1/scaler.pt")
    trainer = run()
    trainer.train(resume_from_checkpoint="run/checkpoint-1")
    now(f"goes on to step {trainer.state.global_step}")
    assert trainer.state.global_step == 2


# ---- secrets ----

SECRET = "s3cr3t-Value-0815"
SECRETS = {
    "authorization": SECRET,
    "apikey": SECRET,
    "passphrase": SECRET,
    "bearer": SECRET,
    "headers": {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": f"session={SECRET}"},
    "url": f"https://me:{SECRET}@host/v1?api_key={SECRET}&n=1",
    "pw": SECRET,
    "passwd": SECRET,
    "private key": SECRET,
    "tokens": [SECRET],
    "api_key_value": SECRET,
    "password": 4711_0815,
    "line": f"Authorization: Bearer {SECRET}",
    "pem": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.defect("B7", name)) for name in SECRETS])
def test_secrets_are_hidden(name: str, now: Callable) -> None:
    from podium.runs.redaction import without_secrets
    from podium.runs.report.page import flat

    given = {"rewards": [{"name": "judge", "args": {name: SECRETS[name], "pad_token": "</s>", "num_tokens": 5}}]}
    hidden = without_secrets(given)
    now(str(hidden["rewards"][0]["args"][name]))
    for text in (str(hidden), str(list(flat(given["rewards"][0])))):
        assert SECRET not in text
        assert "47110815" not in text
    assert hidden["rewards"][0]["args"].items() >= {"pad_token": "</s>", "num_tokens": 5}.items()


@pytest.mark.defect("C2", "config.yaml, environment.json and training_args.bin of a run")
def test_secrets_in_a_run(run: Callable, now: Callable) -> None:
    token = "hf_" + "a1" * 12
    trainer = run(max_steps=1, hub_token=token)
    trainer.train()
    trainer.save_model("run")
    held = [str(path) for path in Path("run").rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    now(", ".join(held) or "in no file of the run")
    assert not held
    assert trainer.args.hub_token == token


@pytest.mark.parametrize(
    ("settings", "level", "says"),
    [
        pytest.param(
            {},
            "WARNING",
            "(the run goes on; `strict: true` would end it)",
            marks=pytest.mark.defect("W13", "the run goes on"),
        ),
        pytest.param({"strict": True}, "ERROR", "M101", marks=pytest.mark.defect("W13", "strict: the run ends")),
    ],
)
def test_an_error_in_a_run_that_goes_on(
    run: Callable, settings: dict[str, Any], level: str, says: str, caplog: pytest.LogCaptureFixture, now: Callable
) -> None:
    trainer = run(**settings)
    Path("run").mkdir(exist_ok=True)
    trainer.health.say(Finding(code="M101", severity="error", what="The rewards are all equal.", fix="Look."))
    [record] = [record for record in caplog.records if "M101" in record.getMessage()]
    now(f"{record.levelname}: {record.getMessage()}")
    assert record.levelname == level
    assert says in record.getMessage()


def test_names_of_cases_are_short() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(len(name) < 80 for name in re.findall(r'defect\("\w+", "([^"]+)"', text))

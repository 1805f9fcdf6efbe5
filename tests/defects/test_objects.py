"""Objects given to the trainer in other forms, what is called after training, and folders that no run can have."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import peft
import pytest
import torch
import transformers
import trl
import yaml
from datasets import Dataset, DatasetDict

import podium
from podium import GRPOConfig, GRPOTrainer
from podium.errors import CheckpointError, ConfigError, DataError, HubError, ModelError, PodiumError
from podium.errors.rule import Facts, findings
from podium.runs.occupied import occupying
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer.arguments import converted
from podium.trainer.run import Arguments
from podium.trainer.setting_rules import OF_RUN

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
CHANGED: dict[str, Any] = {"learning_rate": 3e-6, "max_steps": 2, "report_to": [], "use_cpu": True, "logging_steps": 5}
Now = Callable[[str], None]


def first_line(error: pytest.ExceptionInfo[Any]) -> str:
    return str(error.value).partition("\n")[0]


def taken(name: str, value: Any) -> Any:
    """What the trainer makes of one argument."""
    return getattr(converted(Arguments(**{"model": "builtin:smollm2-135m-instruct", name: value})), name)


def other_arguments(kind: str, folder: str) -> Any:
    if kind == "dict":
        return {"output_dir": folder, **CHANGED, "beta": 0.1}
    if kind == "TrainingArguments":
        return transformers.TrainingArguments(folder, **CHANGED)
    more = {"beta": 0.1, "bf16": False, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    return trl.GRPOConfig(folder, **CHANGED, **more)


@pytest.mark.parametrize("kind", ["dict", "TrainingArguments", "trl.GRPOConfig"])
@pytest.mark.defect("NC2a", "args of another kind")
def test_settings_of_other_kinds_are_taken(tmp_path: Path, now: Now, kind: str) -> None:
    args = taken("args", other_arguments(kind, str(tmp_path / "run")))
    assert isinstance(args, GRPOConfig)
    assert {name: getattr(args, name) for name in CHANGED} == CHANGED
    assert args.gradient_checkpointing is None  # Podium's default, as it was not given
    if kind != "TrainingArguments":
        assert args.beta == 0.1
    if kind == "trl.GRPOConfig":
        assert (args.steps_per_generation, args.generation_batch_size) == (2, 16)
        assert args.product_precision == "float32"  # of bf16=False
    now(f"taken: beta {args.beta}")


@pytest.mark.defect("NC2a", "a subclass of TRL's GRPOConfig with fields of its own, as open-r1 has it")
def test_fields_of_a_subclass_stay_with_the_settings(tmp_path: Path) -> None:
    import dataclasses

    own = dataclasses.make_dataclass("Own", [("system_prompt", str, "")], bases=(trl.GRPOConfig,))
    args = taken("args", own(str(tmp_path), use_cpu=True, bf16=False, system_prompt="Think."))
    assert (type(args), args.system_prompt) == (GRPOConfig, "Think.")


def rows_given(kind: str, folder: Path) -> Any:
    file = folder / "rows.csv"
    pd.DataFrame(ROWS).to_csv(file, index=False)
    made: dict[str, Callable[[], Any]] = {
        "DataFrame": lambda: pd.DataFrame(ROWS),
        "columns": lambda: Dataset.from_list(ROWS)[:4],
        "text": lambda: str(file),
        "path": lambda: file,
        "function": lambda: lambda: iter(ROWS),
        "rows": lambda: ROWS,
    }
    return made[kind]()


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("kind", ["DataFrame", "columns", "text", "path", "function", "rows"])
@pytest.mark.defect("NC2b", "rows as a table of pandas, columns, a file's name, a function")
def test_rows_of_other_kinds_are_taken(tmp_path: Path, argument: str, kind: str) -> None:
    rows = taken(argument, rows_given(kind, tmp_path))
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]


@pytest.mark.defect("NC2b", "a table of pandas with gaps, as one set of several")
def test_gaps_of_a_table_are_nulls() -> None:
    table = pd.DataFrame([{"prompt": "a", "answer": 1.5}, {"prompt": "b"}])
    sets = taken("eval_dataset", {"hard": table, "easy": ROWS})
    assert [row["answer"] for row in sets["hard"]] == [1.5, None]
    assert sets["easy"] is ROWS


BOTH = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS))
REFUSED: dict[str, tuple[str, Callable[[], Any], type[PodiumError], str]] = {
    "args: text": ("args", lambda: "run.yaml", ConfigError, 'args=podium.GRPOConfig("runs/first", ...)'),
    "args: the class": ("args", lambda: GRPOConfig, ConfigError, "args is the class GRPOConfig"),
    "args: another trainer's": (
        "args",
        lambda: trl.SFTConfig("x", use_cpu=True, bf16=False),
        ConfigError,
        "type SFTConfig; it must be a GRPOConfig",
    ),
    "rows: DatasetDict": ("train_dataset", lambda: BOTH, DataError, 'train_dataset=data["train"]'),
    "rows: a number": ("train_dataset", lambda: 7, DataError, "it must be rows"),
    "rows: a class": ("train_dataset", lambda: Dataset, DataError, "train_dataset is the class Dataset"),
    "rows: no such file": ("train_dataset", lambda: "./nowhere.csv", DataError, "There is no file or folder"),
    "adapter: the class": ("peft_config", lambda: peft.LoraConfig, ConfigError, "peft_config is the class LoraConfig"),
    "adapter: true": ("peft_config", lambda: True, ConfigError, "peft_config=LoraConfig(r=16)"),
    "adapter: unknown setting": ("peft_config", lambda: {"rank": 8}, ConfigError, "unexpected keyword argument 'rank'"),
    "quantization: true": ("quantization_config", lambda: True, ConfigError, "BitsAndBytesConfig(load_in_4bit=True)"),
    "model: None": ("model", lambda: None, ModelError, "model is None; it must be a name"),
    "model: the class": ("model", lambda: transformers.AutoModelForCausalLM, ModelError, "the class AutoModelFor"),
    "model: with its tokenizer": ("model", lambda: (tiny_model(), 1), ModelError, "processing_class=made[1]"),
    "model: its configuration": ("model", lambda: tiny_model().config, ModelError, "object of type LlamaConfig"),
    "model: a layer": ("model", lambda: torch.nn.Linear(1, 1), ModelError, "object of type Linear"),
    "model: without a head": ("model", lambda: tiny_model().model, ModelError, "is a LlamaModel, which does not gen"),
    "model: a pipeline": (
        "model",
        lambda: transformers.pipeline("text-generation", tiny_model(), tokenizer=tiny_tokenizer()),
        ModelError,
        "model=pipe.model, processing_class=pipe.tokenizer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.defect("NC2c", "objects that are nothing to train with")
def test_other_objects_are_one_message(now: Now, case: str) -> None:
    name, make, kind, says = REFUSED[case]
    with pytest.raises(kind) as refused:
        taken(name, make())
    assert says in str(refused.value)
    now(f"{case}: {first_line(refused)}")


@pytest.mark.defect("NC2c", "podium.check makes findings of them")
def test_a_check_makes_findings_of_them() -> None:
    [found] = podium.check(None, len, train_dataset=ROWS)
    assert (found.code, found.severity) == ("M013", "error")


@pytest.mark.defect("NC2d", "settings of an adapter, and of quantization, as a dict")
def test_settings_of_adapters_may_be_a_dict() -> None:
    assert taken("peft_config", {"r": 8}) == peft.LoraConfig(r=8)
    assert isinstance(taken("peft_config", {"peft_type": "IA3"}), peft.IA3Config)
    assert taken("quantization_config", {"load_in_4bit": True}).load_in_4bit


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def made(config: dict[str, Any] | None = None, **changes: Any) -> GRPOTrainer:
        sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "bf16": False}
        args = GRPOConfig(str(tmp_path / "run"), report_to=[], use_cpu=True, **{**sizes, **(config or {})})
        given = {"model": tiny_model(), "reward_funcs": podium.rewards.numeric_match, "train_dataset": ROWS}
        return GRPOTrainer(**{**given, "processing_class": tiny_tokenizer(), "args": args, **changes})

    return made


@pytest.mark.defect("NC2e", "evaluate() without rows; optimizers and callbacks that are not in a list")
def test_what_is_missing_is_said(make: Callable[..., GRPOTrainer], now: Now) -> None:
    trainer = make(callbacks=transformers.TrainerCallback)
    with pytest.raises(DataError, match="There are no rows to evaluate on") as refused:
        trainer.evaluate()
    now(first_line(refused))
    with pytest.raises(ConfigError, match=r"optimizers=\(optimizer, None\)"):
        make(optimizers=torch.optim.SGD(tiny_model().parameters()))
    with pytest.raises(ConfigError, match=r"A callback is an object of type function.*\n.*callbacks=\[Mine\(\)\]"):
        make(callbacks=[lambda *args, **kwargs: None])
    for name in ("accelerator_config", "deepspeed"):
        with pytest.raises(ConfigError, match=rf"{name}: transformers raised|deepspeed config"):
            GRPOConfig("out", **{name: "nope.json"})


@pytest.mark.defect("NC2f", "an attention whose package is not installed")
def test_an_attention_that_is_not_here_is_said_before_weights_load(
    tmp_path: Path, make: Callable[..., GRPOTrainer], now: Now
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match="attn_implementation is flash_attention_2, and there is no GPU") as refused:
        make({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, model=folder)
    now(first_line(refused))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.defect("NC2h", "create_model_card with TRL's arguments, saved or not")
def test_a_card_is_written_with_trls_arguments(
    tmp_path: Path, make: Callable[..., GRPOTrainer], now: Now, lora: bool
) -> None:
    trainer = make(peft_config={"r": 2} if lora else None)
    if not lora:
        trainer.save_model()
    trainer.create_model_card("<b>mine</b>", dataset_name="openai/gsm8k", tags=["r1", "grpo"])
    text = (tmp_path / "run" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["datasets"] == ["openai/gsm8k"]
    assert head["tags"] == ["grpo", "podium", *(["lora"] if lora else []), "r1"]
    assert head["library_name"] == ("peft" if lora else "transformers")
    assert "<b>" not in text
    trainer.create_model_card(tags="one", license="mit", dataset="/home/me/secret/x.csv", finetuned_from="a/b")
    text = (tmp_path / "run" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert (head["license"], head["base_model"], "one" in head["tags"]) == ("mit", "a/b", True)
    assert "secret" not in text
    now(", ".join(head["tags"]))


@pytest.mark.defect("NC2h", "push_to_hub with TRL's arguments, without a hub")
def test_a_push_without_a_hub_is_one_message(
    make: Callable[..., GRPOTrainer], now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError) as refused:
        make().push_to_hub(dataset_name="openai/gsm8k", tags=["r1"], model_name="mine")
    now(first_line(refused))


@pytest.mark.defect("NC2i", "a disk on which nothing more can be written")
def test_a_full_disk_is_found_before_weights_load(tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    args = GRPOConfig(str(tmp_path / "run"), report_to=[], use_cpu=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # a file may be made and not be filled
    try:
        found = list(findings(OF_RUN, Facts(settings=args, adapter=False, evaluates=False)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [error.code for error in found] == ["C036"]
    now(str(found[0]).partition("\n")[0].replace(str(tmp_path), "."))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full"), occupying(tmp_path / "run"):
        pass


@pytest.mark.defect("NC2i", "a working directory that was deleted")
def test_a_deleted_working_directory_is_one_message(tmp_path: Path, now: Now) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os; from podium.cli import main; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "check", "x.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: The working directory was deleted.")
    assert "Traceback" not in done.stderr
    now(done.stderr)


@pytest.mark.defect("NC2j", "a template with two braces")
def test_a_template_with_two_braces_is_said(tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.csv").write_text("question,answer\n" + "".join(f"{i}+1,{i + 1}\n" for i in range(8)))
    (tmp_path / "run.yaml").write_text(
        f'model: {save_tiny_model(tmp_path / "model")}\ndataset: q.csv\nprompt: "{{{{question}}}}"\n'
        "rewards: numeric_match\nmax_completion_length: 16\nuse_cpu: true\n"
    )
    [found] = [each for each in podium.check(tmp_path / "run.yaml") if each.code == "D052"]
    assert found.fix == 'prompt: "{question}"'
    now(found.what.replace(str(tmp_path), "."))

"""What is said of a model's name and folder before any weight is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.errors import ModelError
from podium.models.check import check_model_name

NAME = "builtin:smollm2-135m-instruct"
WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234567\n"
ENCODER = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
CODE_OF_ITS_OWN = {"model_type": "odd", "auto_map": {"AutoModelForCausalLM": "code.InvalidValue"}}


def model_folder(folder: Path, files: dict[str, bytes | str | None] | None = None) -> Path:
    """A folder that passes; `files` replaces files of it, and None removes one."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole: dict[str, bytes | str | None] = {
        "config.json": '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
        WEIGHTS: len(header).to_bytes(8, "little") + header + bytes(8),
        "tokenizer.json": "{}",
    }
    folder.mkdir(exist_ok=True)
    for name, content in (whole | (files or {})).items():
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def refusal(name: str) -> ModelError:
    with pytest.raises(ModelError) as refused:
        check_model_name(name)
    return refused.value


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    check_model_name(str(model_folder(tmp_path / "m")))
    check_model_name(NAME)


@pytest.mark.defect("NC5", "folders that are no model")
@pytest.mark.defect("NC2g", "a model with an encoder, and shards without their index")
@pytest.mark.parametrize(
    ("files", "code", "fix"),
    [
        ({"config.json": None}, "M016", "hf download"),
        ({"config.json": "{"}, "M016", "copy m/config.json again"),
        ({"config.json": POINTER}, "M008", "git -C m lfs pull"),
        ({"config.json": json.dumps(ENCODER)}, "M013", "model: builtin:"),
        ({"config.json": '{"architectures": ["BertForMaskedLM"]}'}, "M013", "model: builtin:"),
        ({"config.json": json.dumps(CODE_OF_ITS_OWN)}, "M011", "trust_remote_code: true"),
        ({"tokenizer.json": None}, "M003", "Copy them from the original model"),
        ({"tokenizer.json": POINTER}, "M008", "git -C m lfs pull"),
        ({WEIGHTS: None}, "M017", "hf download"),
        ({WEIGHTS: None, "m.gguf": "GGUF"}, "M009", "the model it was made from"),
        ({WEIGHTS: None, "model-00001-of-00002.safetensors": "."}, "M017", f"copy {WEIGHTS}.index.json"),
        ({WEIGHTS: POINTER}, "M008", "git -C m lfs pull"),
        ({WEIGHTS: b"123"}, "M008", "Download or copy it again"),
        (
            {f"{WEIGHTS}.index.json": '{"weight_map": {"w": "model-2.safetensors"}}'},
            "M017",
            "Download or copy it again",
        ),
        (
            {"config.json": None, "adapter_config.json": '{"base_model_name_or_path": "org/base"}'},
            "M012",
            "podium merge m --out m-merged; then model: m-merged",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_folder_that_is_no_model_is_refused_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes | str | None], code: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "m", files)
    error = refusal("m")
    assert error.code == code
    assert fix in error.fix


def test_cut_off_weights_are_named_with_both_sizes(tmp_path: Path) -> None:
    weights = model_folder(tmp_path / "m") / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    error = refusal(str(tmp_path / "m"))
    assert error.facts["actual"] == len(whole) - 1
    assert error.facts["size"] == f"{len(whole)} bytes expected"


@pytest.mark.defect("NC5", "names that are no model")
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("https://huggingface.co/org/name", "model: org/name"),
        ("-", f"model: {NAME}"),
        ("m*", f"model: {NAME}"),
    ],
)
def test_a_name_that_is_no_model_has_a_line_to_type(name: str, fix: str) -> None:
    assert refusal(name).fix == fix


def test_names_that_are_near_a_missing_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "nope2")
    assert "nope2" in str(refusal(str(tmp_path / "nope")))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    error = refusal("runs/nowhere")
    assert "Folders in runs: first." in str(error)
    assert error.fix.startswith("one of these folders; or hf download runs/nowhere")


def test_run_folder_points_to_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (5, 10):
        model_folder(tmp_path / f"checkpoint-{step}")
    assert refusal(str(tmp_path)).facts["steps"] == tmp_path / "checkpoint-10"


def test_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert {refusal(str(name)).code for name in (tmp_path / "m.gguf", tmp_path)} == {"M009"}


def test_hub_id_that_cannot_be_reached(tmp_path: Path, now: Callable[[str], None]) -> None:
    """The hub is unreachable in tests; the message says so and what there is instead."""
    program = "from podium.models.check import check_model_name; check_model_name('no-such-owner/no-such-model')"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    now(done.stderr.splitlines()[-1])
    assert "the hub cannot be reached" in done.stderr
    assert NAME in done.stderr.splitlines()[-1]

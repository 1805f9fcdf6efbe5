"""`podium serve`: the server that is started, what it is told, and with `transformers serve` what it answers."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from podium.cli import app
from podium.cli.chat import Speaker
from podium.errors import ConfigError
from podium.runs.find_model import find_model
from podium.runs.shipping.merge import export_model
from podium.runs.shipping.origin import template_kwargs
from podium.runs.shipping.server import ENGINES, refusal, server
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

SERVES = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "openai"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    base = save_tiny_model(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), lora)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def start(run: Path, *arguments: str, path: str = "") -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(run.parents[1] / "hub"),
        "PATH": os.pathsep.join([path, os.environ["PATH"]]),
    }
    command = [sys.executable, "-m", "podium", "serve", str(run), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.mark.defect("H6", "the prompt of training, and a folder for /v1/models")
def test_the_messages_of_training_are_in_the_request(
    run: Path, monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]
) -> None:
    (run / "config.yaml").write_text(
        "dataset: mine.jsonl\nprompt: '{q}'\nanswer: '{a}'\nsystem: It's sums.\n"
        "chat_template_kwargs: {enable_thinking: false}\n"
    )
    monkeypatch.setattr("podium.runs.shipping.server._transformers", lambda: ("server",))
    monkeypatch.setitem(ENGINES, "transformers", lambda: ("server",))
    monkeypatch.setattr("podium.runs.shipping.server.become", lambda made: None)
    result = CliRunner().invoke(app, ["serve", str(run), "--port", str(free_port())])
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stdout.splitlines() if "curl" in line]
    body = json.loads(shlex.split(line)[-1])
    assert [turn["content"] for turn in body["messages"]] == ["It's sums.", "Hello"]
    assert body["model"] == "mine/merged"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "Send `chat_template_kwargs` with every request" in result.stdout
    assert "The server adds nothing to a conversation: send the first 1 of the messages above" in result.stdout
    now(result.stdout.splitlines()[-1])


def test_a_talk_is_rendered_as_the_prompts_of_the_training_were(run: Path, tmp_path: Path) -> None:
    """With the arguments of its chat template: of a run, and of a folder that was exported from it."""
    (run / "config.yaml").write_text("chat_template_kwargs: {mark: thought}\n")
    export_model(find_model(str(run)), tmp_path / "merged")
    for folder in (run, tmp_path / "merged"):
        assert template_kwargs(find_model(str(folder))) == {"mark": "thought"}
    assert template_kwargs(find_model(str(tmp_path / "base"))) == {}
    tokenizer = tiny_tokenizer(chat_template="{{ messages[-1].content }}{{ mark }}")
    for kwargs, shown in (({"mark": "!"}, "Hi!"), ({}, "Hi")):
        speaker = Speaker(tiny_model("llama"), tokenizer, max_tokens=1, temperature=0, template_kwargs=kwargs)
        prompt, _ = speaker._written([{"role": "user", "content": "Hi"}])
        assert tokenizer.decode(prompt) == shown


@pytest.mark.slow
@pytest.mark.defect("H6", "a machine without a hub cache")
def test_a_server_is_told_the_model_by_a_short_name_and_this_machine(run: Path, tmp_path: Path) -> None:
    """A program called `vllm` that says how it was called."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    says = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv[1:]]))"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{says}' \"$@\"\n")  # its path may have spaces
    program.chmod(0o755)
    port = str(free_port())
    process = start(run, "--engine", "vllm", "--port", port, "--", "--max-model-len", "99", path=str(program.parent))
    out, _ = process.communicate(timeout=250)
    assert process.returncode == 0, out
    folder, arguments = json.loads(out.splitlines()[-1])
    assert (tmp_path / "hub").is_dir(), "`transformers serve` reads it for /v1/models"
    assert arguments == ["serve", "mine/merged", "--host", "127.0.0.1", "--port", port, "--max-model-len", "99"]
    assert (Path(folder) / "mine" / "merged" / "model.safetensors").is_file()
    assert f"http://127.0.0.1:{port}/v1" in out


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--engine is 'x'; it must be one of transformers, vllm"):
        server("x", "m", host="127.0.0.1", port=free_port())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no `vllm` beside this Python"):
        server("vllm", "m", host="127.0.0.1", port=free_port())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'fastapi, uvicorn, openai.\n  fix: Type: pip install "podium\[serve\]"'):
        server("transformers", "m", host="127.0.0.1", port=free_port())


def test_a_port_that_is_taken_is_said_before_a_model_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{port}"):
            server("transformers", "m", host="127.0.0.1", port=port)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        pytest.param({"n": 2}, "n", marks=pytest.mark.defect("LSserve", "n=2")),
        pytest.param({"logprobs": True}, "logprobs", marks=pytest.mark.defect("LSserve", "logprobs")),
        pytest.param({"logprobs": 0}, "logprobs", marks=pytest.mark.defect("LSserve", "logprobs: 0 of completions")),
        pytest.param(
            {"response_format": {"type": "json_object"}},
            "response_format",
            marks=pytest.mark.defect("LSserve", "response_format"),
        ),
        pytest.param(
            {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tool_choice": "auto", "user": "x"},
            None,
            marks=pytest.mark.defect("LSserve", "values that ask for nothing"),
        ),
        pytest.param({"n": None, "stop": ["x"]}, None, marks=pytest.mark.defect("LSserve", "null")),
    ],
)
def test_what_would_be_ignored_is_refused(fields: dict, refused: str | None, now: Callable[[str], None]) -> None:
    error = refusal({"messages": [], **fields})
    now(str(error))
    assert (error and error["error"]["param"]) == refused


@pytest.mark.skipif(not SERVES, reason='needs pip install "podium[serve]"')
def test_transformers_serve_answers_and_stops(run: Path) -> None:
    port = free_port()
    process = start(run, "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        assert _answers(f"{url}/health", process)
        asked = {"model": "mine/merged", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] <= 3
        assert isinstance(reply.json()["choices"][0]["message"]["content"], str)
        assert [each["id"] for each in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["mine/merged"]
        refused = httpx.post(f"{url}/v1/chat/completions", json={**asked, "n": 2}, timeout=120)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**asked, "stream": True}, timeout=120) as stream:
            assert [line for line in stream.iter_lines() if line][-1].startswith("data: ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Finished server process" in out


def _answers(url: str, process: subprocess.Popen[str]) -> bool:
    for _ in range(200):
        assert process.poll() is None, process.stdout
        try:
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            time.sleep(1)
    return False

"""`podium push` with the hub's real client, against a small server that answers as the hub does."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from podium.cli import BEGINS, app
from podium.errors import hub_errors
from podium.models.builtin import BUILTIN_MODELS
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer

TOKEN = "hf_" + "x" * 34


@dataclass
class Hub:
    """What the server was asked and sent."""

    url: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    """Name of a repository to whether it is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


class Answers(BaseHTTPRequestHandler):
    """The part of the hub's interface that sending a model needs."""

    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, body: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        self.hub.asked.append(f"{self.command} {self.path}")
        if self.path.startswith(("/api/models", "/api/repos", "/api/whoami")):  # addresses to upload to are signed
            self.hub.tokens.add(self.headers.get("Authorization"))
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        self._body()
        repo = self.path.removeprefix("/api/models/")
        if self.path == "/api/whoami-v2":
            self._reply({"type": "user", "name": "me", "auth": {}, "orgs": []})
        elif repo in self.hub.repos:
            self._reply({"id": repo, "private": self.hub.repos[repo], "siblings": []})
        else:
            self._reply({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.removeprefix("/upload/")] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/commit/main"):
            self._commit([json.loads(line) for line in body.splitlines()])
            return
        given = json.loads(body)
        if self.path == "/api/repos/create":
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            self.hub.repos[name] = given.get("visibility") == "private" or given.get("private") is True
            self._reply({"url": f"{self.hub.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            assert yaml.safe_load(given["content"].split("---")[1])
            self._reply({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            kinds = {True: "lfs", False: "regular"}
            files = [
                {"path": f["path"], "uploadMode": kinds[f["path"].endswith("safetensors")]} for f in given["files"]
            ]
            self._reply({"files": [{**f, "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            upload = [
                {**o, "actions": {"upload": {"href": f"{self.hub.url}/upload/{o['oid']}"}}} for o in given["objects"]
            ]
            self._reply({"transfer": "basic", "objects": upload})
        else:
            self._reply({"error": "not here"}, 400)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.blobs[value["oid"]]
        repo = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
        self._reply({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.hub.url}/{repo}/commit/{'0' * 40}"})


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answers,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with an adapter on the built-in model, as training leaves it."""
    folder = tmp_path / "runs" / "sums"
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), lora)
    copy = next(iter(BUILTIN_MODELS.values())).cache_folder
    model.peft_config["default"].base_model_name_or_path = f"{tmp_path}/cache/models/{copy}"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_tiny_model(tmp_path / "cache" / "models" / copy)
    (folder / "config.yaml").write_text(f"model: builtin:smollm2-135m-instruct\ndataset: {tmp_path}/rows.jsonl\n")
    (folder / "metrics.jsonl").write_text('{"step": 3, "time": 1, "values": {}}\n')
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "0000001-0.parquet").write_bytes(b"rows")
    for name in ("optimizer.pt", "training_args.bin", ".env"):
        (folder / name).write_bytes(b"state")
    return folder


Push = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> Push:
    """`push("--yes")`: exit code, stdout and stderr."""
    monkeypatch.setenv("PODIUM_CACHE", str(run.parents[1] / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(run.parents[1] / "token"))

    def invoke(*arguments: str, token: str | None = TOKEN, url: str = hub.url) -> tuple[int, str, str]:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", token or "")
        result = CliRunner().invoke(app, ["push", str(run), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert TOKEN not in result.output
        return result.exit_code, result.stdout, result.stderr

    return invoke


def test_an_adapter_is_sent_as_shown_and_nothing_else(hub: Hub, run: Path, push: Push) -> None:
    code, out, err = push("--yes")
    assert code == 0, err
    assert "To me/sums (new, private):" in out
    assert hub.repos == {"me/sums": True}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert set(hub.files) == set(re.findall(r"^  (\S+) +[\d.,]+ (?:\w?B|bytes)$", out, re.MULTILINE))
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(hub.files)
    for hidden in ("optimizer.pt", "training_args.bin", ".env", "config.yaml", "metrics.jsonl", "rollouts/"):
        assert hidden not in hub.files
        assert hidden in out.split("Not sent: ")[1]
    assert hub.files["adapter_model.safetensors"] == (run / "adapter_model.safetensors").read_bytes()
    config = json.loads(hub.files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    card = hub.files["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert 'model="me/sums"' in card
    assert "Data: `rows.jsonl`" in card
    assert not [name for name, data in hub.files.items() if str(run.parents[1]).encode() in data]
    assert out.rstrip().endswith(f"{hub.url}/me/sums/commit/{'0' * 40}")


def test_nothing_is_sent_without_a_yes(hub: Hub, push: Push) -> None:
    code, out, _ = push()
    assert code != 0
    assert "Send these?" in out
    assert not hub.files
    assert not hub.repos


def test_a_public_repository_must_be_meant(hub: Hub, push: Push) -> None:
    hub.repos["me/open"] = False
    code, _, err = push("--repo", "me/open", "--yes")
    assert code == 2
    assert "me/open is on the hub already, and public.\n  fix: Type --public" in err
    assert not hub.files
    code, out, _ = push("--repo", "me/open", "--yes", "--public")
    assert code == 0
    assert "To me/open (there already, public):" in out


def test_the_merged_model_and_what_was_asked_for_are_sent(hub: Hub, run: Path, push: Push) -> None:
    code, _, err = push("--merged", "--repo", "team/sums", "--yes", "--include", "rollouts/*")
    assert code == 0, err
    assert hub.repos == {"team/sums": True}
    assert hub.files["model.safetensors"] == (run / "merged" / "model.safetensors").read_bytes()
    assert hub.files["rollouts/0000001-0.parquet"] == b"rows"
    card = hub.files["README.md"].decode()
    assert 'model="team/sums"' in card
    assert "merged into the weights" in card
    assert not any("adapter" in name for name in hub.files)


@pytest.mark.parametrize(
    ("token", "url", "message"),
    [
        (None, None, "There is no token for the hub.\n  fix: Type: hf auth login"),
        (TOKEN, "http://127.0.0.1:9", "The hub cannot be reached (ConnectError); nothing was sent to sums"),
    ],
)
def test_no_token_and_no_network_are_one_message(
    hub: Hub, push: Push, token: str | None, url: str | None, message: str
) -> None:
    code, _, err = push("--yes", token=token, url=url or hub.url)
    assert code == 2
    assert err.startswith(f"{BEGINS['push']} ...\nerror: {message}")
    assert len(err.splitlines()) == 3, "what is read, what is wrong, and what to type"
    assert not hub.files


# ---- what would be sent: no network ----


def dry(run: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setenv("PODIUM_CACHE", str(run.parents[1] / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi.__init__", lambda *_, **__: pytest.fail("asked the hub"))
    result = CliRunner().invoke(app, ["push", str(run), "--dry-run", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_dry_run_asks_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = dry(run, monkeypatch, "--include", "*.yaml", "--include", "rollouts/*")
    assert code == 0
    assert "To YOU/sums on the Hugging Face hub (not looked up, private):" in out
    assert "config.yaml" in out.split("Not sent")[0]
    assert "rollouts/" not in out.split("Not sent")[1].split("next:")[0]


def test_an_adapter_that_was_not_trained_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "adapter_model.safetensors"
    save_file({name: x * ("lora_B" not in name) for name, x in load_file(path).items()}, path)
    code, _, err = dry(run, monkeypatch)
    assert code == 2
    assert "changes nothing: its second matrices are all zero" in err
    assert dry(run, monkeypatch, "--ignore", "M034")[0] == 0


def test_a_base_that_nobody_else_has_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = save_tiny_model(tmp_path / "mine")
    path = run / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": mine}))
    code, _, err = dry(run, monkeypatch)
    assert code == 2
    assert "`mine`, a folder of this machine, which nobody else has.\n  fix: Send the whole model with --merged" in err
    assert dry(run, monkeypatch, "--base", "me/mine")[0] == 0


@pytest.mark.defect("F14", "push --dry-run --merged")
def test_a_dry_run_of_the_merged_model_writes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]
) -> None:
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    monkeypatch.setattr("podium.runs.shipping.merge.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    code, out, _ = dry(run, monkeypatch, "--merged")
    assert code == 0
    assert "is not merged yet, and a dry run writes nothing" in out
    assert "about 143.1 kB of weights" in out
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before
    now(out)


@pytest.mark.defect("G1", "a connection that fails, by the client of newer huggingface_hub")
def test_errors_of_any_client_are_one_message(
    push: Push, monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]
) -> None:
    """Whatever HTTP library the hub's own errors are made of."""
    error = type("ConnectError", (hub_errors()[0],), {})

    def fail(*_: Any, **__: Any) -> None:
        raise error("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", fail)
    code, _, err = push("--yes")
    assert code == 2
    assert "The hub cannot be reached (ConnectError)" in err
    now(err)


@pytest.mark.defect("H9", "where a push goes")
def test_the_place_of_a_push_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, now: Callable[[str], None]) -> None:
    _, out, _ = dry(run, monkeypatch)
    now(out.splitlines()[0])
    assert out.startswith("To YOU/sums on the Hugging Face hub")
    assert dry(run, monkeypatch, "--repo", "team/sums")[1].startswith("To team/sums on the Hugging Face hub")


@pytest.mark.parametrize("name", ["chat_template.jinja", "notes.md"])
def test_a_text_with_a_token_is_never_sent(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (run / name).write_text(f"key: {TOKEN}\n")
    code, out, err = dry(run, monkeypatch, "--include", name)
    assert code == 2
    assert f"{name}, line 1, holds what looks like a token" in err
    assert TOKEN not in out + err
    assert dry(run, monkeypatch, "--include", name, "--ignore", name)[0] == 0


def test_patterns_stay_in_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = run.parent / "outside.txt"
    outside.write_text("x")
    (run / "link.txt").symlink_to(outside)
    for pattern in ("../outside.txt", "link.txt", "nothing*"):
        code, _, err = dry(run, monkeypatch, "--include", pattern)
        assert code == 2
        assert f"--include {pattern}: no such file in sums" in err

"""The live page's server, and the curves in the terminal."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from podium.cli import app
from podium.errors import ConfigError
from podium.runs.report import live
from podium.runs.report.live import PageServer


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[..., Any]]:
    """`serve(folder)` gives `get(path, headers) -> (status, headers, body)`."""
    monkeypatch.setattr(live, "SHARE", 1e9)  # tests do not wait
    with ExitStack() as stack:

        def start(*folders, **given):
            server = stack.enter_context(PageServer(folders, **given))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            stack.callback(server.shutdown)

            def get(path="/", headers=None, method="GET"):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
                connection.request(method, path, headers=headers or {})
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()

            get.server = server
            return get

        yield start


def test_the_page_and_its_news(serve, run_folder):
    folder = run_folder(num_steps=4)
    get = serve(folder)
    status, headers, body = get("/")
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    version = json.loads(body.split(b'id="data">')[1].split(b"</script>")[0])["version"]
    assert get(f"/data?version={version}&after=4")[0] == 204
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 1.0, "values": {"reward": 2.0}}\n')
    status, _, body = get(f"/data?version={version}&after=3")
    news = json.loads(body)
    assert status == 200
    assert news["version"] != version
    assert news["runs"][0]["steps"][-1] == 5
    assert news["runs"][0]["completions"]["total"] == 64  # of step 4


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:1", "localhost.evil.example", ""])
def test_another_host_name_is_refused(serve, run_folder, host):
    assert serve(run_folder(num_steps=2))("/", {"Host": host})[0] == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_its_own_names_are_known(serve, run_folder, name):
    get = serve(run_folder(num_steps=2))
    assert get("/data?after=1", {"Host": f"{name}:{get.server.server_port}"})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_answered(serve, run_folder, method):
    assert serve(run_folder(num_steps=2))("/data", method=method)[0] == 501


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/metrics.jsonl", "/config.yaml", "/data/"])
def test_no_files_are_served(serve, run_folder, path):
    assert serve(run_folder(num_steps=2))(path)[0] == 404


@pytest.mark.parametrize("query", ["", "after=", "after=x", "after=1,2"])
def test_a_wrong_question_is_answered_as_one(serve, run_folder, query):
    assert serve(run_folder(num_steps=2))(f"/data?{query}")[0] == 400


def test_other_machines_need_a_key(serve, run_folder):
    folder = run_folder(num_steps=2)
    for key in ("", "short"):
        with pytest.raises(ConfigError, match="--key"):
            PageServer([folder], host="0.0.0.0", key=key)
    get = serve(folder, key="k" * 20)
    assert get("/")[0] == 403
    assert get("/?key=wrong")[0] == 403
    assert get(f"/?key={'k' * 20}")[0] == 200


def test_a_port_that_is_taken_is_a_message(serve, run_folder):
    folder = run_folder(num_steps=2)
    with pytest.raises(ConfigError, match="--port"):
        PageServer([folder], port=serve(folder).server.server_port)


def test_reading_takes_a_share_of_the_time(run_folder):
    watched = live.WatchedRuns([run_folder(num_steps=2)])
    first = watched.refresh()
    assert watched.not_before > 0
    with (watched.folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, "values": {}}\n')
    watched.not_before = float("inf")
    assert watched.refresh() == first
    watched.not_before = 0
    assert watched.refresh() != first


def test_numbers_in_the_terminal_without_control_sequences(run_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder = run_folder(num_steps=20, texts=("\x1b]52;c;aGk=\x07gone\x1b[2J \u202eturned [bold]kept[/bold]",))
    result = CliRunner().invoke(app, ["watch", str(folder), "--once"])
    assert result.exit_code == 0, result.output
    assert "Reward rose from" in result.stdout
    assert "warning[M999]" in result.stdout
    assert "[bold]kept[/bold]" in result.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(width, marks=(pytest.mark.defect("H12", f"{width} columns"), pytest.mark.defect("F12", "watch")))
        for width in (40, 80)
    ],
)
def test_no_number_is_cut_on_a_narrow_terminal(run_folder, monkeypatch, now, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.modules["podium.cli.watch"], "console", Console(width=columns, highlight=False))
    folder = run_folder(num_steps=20)
    result = CliRunner().invoke(app, ["watch", str(folder), "--once"])
    assert result.exit_code == 0, result.output
    table = result.stdout.split("Completions")[0]
    assert "\u2026" not in table
    assert "step 1 " in table
    assert "step 20" in table
    assert max(map(len, result.stdout.splitlines())) <= columns
    now(next(line for line in table.splitlines() if "entropy" in line).strip())


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(x, marks=pytest.mark.slow) for x in ("latin-1", "utf-8"))]
)
@pytest.mark.defect("T11", "watch --once")
def test_a_terminal_that_is_not_utf_8(run_folder, now, encoding):
    folder = run_folder(num_steps=20, texts=("caf\u00e9 \u4e2d",))
    made = subprocess.run(
        [sys.executable, "-m", "podium", "watch", str(folder), "--once"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "90"},
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    text = made.stdout.decode(encoding)
    assert ("\\u4e2d" in text) == (encoding != "utf-8")
    now(next(line for line in text.splitlines() if "entropy" in line).strip())


def test_a_run_without_anything_yet(run_folder, monkeypatch):
    folder = run_folder(num_steps=2)
    (folder / "metrics.jsonl").unlink()
    result = CliRunner().invoke(app, ["watch", str(folder), "--once"])
    assert result.exit_code == 0, result.output
    assert "No reward has been logged yet" in result.stdout

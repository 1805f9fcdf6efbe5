"""Tools of MCP servers, with real ones: listed, renamed, limited, ended, trained with (`make test-environments`)."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import podium
from podium.agents import mcp
from podium.agents.chat import ChatFormat
from podium.agents.episode import Episode, EpisodeLimits
from podium.agents.mcp import in_episode, mcp_tools
from podium.agents.resolve import resolve_tools
from podium.agents.tools import CallLimits, Tool, ToolRunner, by_name, distinct
from podium.checks import check_recipe
from podium.errors import ConfigError
from podium.isolation.workers import stop_all
from podium.recipe import load
from podium.records import Call
from tests.unit.agents_setup import make, multiply

SERVER = '''
import base64, os, sys, time
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server, calls = MCPServer("shop"), []
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
print("the shop opens", file=sys.stderr, flush=True)

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b

@server.tool()
def count() -> int:
    """How often this was called."""
    calls.append(1)
    return len(calls)

@server.tool()
def price(name: str) -> str:
    """The price of a thing."""
    raise ToolError(f"no {name} here")

@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"

@server.tool()
def die() -> str:
    """End the process."""
    print("the shop closes", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def long(characters: int) -> str:
    """A long text."""
    return "x" * characters

@server.tool()
def seen() -> str:
    """Names of the environment variables, the folder, and the process."""
    return " ".join([str(os.getpid()), os.getcwd(), *sorted(os.environ)])

@server.tool()
def picture() -> list:
    """A text and a picture."""
    return ["a dot", Image(data=base64.b64decode(DOT), format="png")]

async def guarded(scope, receive, send):
    """The server for those who know the key."""
    if scope["type"] == "http" and (b"authorization", b"Bearer k3y") not in scope["headers"]:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        return await send({"type": "http.response.body"})
    await app(scope, receive, send)

if __name__ == "__main__":
    if "--guarded" in sys.argv:
        import uvicorn
        app = server.streamable_http_app()
        uvicorn.run(guarded, port=int(sys.argv[-1]), log_level="error")
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    server.run()
'''
NAMES = ["multiply", "count", "price", "sleep", "die", "long", "seen", "picture"]
COMMAND = ["python", "shop.py"]
RECIPE = """
model: builtin:smollm2-135m-instruct
dataset: builtin:guesses
max_steps: 2
per_device_train_batch_size: 8
rewards: [tool_use]
"""

pytestmark = [
    pytest.mark.slow,  # and with the package: `make test-environments`
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the package mcp"),
    pytest.mark.filterwarnings("ignore:You are using"),
]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a server, in which we are. Whatever is started ends with the test."""
    (tmp_path / "shop.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    stop_all()
    assert are_gone(tmp_path)


def servers(folder: Path) -> list[psutil.Process]:
    """Servers in the folder that run."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.pid != os.getpid() and each.status() != "zombie" and Path(each.cwd()) == folder.resolve():
                found += [each] * (each.cmdline()[1:2] == ["shop.py"])
        except (psutil.Error, OSError):
            continue
    return found


def are_gone(folder: Path, seconds: float = 10.0) -> bool:
    """Whether its servers end: the kernel takes a moment after a signal."""
    deadline = time.monotonic() + seconds
    while servers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not servers(folder)


def run(tools: Sequence[Tool], tool: str, /, *, limits: CallLimits = CallLimits(), **arguments: Any) -> Call:  # noqa: B008
    calls = [{"type": "function", "function": {"name": tool, "arguments": arguments}}]
    return ToolRunner().run(calls, by_name(tools), limits)[0]


# ---- listed ----


def test_tools_are_listed_with_their_schemas_and_called(shop: Path) -> None:
    tools = mcp_tools(command=COMMAND)
    assert [tool.name for tool in tools] == NAMES
    assert tools[0].schema["function"]["description"] == "Multiply two integers."
    assert tools[0].schema["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert run(tools, "multiply", a=127, b=46).content == "5842"
    assert tools[0].function(a=3, b=4) == "12"
    assert [run(tools, "count").content for _ in range(3)] == ["1", "2", "3"], "one server for all"
    assert run(tools, "picture").content == "a dot [image]"
    text, shown = run(tools, "picture", limits=CallLimits(reads_images=True)).content
    assert text == {"type": "text", "text": "a dot"}
    assert shown["image"].size == (1, 1)
    assert len(servers(shop)) == 1


def test_errors_are_results(shop: Path) -> None:
    tools = mcp_tools(command=COMMAND)
    refused = run(tools, "price", name="shoe")
    assert (refused.failed, refused.problem) == (True, "error")
    assert "no shoe here" in str(refused.content)
    wrong = run(tools, "multiply", a="many", b=2)
    assert wrong.failed
    assert "integer" in str(wrong.content)
    [odd] = ToolRunner().run([{"function": {"name": "count", "arguments": "none"}}], by_name(tools), CallLimits())
    assert odd.problem == "arguments"


def test_only_prefix_folder_and_environment(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "1")
    monkeypatch.setenv("OTHER_KEY", "2")
    monkeypatch.chdir("/")
    tools = mcp_tools(command="python shop.py", only=["seen"], prefix="my", env=["SHOP_KEY"], folder=shop)
    assert [tool.name for tool in tools] == ["my_seen"]
    _, folder, *names = str(run(tools, "my_seen").content).split()
    assert Path(folder) == shop.resolve()
    assert {"SHOP_KEY", "PATH", "HOME"} <= {*names}
    assert {*names} <= {"SHOP_KEY", "PATH", "HOME", "USER", "LC_CTYPE", "PYTHONHASHSEED", "PODIUM_WORKER"}


def test_a_name_that_is_taken_gets_the_servers_name_in_front(shop: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {"mcp": {"command": COMMAND, "only": ["multiply", "count"]}}
    caplog.set_level(logging.WARNING)
    tools = resolve_tools([entry, multiply, entry])
    assert [tool.name for tool in tools] == ["shop_multiply", "count", "multiply", "shop_multiply_2", "shop_count"]
    assert tools[0].schema["function"]["name"] == "shop_multiply"
    assert "Tool `multiply` (MCP server shop) is called `shop_multiply` here" in caplog.text
    assert run(tools, "shop_multiply", a=2, b=3).content == run(tools, "multiply", a=2, b=3).content == "6"
    assert [tool.name for tool in distinct(tools, taken=["count"])][1] == "shop_count_2"


@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        ({"command": ["nothing-here"]}, "there is no program `nothing-here`", "nothing-here"),
        ({"command": ["python", "-c", "raise SystemExit('no config')"]}, "no config", "SystemExit"),
        ({"command": ["python", "-c", "import time; time.sleep(60)"]}, "did not answer within 3 s", "by hand"),
        ({"command": ["python", "-c", "print('hello')"]}, "closes its output", "by hand"),
        ({"command": COMMAND, "only": ["mutiply"]}, "has no tool `mutiply`", "multiply"),
        ({"command": COMMAND, "env": ["NO_SUCH_KEY"]}, "NO_SUCH_KEY", "export NO_SUCH_KEY"),
        ({"command": COMMAND, "url": "http://127.0.0.1:1/mcp"}, "needs a command or a url", "mcp"),
        ({"url": "http://127.0.0.1:1/mcp"}, "http://127.0.0.1:1/mcp", "correct its address"),
        ({"command": COMMAND, "name": "x"}, "has a key `name`", "mcp"),
        ({"command": COMMAND, "each": "yes"}, "true or false", "mcp"),
        ({"command": COMMAND, "headers": {"A": "b"}}, "has headers, which go to a url", "mcp"),
        ({"url": "http://127.0.0.1:1/mcp", "headers": {"A": 1}}, "mapping of names to texts", "mcp"),
        ({"url": "http://127.0.0.1:1/mcp", "headers": {"A": "${SHOP_NO}"}}, "SHOP_NO, which is not set", "export"),
    ],
    ids=str,
)
def test_a_server_that_cannot_be_used_is_one_clear_error(
    shop: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str, fix: str
) -> None:
    if "time.sleep(60)" in str(given):
        monkeypatch.setattr(mcp, "START_SECONDS", 3.0)
    with pytest.raises(ConfigError) as raised:
        resolve_tools([{"mcp": given}])
    assert raised.value.code == "C066"
    assert said in raised.value.what
    assert fix in raised.value.fix


def test_a_server_without_tools_is_refused(shop: Path) -> None:
    (shop / "shop.py").write_text("from mcp.server.mcpserver import MCPServer\nMCPServer('empty').run()\n")
    with pytest.raises(ConfigError, match="lists no tools"):
        mcp_tools(command=COMMAND)


@pytest.mark.parametrize("found", ["1.30.0", None])
def test_without_the_package_the_line_to_type_is_said(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(mcp, "version", version)
    with pytest.raises(ConfigError, match="is not installed") as raised:
        mcp_tools(command=COMMAND)
    assert "pip install 'podium[mcp]'" in raised.value.fix


def test_a_recipe_names_them_and_its_check_lists_them(shop: Path) -> None:
    (shop / "run.yaml").write_text(
        f"{RECIPE}tools: [{{mcp: {{command: [python, shop.py], only: [multiply, count]}}}}]\n"
    )
    assert [tool.name for tool in load("run.yaml").agents.tools] == ["multiply", "count"]
    [note] = [each for each in check_recipe("run.yaml") if each.code == "C066"]
    assert (note.severity, note.what) == ("note", "run.yaml:7: tools: MCP server shop has 2 tools: multiply, count")
    (shop / "run.yaml").write_text(RECIPE + "tools: [{mcp: {command: [python, shp.py]}}]\n")
    [error] = [each for each in check_recipe("run.yaml") if each.severity == "error"]
    assert error.code == "C066"
    assert "run.yaml:7" in error.what
    assert "shp.py" in error.what


# ---- limits and losses ----


def test_a_call_that_takes_too_long_ends_its_server(shop: Path) -> None:
    tools = mcp_tools(command=COMMAND)
    before = run(tools, "seen").content
    call = run(tools, "sleep", limits=CallLimits(timeout=0.5), seconds=60)
    assert (call.problem, call.seconds < 10) == ("timeout", True)
    assert "did not return within 0.5 s" in str(call.content)
    assert str(run(tools, "seen").content).split()[0] != str(before).split()[0], "another process"
    assert len(servers(shop)) == 1


def test_a_server_that_dies_is_started_again_and_counted(shop: Path, caplog: pytest.LogCaptureFixture) -> None:
    tools = mcp_tools(command=COMMAND)
    assert run(tools, "count").content == "1"
    calls = [run(tools, "die") for _ in range(2)]
    assert [call.problem for call in calls] == ["lost", "lost"]
    assert "closed its connection" in str(calls[0].content)
    assert run(tools, "count").content == "1"
    [server] = mcp.servers_of(tools)
    assert server.losses == 2
    assert caplog.text.count("It is started again") == 1
    assert "the shop closes" in caplog.text


def test_a_huge_result_is_cut(shop: Path) -> None:
    tools = mcp_tools(command=COMMAND)
    call = run(tools, "long", limits=CallLimits(max_result_tokens=100), characters=5_000_000)
    assert len(str(call.content)) <= 100
    assert call.cut > 4_000_000
    assert not call.failed


def test_an_episode_has_a_server_of_its_own(shop: Path) -> None:
    tools = by_name(mcp_tools(command=COMMAND, each=True))
    runner, calls = ToolRunner(), [{"function": {"name": "count", "arguments": {}}}]

    def counted(episode: Episode) -> str:
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        return str(episode.step(message).messages[0]["content"])

    first, second = (Episode(tools, limits=EpisodeLimits(), runner=runner) for _ in range(2))
    with closing(second):
        with closing(first):
            assert [counted(first), counted(first), counted(second), counted(first)] == ["1", "2", "1", "3"]
            assert len(servers(shop)) == 2
        third = Episode(tools, limits=EpisodeLimits(), runner=runner)
        with closing(third):
            assert counted(third) == "1", "a fresh server in the place of the first"
        assert len(servers(shop)) == 2


def test_a_call_that_goes_on_when_its_episode_ends_is_ended(shop: Path) -> None:
    with ExitStack() as ending:
        tools = in_episode(by_name(mcp_tools(command=COMMAND, each=True)), ending)
        runner = ToolRunner()
        calls = [{"function": {"name": "sleep", "arguments": {"seconds": 60}}}]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(runner.run(calls, tools, CallLimits(timeout=None))))
        thread.start()
        time.sleep(3)
        runner.close()
    thread.join(10)
    assert not thread.is_alive()
    assert found[0].failed


@contextmanager
def at_an_address(how: str) -> Iterator[str]:
    """The address of the server, started with `how`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "shop.py", how, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_a_server_at_an_address(shop: Path) -> None:
    with at_an_address("--http") as url:
        tools = mcp_tools(url=url)
        assert run(tools, "multiply", a=6, b=7).content == "42"
        assert run(tools, "count").content == "1"
    lost = run(tools, "count")
    assert lost.failed


def test_a_server_that_wants_a_key(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable's value is sent, and stands in nothing that could be shown."""
    monkeypatch.setenv("SHOP_KEY", "k3y")
    with at_an_address("--guarded") as url:
        entry = {"mcp": {"url": url, "headers": {"Authorization": "Bearer ${SHOP_KEY}"}}}
        tools = resolve_tools([entry])
        assert run(tools, "multiply", a=6, b=7).content == "42"
        assert "k3y" not in repr(next(iter(mcp.servers_of(tools))).spec)
        with pytest.raises(ConfigError, match=r"(?s)error response.*`headers`"):
            mcp_tools(url=url, headers={"Authorization": "Bearer other"})


SCRIPT = """
import sys, time
from podium.agents.mcp import mcp_tools
tools = {tool.name: tool.function for tool in mcp_tools(command=["python", "shop.py"], each=sys.argv[1] == "each")}
print(tools["count"](), flush=True)
if sys.argv[2] == "calling":
    tools["sleep"](seconds=60)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.parametrize("what", ["idle", "calling"])
def test_servers_end_with_the_run_however_it_ends(shop: Path, how: signal.Signals, what: str) -> None:
    package = str(Path(podium.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "all", what],
        env={**os.environ, "PYTHONPATH": package},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    time.sleep(1.0)
    assert len(servers(shop)) == 1
    os.killpg(process.pid, how)
    process.wait(10)
    assert are_gone(shop)


# ---- public servers ----


@pytest.mark.skipif(importlib.util.find_spec("mcp_server_time") is None, reason="needs mcp-server-time")
def test_the_public_server_of_times() -> None:
    tools = mcp_tools(command=["python", "-m", "mcp_server_time", "--local-timezone", "UTC"])
    assert {"get_current_time", "convert_time"} <= {tool.name for tool in tools}
    given = {"source_timezone": "Europe/Berlin", "time": "16:30", "target_timezone": "Asia/Tokyo"}
    call = run(tools, "convert_time", **given)
    assert not call.failed
    assert "Asia/Tokyo" in str(call.content)
    assert run(tools, "convert_time", **{**given, "target_timezone": "Mars/Olympus"}).failed


@pytest.mark.skipif(importlib.util.find_spec("mcp_server_git") is None, reason="needs mcp-server-git")
def test_the_public_server_of_git(tmp_path: Path) -> None:
    for line in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)
    entry = {"command": ["python", "-m", "mcp_server_git", "--repository", "."], "only": ["git_log", "git_status"]}
    tools = resolve_tools([{"mcp": entry}], tmp_path)
    assert {tool.name for tool in tools} == {"git_log", "git_status"}
    call = run(tools, "git_log", repo_path=str(tmp_path))
    assert not call.failed
    assert "first" in str(call.content)


# ---- training ----


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in three turns call `count`, then the other half `multiply`, by their tokens."""

    def parse(self: ChatFormat, token_ids: Any, *, prefix: Any, tools: Any = ()) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.tokenizer.decode(list(token_ids), skip_special_tokens=True)}
        if sum(token_ids) % 3:
            name = ("count", "multiply")[sum(token_ids) % 2]
            arguments = {"a": len(prefix) % 50, "b": 2} if name == "multiply" else {}
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return message

    monkeypatch.setattr(ChatFormat, "parse", parse)


@pytest.mark.usefixtures("calling")
def test_a_run_with_a_server_for_each_episode_repeats_and_resumes(shop: Path) -> None:
    """What `count` says depends on the calls of its own episode alone."""

    def trained(folder: str, **how: Any) -> Any:
        config = {
            "generation_kwargs": {"eos_token_id": [2, *range(10, 60)]},
            "max_completion_length": 200,
            "max_turns": 4,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "learning_rate": 1e-2,
            "output_dir": str(shop / folder),
            "prove_first_batch": True,
        }
        entry = {"mcp": {"command": COMMAND, "only": ["multiply", "count"], "each": True}}
        trainer = make(tools=[entry], config=config)
        trainer.train(**how)
        return trainer

    whole, again = trained("whole"), trained("again")
    resumed = trained("whole", resume_from_checkpoint=str(shop / "whole" / "checkpoint-2"))
    for trainer in (again, resumed):
        for mine, theirs in zip(whole.model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    logs = [log for log in whole.state.log_history if "tools/count/calls" in log]
    assert max(log["tools/count/calls"] for log in logs) > 0
    assert all(log["tools/failure_frequency"] == 0 for log in logs)
    described = json.loads((shop / "whole" / "environment.json").read_text())["agents"]
    assert described["count"]["where"] == "`count` (MCP server shop)"


@pytest.mark.usefixtures("calling")
def test_a_server_that_dies_in_training_is_in_the_metrics(shop: Path) -> None:
    (shop / "shop.py").write_text(SERVER.replace("    calls.append(1)\n", "    os._exit(3)\n"))
    config = {"generation_kwargs": {"eos_token_id": [2, *range(10, 60)]}, "max_completion_length": 200, "max_turns": 3}
    trainer = make(tools=[*mcp_tools(command=COMMAND, only=["multiply", "count"])], config=config)
    trainer.train()
    [log] = [log for log in trainer.state.log_history if "tools/lost_frequency" in log]
    assert 0 < log["tools/lost_frequency"] <= 1

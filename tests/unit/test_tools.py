"""Tools: schemas, calls within limits, tools in files, and the library; 30 hostile cases, one message each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from podium.agents.library import search as search_module
from podium.agents.outcome import CUT_MARK
from podium.agents.resolve import resolve_tools
from podium.agents.tools import CallLimits, ToolRunner, as_tools, by_name
from podium.errors import ConfigError
from podium.isolation.threads import background_loop

LIMIT = 0.3
HOSTILE = '''
import asyncio, os, pathlib, signal, sys, threading, time

LOADED_IN = os.getpid()


class Silent:
    def __str__(self):
        raise RuntimeError("no text")


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Endless:
    def __str__(self):
        time.sleep(60)


circle = []
circle.append(circle)
deep = []
for _ in range(100_000):
    deep = [deep]


def tool(kind: str, other: int = 0) -> object:
    """Do something.

    Args:
        kind: What to do.
        other: More of it.
    """
    return KINDS[kind]()


async def later(kind: str) -> object:
    """Do something later.

    Args:
        kind: What to do.
    """
    await asyncio.sleep(0)
    if kind == "waits":
        await asyncio.sleep(60)
    if kind == "holds on":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    return KINDS[kind]()


def fails(error):
    raise error


def recursion():
    return recursion()


def deletes():
    pathlib.Path(__file__).unlink()
    return "gone"


def prints():
    print("x" * 10_000)
    sys.stdout.flush()
    return "printed"


KINDS = {
    "fine": lambda: 7,
    "none": lambda: None,
    "bytes": lambda: b"\\xff",
    "set": lambda: {3},
    "dict": lambda: {"a": 1},
    "blocks": lambda: [{"type": "text", "text": "7"}],
    "circle": lambda: circle,
    "deep": lambda: deep,
    "odd keys": lambda: [{1: 2}],
    "list of bytes": lambda: [b"x"],
    "surrogate": lambda: "\\ud800",
    "big": lambda: "x" * 10_000_000,
    "big list": lambda: ["x" * 1000] * 10_000,
    "generator": lambda: (x for x in (1, 2)),
    "map": lambda: map(str, (1, 2)),
    "file": lambda: open(__file__),
    "coroutine": lambda: later("fine"),
    "no text": lambda: Silent(),
    "endless text": lambda: Endless(),
    "raises": lambda: fails(ValueError("no")),
    "raises 10 MB": lambda: fails(ValueError("x" * 10_000_000)),
    "raises wordless": lambda: fails(Wordless()),
    "type error": lambda: fails(TypeError("inside")),
    "memory": lambda: bytearray(1 << 60),
    "recursion": recursion,
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: fails(KeyboardInterrupt()),
    "cancelled": lambda: fails(asyncio.CancelledError()),
    "hangs": lambda: time.sleep(60),
    "prints": prints,
    "deletes": deletes,
    "os exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "pid": lambda: LOADED_IN,
}
'''

CASES = {
    "fine": ("7", ""),
    "none": ("None", ""),
    "bytes": (r"b'\xff'", ""),
    "set": ("{3}", ""),
    "dict": ("{'a': 1}", ""),
    "blocks": ([{"type": "text", "text": "7"}], ""),
    "circle": ("[[...]]", ""),
    "deep": ("recursion", "result"),
    "odd keys": ("[{1: 2}]", ""),
    "list of bytes": ("[b'x']", ""),
    "surrogate": ("?", ""),
    "big": (f"xxx{CUT_MARK}", ""),
    "big list": (f"x{CUT_MARK}", ""),
    "generator": ("generator, which is no text", "result"),
    "map": ("the tool returned a map, which is no text", "result"),
    "file": ("the tool returned a TextIOWrapper, which is no text", "result"),
    "coroutine": ("not awaited", "result"),
    "no text": ("{'error': 'no text'}", "result"),
    "endless text": ("did not return within 0.3 s", "timeout"),
    "raises": ("{'error': 'no'}", "error"),
    "raises 10 MB": (f"xxx{CUT_MARK}", "error"),
    "raises wordless": ("Wordless without a text", "error"),
    "type error": ("{'error': 'inside'}", "error"),
    "memory": ("{'error': ", "error"),
    "recursion": ("maximum recursion depth exceeded", "error"),
    "exit": ("{'error': 'SystemExit: 3'}", "error"),
    "interrupt": ("KeyboardInterrupt", "error"),
    "cancelled": ("CancelledError", "error"),
    "hangs": ("did not return within 0.3 s", "timeout"),
    "prints": ("printed", ""),
    "deletes": ("gone", ""),
}
IN_A_WORKER = {
    "os exit": ("tool ended its worker process (exit code 3)", "error"),
    "kill": ("tool ended its worker process with SIGKILL (out of memory, or killed from outside?)", "error"),
    "crash": ("tool ended its worker process with SIGSEGV", "error"),
}
WRONG_ARGUMENTS = {
    "missing": ({}, "missing 1 required positional argument: 'kind'"),
    "unexpected": ({"kind": "fine", "more": 1}, "got an unexpected keyword argument 'more'"),
    "a text": ('{"kind": "fine"}', "argument after ** must be a mapping, not str"),
    "a list": (["fine"], "argument after ** must be a mapping, not list"),
    "a number": (3, "argument after ** must be a mapping, not int"),
    "keys that are no text": ({1: 2}, "keywords must be strings"),
    "unhashable": ({"kind": ["fine"]}, "unhashable type: 'list'"),
}
LIMITS = CallLimits(timeout=LIMIT, max_result_tokens=400)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture
def here(file):
    """The same functions in this process."""
    module = {"__file__": str(file), "__name__": "hostile"}
    exec(compile(HOSTILE, str(file), "exec"), module)
    return by_name(as_tools([module["tool"], module["later"]]))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The same functions in a file."""
    path = tmp_path_factory.mktemp("tools") / "hostile.py"
    path.write_text(HOSTILE)
    return by_name(resolve_tools([f"{path}:tool", f"{path}:later"]))


@pytest.fixture
def runner():
    made = ToolRunner()
    yield made
    made.close()


def asked(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def holds(call, content, problem):
    assert call.problem == problem
    assert call.failed == bool(problem)
    assert call.seconds < 2
    assert len(str(call.content)) <= 400
    str(call.content).encode()
    assert call.content == content if isinstance(content, list) else content in call.content
    json.dumps(call.content)


@pytest.mark.defect("AG8", "a generator, a map or a file as the result of a tool")
@pytest.mark.parametrize("name", ["tool", "later"])
def test_nothing_that_a_tool_does_in_this_process_gets_out(here, runner, name):
    names = [kind for kind in CASES if not (name == "later" and CASES[kind][1] == "timeout")]
    calls = runner.run([asked(name, {"kind": kind}) for kind in names], here, LIMITS)
    for kind, call in zip(names, calls, strict=True):
        holds(call, *CASES[kind])


@pytest.mark.slow
def test_nothing_that_a_tool_in_a_file_does_gets_out(file, runner, caplog):
    there = by_name(resolve_tools([f"{file}:tool"]))
    cases = {**CASES, **IN_A_WORKER, "fine": CASES["fine"]}
    cases["deletes"] = cases.pop("deletes")  # the last: no worker can start after it
    assert os.getpid() != int(runner.run([asked("tool", {"kind": "pid"})], there, LIMITS)[0].content)
    calls = runner.run([asked("tool", {"kind": kind}) for kind in cases], there, LIMITS)
    for call, (content, problem) in zip(calls, cases.values(), strict=True):
        holds(call, content, problem)
    [warning] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "ran over its limit." in warning
    assert "__str__" in warning  # where it hung
    [ended] = runner.run([asked("tool", {"kind": "os exit"})], there, LIMITS)
    [call] = runner.run([asked("tool", {"kind": "fine"})], there, LIMITS)
    holds(ended, *IN_A_WORKER["os exit"])
    holds(call, "No such file", "error")


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_a_message(here, there, runner, case):
    arguments, text = WRONG_ARGUMENTS[case]
    for tools in (here, there):
        [call] = runner.run([asked("tool", arguments)], tools, LIMITS)
        holds(call, text, "error" if case == "unhashable" else "arguments")
    if not isinstance(arguments, dict):
        [call] = runner.run([asked("later", arguments)], here, LIMITS)
        holds(call, text, "arguments")


@pytest.mark.versions
def test_calls_of_other_shapes_are_answered_as_in_trl(here, runner):
    flat = {"type": "function", "name": "tool", "arguments": {"kind": "fine"}}
    other = {"type": "retrieval", "name": "tool"}
    odd = [{}, 3, None, {"type": "function", "function": 3}, asked(["tool"], {}), asked("tool", None)]
    calls = runner.run([flat, other, asked("nope", {}), *odd], here, LIMITS)
    assert [call.content for call in calls[:3]] == [
        "7",
        "{'error': 'Unsupported tool call type: retrieval'}",
        "{'error': 'Tool nope not found.'}",
    ]
    assert [call.problem for call in calls] == ["", *["unknown"] * 7, "arguments"]


def test_results_come_in_the_order_of_the_calls(here, runner):
    wanted = [("later", "fine"), ("tool", "none"), ("later", "waits"), ("tool", "raises"), ("later", "dict")]
    calls = runner.run([asked(name, {"kind": kind}) for name, kind in wanted], here, LIMITS)
    assert [call.name for call in calls] == [name for name, _ in wanted]
    contents = ["7", "None", "{'error': 'later did not return within 0.3 s'}", "{'error': 'no'}", "{'a': 1}"]
    assert [call.content for call in calls] == contents


def test_async_calls_of_a_turn_run_together_on_the_loop_of_the_process(runner):
    loops = []

    async def slow(number: int) -> int:
        """Wait.

        Args:
            number: Any.
        """
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        return number

    calls = [asked("slow", {"number": each}) for each in range(20)]
    started = time.monotonic()
    results = runner.run(calls, by_name(as_tools([slow])), CallLimits(timeout=5))
    assert time.monotonic() - started < 1.5
    assert [call.content for call in results] == [str(each) for each in range(20)]
    assert set(loops) == {background_loop(os.getpid())[0]}


@pytest.mark.parametrize("kind", [pytest.param("hangs", marks=pytest.mark.slow), "holds on"])
def test_an_async_tool_that_blocks_the_loop_or_swallows_its_end_costs_its_limit(here, runner, kind):
    together = [asked("later", {"kind": "fine"}), asked("later", {"kind": kind})]
    started = time.monotonic()
    first, second = runner.run(together, here, LIMITS)
    assert time.monotonic() - started < 2
    assert (first.content, second.problem) == ("7", "timeout")
    assert runner.run(together[:1], here, LIMITS)[0].content == "7"


@pytest.mark.parametrize("place", ["here", pytest.param("there", marks=pytest.mark.slow)])
def test_calls_of_different_completions_overlap(place, request, runner):
    tools = request.getfixturevalue(place)
    started = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        work = partial(runner.run, [asked("tool", {"kind": "hangs"})], tools, LIMITS)
        results = [each.result() for each in [threads.submit(work) for _ in range(6)]]
    assert time.monotonic() - started < 6 * LIMIT + 2 * (place == "there")
    assert [call.problem for [call] in results] == ["timeout"] * 6


def test_a_serial_tool_is_called_by_one_thread_at_a_time(runner):
    inside = []

    def counter(number: int) -> int:
        """Count.

        Args:
            number: Any.
        """
        inside.append(number)
        time.sleep(0.01)
        assert inside == [number]
        inside.clear()
        return number

    def failures():
        tools = by_name(as_tools([counter]))
        with ThreadPoolExecutor(8) as threads:
            calls = threads.map(lambda n: runner.run([asked("counter", {"number": n})], tools, LIMITS)[0], range(8))
            return sum(call.failed for call in calls)

    assert failures() > 0
    counter.serial = True
    inside.clear()
    assert failures() == 0


def test_a_call_gets_a_copy_of_its_arguments(runner):
    def grow(values: list[int]) -> int:
        """Grow.

        Args:
            values: Some.
        """
        values.append(1)
        return len(values)

    call = asked("grow", {"values": [1]})
    assert runner.run([call, call], by_name(as_tools([grow])), LIMITS)[1].content == "2"
    assert call["function"]["arguments"] == {"values": [1]}


def test_close_ends_the_waiting(here, file):
    runner = ToolRunner()
    threading.Timer(0.1, runner.close).start()
    started = time.monotonic()
    calls = [asked("tool", {"kind": "hangs"}), asked("tool", {"kind": "deletes"}), asked("later", {"kind": "waits"})]
    contents = [call.content for call in runner.run(calls, here, CallLimits(timeout=None))]
    assert contents == [f"{{'error': '{name} was stopped'}}" for name in ("tool", "tool", "later")]
    assert time.monotonic() - started < 5
    assert file.exists()  # no call begins afterwards
    alone = ToolRunner()
    threading.Timer(0.1, alone.close).start()
    [call] = alone.run(calls[2:], here, CallLimits(timeout=None))
    assert call.content == "{'error': 'later was stopped'}"


def test_a_call_that_was_given_up_has_no_error_of_its_own(here, monkeypatch):
    monkeypatch.setattr("podium.agents.tools.abandon", lambda loop: time.sleep(0.1))  # the loop cancels it meanwhile
    runner = ToolRunner()
    threading.Timer(0.05, runner.close).start()
    [call] = runner.run([asked("later", {"kind": "waits"})], here, CallLimits(timeout=None))
    assert call.content == "{'error': 'later was stopped'}"


@pytest.mark.parametrize("cut", ["left", "middle", "right"])
def test_results_are_cut_to_their_tokens(here, runner, cut):
    def words(text):
        return len(text.split())

    def tell(number: int) -> str:
        """Tell.

        Args:
            number: How much.
        """
        return " ".join(map(str, range(number)))

    limits = CallLimits(max_result_tokens=50, cut=cut, count=words)
    short, long = runner.run([asked("tell", {"number": n}) for n in (50, 5000)], by_name(as_tools([tell])), limits)
    assert (words(short.content), short.cut) == (50, 0)
    assert 20 <= words(long.content) <= 50
    assert long.cut == pytest.approx(5000, rel=0.3)  # an estimate from the part that was looked at
    assert ("0 1 2" in long.content, "4998 4999" in long.content) == (cut != "left", cut != "right")
    assert CUT_MARK in long.content


@pytest.mark.slow
def test_random_numbers_of_a_worker_follow_the_seed(tmp_path, runner):
    (tmp_path / "dice.py").write_text(
        'import random\ndef roll() -> float:\n    """Roll."""\n    return random.random()\n'
    )
    tools = by_name(resolve_tools(["dice.py:roll"], tmp_path))
    rolls = [runner.run([asked("roll", {})] * 2, tools, LIMITS, seed=seed) for seed in (1, 1, 3)]
    first, again, other = ([call.content for call in calls] for calls in rolls)
    assert first == again
    assert len({*first, *other}) == 4


# ---- names and schemas ----


@pytest.mark.versions
def test_a_function_without_a_schema_is_one_message(tmp_path):
    def silent(a: int) -> int:
        return a

    def untyped(a) -> int:
        """Do.

        Args:
            a: It.
        """

    def undescribed(a: int) -> int:
        """Do."""

    for function in (silent, untyped, undescribed, partial(silent, 1), 3):
        with pytest.raises(ConfigError, match=r"for the model|no function"):
            as_tools([function])
    (tmp_path / "tools.py").write_text("def silent(a: int): pass\nnumber = 3\n")
    for name, text in {
        "tools.py:silent": r"tool `silent` .*tools.py:1\) has no schema for the model: .*no docstring",
        "tools.py:number": "a tool is a function",
        "tools.py:silen": "has no function `silen`",
        "tool.py:silent": "there is no file tool.py",
        "tools.py:silent?size=3": "has the setting `env` alone",
        "silent": "there is no tool `silent`",
        "builtin:calculater": "there is no tool `builtin:calculater`",
        "builtin:lookup": "needs `path`",
        "builtin:lookup?file=x": "has no setting `file`",
        "builtin:lookup?path=x.json": "there is no file x.json",
        "builtin:python?seconds=-1": "must be a whole number",
        "builtin:search?path=nowhere": "nowhere|bm25s",
    }.items():
        with pytest.raises(ConfigError, match=text):
            resolve_tools([name], tmp_path)


def test_a_file_is_not_imported_in_this_process(there):
    assert not [name for name, each in sys.modules.items() if "/hostile.py" in str(getattr(each, "__file__", name))]
    assert there["tool"].schema["function"]["parameters"]["required"] == ["kind"]
    assert there["tool"].source.startswith("`tool` (")


def test_methods_become_tools_that_are_bound_later(runner):
    class Counter:
        total = 0

        def add(self, number: int) -> int:
            """Add.

            Args:
                number: It.
            """
            self.total += number
            return self.total

    [tool] = as_tools([Counter.add])
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["number"]
    for counter in (Counter(), Counter()):
        bound = by_name([replace(tool, function=counter.add)])
        calls = runner.run([asked("add", {"number": 2})] * 2, bound, LIMITS)
        assert [call.content for call in calls] == ["2", "4"]


def test_two_tools_of_one_name_are_an_error():
    with pytest.raises(ConfigError, match="two tools are called `calculator`"):
        resolve_tools(["builtin:calculator", "builtin:calculator"])
    assert len(resolve_tools(["builtin:calculator", "builtin:calculator?name=sums"])) == 2


def test_a_worker_has_the_named_environment_variables_alone(tmp_path, monkeypatch):
    (tmp_path / "tools.py").write_text(
        'import os\ndef key() -> str:\n    """Tell."""\n    return os.environ.get("MY_KEY")\n'
    )
    monkeypatch.setenv("MY_KEY", "abc")
    hidden, named = resolve_tools(["tools.py:key"], tmp_path) + resolve_tools(["tools.py:key?env=MY_KEY"], tmp_path)
    assert (hidden.function(), named.function()) == ("None", "abc")


# ---- the library ----


@pytest.mark.parametrize(
    ("expression", "value"),
    {
        "127 * 46": "5842",
        "2^10 + 1,000": "2024",
        "7 / 2": "3.5",
        "0.1 + 0.2": "0.3",
        "-(3 - 5) % 4": "2",
        "6 \u00d7 7 \u00f7 2": "21",
        "2 ** -1": "0.5",
        "7 // 2": "3",
        "1e3": "1000",
    }.items(),
)
def test_the_calculator_computes(expression, value):
    assert resolve_tools(["builtin:calculator"])[0].function(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**99999",
        "(-8)**0.5",
        "1/0",
        "abs(3)",
        "a",
        "'a'*9",
        "True",
        "[1]",
        "1<2",
        "(1,2)",
        "lambda:3",
        "1e308*10**400",
        "__import__('os')",
        "2**4000*2**4000",
        "1e999**2",
        "3j",
        "0**-1",
        "(" * 150,
        "1+" * 150,
        "",
        3,
    ],
)
def test_the_calculator_refuses(expression):
    started = time.monotonic()
    with pytest.raises((ValueError, OverflowError)):
        resolve_tools(["builtin:calculator"])[0].function(expression)
    assert time.monotonic() - started < 1


def test_lookup_reads_json_and_csv(tmp_path):
    (tmp_path / "a.json").write_text('{"apple": 3, "pear": "four", "fig": [1]}')
    (tmp_path / "b.csv").write_text('key,price\n"a, b",5\n')
    (tmp_path / "c.csv").write_text("key,price,colour\napple,5,red\n")
    names = [f"builtin:lookup?path={file}&name={file[0]}" for file in ("a.json", "b.csv", "c.csv")]
    a, b, c = (tool.function for tool in resolve_tools(names, tmp_path))
    assert [a("apple"), a("pear"), a("fig"), b("a, b")] == ["3", "four", "[1]", "5"]
    assert c("apple") == '{"price": "5", "colour": "red"}'
    with pytest.raises(ValueError, match="there is no key aple; similar: apple"):
        a("aple")
    for text in ("[1]", "{", "{}"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ConfigError, match=r"a\.json"):
            resolve_tools(names[:1], tmp_path)


def test_python_runs_in_the_sandbox(runner):
    tools = by_name(resolve_tools(["builtin:python?seconds=1&sandbox=none"]))
    codes = [
        "x = 3\nprint(2)\nx * 4",
        "x = 3\n1 / 0",
        "def",
        "while True: pass",
        "print(input())",
        "None",
        "import sys; sys.exit(0)",
    ]
    calls = runner.run([asked("python", {"code": code}) for code in codes], tools, CallLimits(timeout=20))
    texts = [
        "2\n12",
        "ZeroDivisionError: division by zero (line 2)",
        "SyntaxError",
        "ran out of time",
        "EOFError",
        "",
        "",
    ]
    assert [text in call.content for text, call in zip(texts, calls, strict=True)] == [True] * 7
    assert [call.failed for call in calls] == [False, True, True, True, True, False, False]


def test_search_without_its_package_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setattr(search_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bm25s.\n  fix: pip install 'podium\[search\]'"):
        resolve_tools([f"builtin:search?path={tmp_path}"])


def test_search_finds_paragraphs(tmp_path):
    pytest.importorskip("bm25s")
    with pytest.raises(ConfigError, match="no text to search"):
        resolve_tools([f"builtin:search?path={tmp_path}"])
    (tmp_path / "fruit.md").write_text("Apples are red.\n\nPears are green.\n")
    (tmp_path / "more.txt").write_text("Bananas are yellow.")
    (tmp_path / "picture.png").write_bytes(b"pears")
    [tool] = resolve_tools(["builtin:search?path=.&results=1"], tmp_path)
    assert tool.function("what colour is a pears") == "fruit.md: Pears are green."
    assert tool.function("zebra") == "nothing was found"
    assert tool.function("") == "nothing was found"


@pytest.mark.parametrize(
    ("entry", "fix"),
    [
        ("calc", "builtin:calculator"),
        ("builtin:calc", "builtin:calculator"),
        ("multiply", "tools.py:multiply"),
        ("tools.py", "tools.py:name, with the name of a function in it"),
    ],
)
def test_an_unknown_tool_is_answered_with_what_to_write(entry, fix):
    with pytest.raises(ConfigError, match="there is no tool") as caught:
        resolve_tools([entry])
    assert caught.value.fix == fix

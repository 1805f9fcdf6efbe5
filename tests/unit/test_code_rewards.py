from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import time

import pytest

from podium.data.extract import fenced
from podium.errors import ConfigError, RewardError
from podium.isolation import sandbox as sandbox_module
from podium.isolation.sandbox import FAULT, Limits, Result, SandboxFault, fix_of, inside, passed, probe, run_program
from podium.rewards import CodeStages, CodeTests, library_reward
from podium.rewards import code as code_module
from podium.rewards.program_tests import read_tests
from podium.rewards.resolve import resolve_rewards

BACKENDS = ["bubblewrap", "landlock", "none"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    complaint = None if request.param == "none" else probe(request.param)
    if complaint:
        pytest.skip(f"{request.param} does not work here: {complaint}")
    return request.param


OUTCOMES = {
    "ok": ("def f(): return [1, (2, None), {'a': 1.5}]", None),
    "error": ("def f(): return 1 / 0", "ZeroDivisionError: division by zero"),
    "exit": ("import sys\ndef f(): sys.exit(0)", None),
    "signal": ("import ctypes\ndef f(): ctypes.string_at(0)", None),
    "timeout": ("def f():\n    while True: pass", None),
    "overflow": ("def f(): return 'x' * 100_000", None),
    "missing": ("def g(): return 1", None),
    "unusable": ("def f(): return object()", None),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_way_to_end_has_an_outcome_of_its_own(backend, outcome):
    source, error = OUTCOMES[outcome]
    (result,) = run_program(source, [{"call": "f"}], backend=backend)
    assert (result.outcome, result.error) == (outcome, error)
    assert (outcome == "ok") == (result.value is not None)


@pytest.mark.cases(1)
def test_after_a_timeout_the_rest_is_not_run(backend):
    results = run_program("while True: pass", [{"stdin": ""}] * 3, backend=backend)
    assert [result.outcome for result in results] == ["timeout", "not_run", "not_run"]


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, open(0).read().split())))",
        "import sys\nprint(sum(int(line) for line in sys.stdin.buffer))",
        "import asyncio\nasync def main(): print(3)\nasyncio.run(main())",
        "import threading\nthreading.stack_size(1 << 26)\nthreading.Thread(target=lambda: print(3)).start()",
        "import os\nos.write(1, b'3')\nos._exit(0)",
        "import atexit\natexit.register(print, 3)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 3\nprint(P().x)",
        "import sys\nprint(3)\nsys.exit()",
        "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nf(4000)\nprint(3)",
        "import multiprocessing, subprocess, socket, decimal, fractions, heapq, re, itertools, random, time\nprint(3)",
        "import concurrent.futures as c\nwith c.ThreadPoolExecutor(4) as p: print(sum(p.map(int, ['1', '2'])))",
        "if __name__ == '__main__': print(3)",
    ],
)
def test_ordinary_programs_run(backend, program):
    (result,) = run_program(program, [{"stdin": "1\n2\n"}], backend=backend)
    assert (result.outcome, result.stdout.strip(), result.error) == ("ok", "3", None)


def test_large_input_reaches_the_program_and_one_that_reads_none_of_it_ends(backend):
    text = "7" * 1_000_000
    for program, printed in (("print(len(input()))", "1000000\n"), ("print(1)", "1\n")):
        (result,) = run_program(program, [{"stdin": text}], backend=backend)
        assert (result.outcome, result.stdout) == ("ok", printed)


def test_many_tests_come_back_in_their_order(backend):
    results = run_program(
        "def f(x): return 1 // x", [{"call": "f", "args": [x % 5]} for x in range(23)], backend=backend
    )
    assert [result.outcome for result in results] == ["error" if x % 5 == 0 else "ok" for x in range(23)]
    assert [result.value for result in results if result.value] == [str(1 // (x % 5)) for x in range(23) if x % 5]


def test_every_test_has_a_process_of_its_own(backend):
    source = "count = 0\ndef f():\n    global count\n    count += 1\n    return count"
    results = run_program(source, [{"call": "f"}] * 3, backend=backend)
    assert [result.value for result in results] == ["1", "1", "1"]


def test_what_is_expected_never_goes_in(monkeypatch):
    sent = []
    original = code_module.run_program.__globals__["Sandbox"].run

    def spy(self, source, tests):
        sent.append(json.dumps(tests))
        return original(self, source, tests)

    monkeypatch.setattr("podium.isolation.sandbox.Sandbox.run", spy)
    tests = [{"call": "f", "args": [1], "expected": "secret"}, {"stdin": "1", "stdout": "secret"}]
    CodeTests(extract="raw", sandbox="none")(completions=["def f(x): return x"], tests=[tests])
    assert len(sent) == 1
    assert "secret" not in sent[0]


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, "1", True),
        (1, "true", False),
        (True, "1", False),
        (1, "1.0", False),
        (1.0, "1", False),
        (0.3, "0.30000000000000004", True),
        (None, "null", True),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "[1]", False),
        ([1], "[1, 2]", False),
        ({"a": 1}, '{"a": 1}', True),
        ({"a": 1}, '{"a": 1, "b": 2}', False),
        ({"a": 1}, '{"a": 2, "a": 1}', False),
        ("1", "1", False),
        (float("nan"), "NaN", False),
        (float("inf"), "Infinity", False),
        (1e308, "1e400", False),
        ([1], "[" * 100_000, False),
        (1, "1 1", False),
        (1, None, False),
    ],
)
def test_values_are_compared_strictly(expected, value, same):
    assert passed({"call": "f", "expected": expected}, Result(outcome="ok", value=value)) is same


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("9\n16\n25", "9", False),  # a shorter output is not a prefix that counts
        ("9", "9\n16", False),
        ("9", "9  \n\n", True),
        ("9\n", "\n9", False),
        ("", "", True),
        ("", "x", False),
    ],
)
def test_output_is_compared_to_its_end(expected, printed, same):
    assert passed({"stdin": "", "stdout": expected}, Result(outcome="ok", stdout=printed)) is same


def test_sandbox_faults_are_no_opinion_and_not_zero(monkeypatch, caplog):
    def broken(*_):
        raise SandboxFault("it broke")

    monkeypatch.setattr("podium.isolation.sandbox.Sandbox.start", broken)
    tests = [[{"stdin": "", "stdout": "1"}]] * 2
    for reward in (CodeTests(sandbox="none"), CodeStages(sandbox="none")):
        assert reward(completions=["```python\nprint(1)\n```", "no code"], tests=tests) == [None, 0.0]
    assert "it broke" in caplog.text
    assert run_program("", [{}], backend="none") == [FAULT]


def test_rows_without_tests_are_no_opinion():
    fenced = "```python\nprint(1)\n```"
    assert CodeTests(sandbox="none")(completions=[fenced] * 3, tests=[None, [], "[]"]) == [None, None, None]


def test_chat_and_plain_completions_and_json_text_score_alike():
    reward = library_reward("code_tests")
    text = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    tests = [{"call": "add", "args": [2, 3], "expected": 5}, {"call": "add", "args": [2, 2], "expected": 5}]
    for completion in (text, [{"role": "assistant", "content": text}]):
        for column in (tests, json.dumps(tests), [{**test, "stdin": None, "stdout": None} for test in tests]):
            assert reward(completions=[completion], tests=[column]) == [0.5]


@pytest.mark.parametrize(
    ("extract", "text", "score"),
    [
        ("fence", "```python\nprint(1)\n```", 1.0),
        ("fence", "```\nprint(1)\n```", 1.0),
        ("fence", "```py\nprint(2)\n```\nno:\n```PYTHON\nprint(1)\n```", 1.0),  # the last block counts
        ("fence", "print(1)", 0.0),
        ("fence", "```python\nprint(1)", 1.0),  # cut off, or the last fence forgotten
        ("answer", "<answer>\nprint(1)\n</answer>", 1.0),
        ("raw", "print(1)", 1.0),
        ("raw", "  ", 0.0),
    ],
)
def test_where_the_code_is(extract, text, score):
    tests = [[{"stdin": "", "stdout": "1"}]]
    assert CodeTests(extract=extract, sandbox="none")(completions=[text], tests=tests) == [score]


def test_all_or_nothing():
    tests = [[{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "1"}]]
    reward = CodeTests(extract="raw", all_or_nothing=True, sandbox="none")
    assert reward(completions=["print(1)", "print(input())"], tests=tests * 2) == [1.0, 0.0]
    assert CodeTests(extract="raw", sandbox="none")(completions=["print(input())"], tests=tests) == [0.5]


def test_log_extra_says_how_it_went():
    said = {}
    tests = [[{"stdin": "", "stdout": "1"}] * 2] * 2
    CodeTests(extract="fence", sandbox="none")(
        completions=["```\nprint(1)\n```", "none"],
        tests=tests,
        log_extra=lambda name, values: said.update({name: values}),
    )
    assert said == {"code": ["2/2 (ok 2)", "no code"]}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("[", "neither JSON nor an assertion"),
        (7, "not a list of tests"),
        ([7], "not a list of tests"),
        ([{"stdin": "1"}], "A test is"),
        ([{"call": "f", "args": 3, "expected": 1}], "A test is"),
        ([{"call": "f"}], "A test is"),
        ("def test(): pass", "neither JSON nor an assertion"),
        (["f(1) == 2"], "A test is"),
        (["assert f(1) =="], "A test is"),
        ("import math\nx = f(1)\nassert x == 2", "A test is"),
        ({"inputs": "1", "outputs": "2"}, "not a list of tests"),
        ({"language": "cpp", "test_cases": []}, "programs in cpp"),
        ([{"fn_name": "f", "input": "one", "output": "2"}], "A test is"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "A test is"),
    ],
)
def test_unusable_tests_are_refused_with_the_schema(tests, message):
    with pytest.raises(RewardError, match=message):
        read_tests(tests, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": "docker"}, "sandbox is 'docker'; it must be one of auto, bubblewrap, landlock, none"),
        ({"extract": "tags"}, "extract is 'tags'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"found": 0.9, "parses": 0.9}, "together at most 1"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        library_reward("code_stages", **settings)


def test_rewards_keep_their_names_and_travel_to_worker_processes():
    rewards = resolve_rewards([CodeTests(sandbox="none"), CodeStages(sandbox="none")])
    assert [reward.name for reward in rewards] == ["code_tests", "code_stages"]
    assert rewards[0].needs == ("completions", "tests")
    copy = pickle.loads(pickle.dumps(CodeTests(extract="raw", sandbox="none")))
    assert copy(completions=["print(1)"], tests=[[{"stdin": "", "stdout": "1"}]]) == [1.0]


def test_no_sandbox_is_said_at_the_start(caplog):
    from podium.isolation.sandbox import _warn_unconfined

    _warn_unconfined.cache_clear()
    with caplog.at_level(logging.WARNING):
        CodeTests(sandbox="none")
    assert "runs as your user" in caplog.text


def test_a_machine_without_sandbox_refuses_and_names_the_cure(monkeypatch):
    said = {
        "bubblewrap": "bwrap: No permissions to create new namespace, likely because ...",
        "landlock": "OSError: [Errno 95] landlock: EOPNOTSUPP Operation not supported",
    }
    monkeypatch.setattr("podium.isolation.sandbox.probe", said.get)
    with pytest.raises(RewardError) as refused:
        CodeTests()
    for part in ("namespaces are denied", "lsm=", "sandbox: none"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("complaint", "part"),
    [
        (
            "bwrap: No permissions to create new namespace, likely because",
            "seccomp=unconfined",
        ),
        ("bwrap: Creating new namespace failed: Operation not permitted", "seccomp=unconfined"),
        ("bwrap: setting up uid map: Permission denied", "AppArmor"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "AppArmor"),
        ("bwrap: Creating new namespace failed: No space left on device", "max_user_namespaces"),
        ("bubblewrap is not installed", "apt-get install bubblewrap"),
        ("OSError: [Errno 38] landlock: ENOSYS Function not implemented", "5.13"),
        ("no table of system calls for riscv64", "x86_64"),
        ("the sandbox works only on Linux, not on darwin", "virtual machine"),
    ],
)
def test_known_messages_have_a_cure(complaint, part):
    assert part in fix_of(complaint)


@pytest.mark.slow
def test_sixty_four_completions_are_scored_in_parallel():
    reward = CodeTests(extract="raw", workers=16)
    start = time.monotonic()
    scores = reward(
        completions=["import time\ntime.sleep(0.5)\nprint(1)"] * 64, tests=[[{"stdin": "", "stdout": "1"}]] * 64
    )
    assert scores == [1.0] * 64
    assert time.monotonic() - start < 20  # one after the other: 32 s of sleep alone


def test_limits_are_frozen():
    with pytest.raises(AttributeError):
        Limits().cpu_seconds = 9


SQUARE = "def square(x):\n    return x * x\n"
QUOTED = "".join(f"> {line}\n" for line in f"```python\n{SQUARE}```".splitlines())
FENCED = {
    "a text block before it": f"Example:\n```text\n3\n```\nCode:\n```python\n{SQUARE}```\n",
    "a bash block before it": f"```bash\npip install x\n```\n```python\n{SQUARE}```\n",
    "CRLF": f"```python\n{SQUARE}```\n".replace("\n", "\r\n"),
    "python3.11": f"```python3.11\n{SQUARE}```",
    "py3": f"```py3\n{SQUARE}```",
    "a title": f'```python title="a.py"\n{SQUARE}```',
    "braces": f"```{{python}}\n{SQUARE}```",
    "braces with a dot": f"```{{.python .numberLines}}\n{SQUARE}```",
    "tildes": f"~~~python\n{SQUARE}~~~",
    "four backticks": f"````python\n{SQUARE}````",
    "never closed": f"```python\n{SQUARE}",
    "quoted": QUOTED,
    "a fence in a docstring": f'```python\n{SQUARE[:14]}\n    """\n    ```\n    f(3)\n    ```\n    """{SQUARE[14:]}```',
    "in a list": "1. Code:\n\n   ```python\n   def square(x):\n       return x * x\n   ```\n2. Done.",
    "behind a bullet": "- ```python\n  def square(x):\n      return x * x\n  ```",
    "a plain block of output behind it": f"```python\n{SQUARE}```\nOutput:\n```\n9\n```",
    "a console block behind it": f"```python\n{SQUARE}```\n```console\n$ python a.py\n9\n```",
    "upper case": f"```Python\n{SQUARE}```",
    "no language": f"```\n{SQUARE}```",
    "tabs": "\t```python\n\tdef square(x):\n\t\treturn x * x\n\t```",
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.defect("B4", name)) for name in FENCED])
def test_a_right_program_counts_in_every_kind_of_fence(name, now):
    tests = [{"call": "square", "args": [3], "expected": 9}]
    assert CodeTests(sandbox="none")(completions=[FENCED[name]], tests=[tests]) == [1.0]
    now("1.0")


@pytest.mark.parametrize(
    "text",
    ["```pycon\n>>> 1\n```", "```text\nx = 1\n```", "`x = 1`", "```x = 1```", "~~~json\n{}\n~~~", "no code"],
)
def test_what_is_no_program_is_none(text):
    assert fenced(text) is None


@pytest.mark.defect("N", "hostile fences are read in linear time")
def test_hostile_fences_take_no_time(now):
    started = time.process_time()
    for text in (
        "```\n" * 20_000,
        "`" * 100_000,
        " " * 100_000 + "x",
        "> " * 50_000,
        "```python\n" * 20_000,
        "~" * 99_999,
    ):
        fenced(text)
    assert time.process_time() - started < 5
    now("all six within seconds")


RIGHT = "def f(): return 7"
HOG = """
import threading, time
threading.stack_size(32768)
def f():
    for _ in range(700):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    time.sleep(20)
"""
THREADED = """
from concurrent.futures import ThreadPoolExecutor
def f():
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(int, "1111111"))
"""
SEVEN = [{"call": "f", "args": [], "expected": 7}]


@pytest.mark.slow
@pytest.mark.defect("B5", "two programs of 700 threads among fourteen, under Landlock")
def test_a_program_full_of_threads_takes_no_verdict_from_others(now):
    if complaint := probe("landlock"):
        pytest.skip(f"landlock does not work here: {complaint}")
    programs = [HOG, THREADED, *[RIGHT] * 5, HOG, THREADED, *[RIGHT] * 5]
    reward = CodeTests(extract="raw", sandbox="landlock", workers=14)
    scores = reward(completions=programs, tests=[SEVEN] * len(programs))
    assert scores == [float(program is not HOG) for program in programs]
    now(str(scores))


@pytest.mark.defect("B5", "one number of threads for all, as for a user that is not root: run again alone")
def test_a_program_that_found_no_room_is_run_again_alone(monkeypatch, caplog, now):
    at_once, most, asked = [], [], []

    class Crowded:
        @classmethod
        @contextlib.contextmanager
        def start(cls, backend, limits):
            at_once.append(1)
            try:
                yield cls()
            finally:
                at_once.pop()

        def run(self, source, tests):
            asked.append(source)
            most.append(len(at_once))
            time.sleep(0.05)
            if len(at_once) > 1 and source == "fork":
                raise SandboxFault("BlockingIOError: Resource temporarily unavailable")
            if len(at_once) > 1 and source == "thread":
                return [Result(outcome="error", error="RuntimeError: can't start new thread")]
            return [Result(outcome="ok", value="7")]

    monkeypatch.setattr(sandbox_module, "Sandbox", Crowded)
    programs = ["fork", "thread", *["other"] * 6]
    reward = CodeTests(extract="raw", sandbox="none", workers=8)
    assert reward(completions=programs, tests=[SEVEN] * 8) == [1.0] * 8
    assert max(most) > 2
    now("the fork and the thread are tried again alone; nobody's verdict is lost")


def test_a_lane_that_ends_without_a_word_is_a_fault():
    read, write = os.pipe()
    os.close(write)
    assert inside.receive(read) is None


@pytest.mark.slow
@pytest.mark.defect("B6", "sleeping programs: a budget for the call")
def test_a_call_has_a_budget(now):
    sleeper = "import time\ndef f(): time.sleep(60)"
    reward = CodeTests(extract="raw", sandbox="none", workers=2, call_seconds=2.0)
    started = time.monotonic()
    scores = reward(completions=[sleeper] * 12 + [RIGHT], tests=[SEVEN] * 13)
    assert time.monotonic() - started < 15
    assert scores[:2] == [0.0, 0.0]
    assert scores[-1] is None, "no time was left: no opinion, never 0"
    now(f"{scores} after {time.monotonic() - started:.0f} s")


@pytest.mark.defect("N", "call_seconds: 0")
def test_a_budget_of_nothing_is_refused(now):
    with pytest.raises(ConfigError, match="call_seconds is 0; it must be above 0") as error:
        CodeTests(sandbox="none", call_seconds=0)
    now(str(error.value))


@pytest.mark.defect("B11", "expected 1e-10 took 0.0")
@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [(0.0, 1e-10, False), (1e-10, 1e-10, True), (1e-17, 0.0, True), (0.1 + 0.2, 0.3, True), (1e-10, 2e-10, False)],
)
def test_small_numbers_are_compared(value, expected, is_same, now):
    result = Result(outcome="ok", value=json.dumps(value))
    assert passed({"call": "f", "expected": expected}, result) is is_same
    now(f"{value} for {expected}: {is_same}")


def test_the_sandbox_can_be_used_without_the_rest():
    code = "import sys, podium.isolation.sandbox; print(*(name for name in sys.modules if name.startswith('podium')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    own = ("podium.isolation.sandbox", "podium.isolation.machine", "podium.errors", "podium.lazy")
    assert [name for name in found if name not in ("podium", "podium.isolation") and not name.startswith(own)] == []

"""Tests of programs as datasets give them: assertions, lists of inputs and outputs."""

from __future__ import annotations

import json
import logging

import pytest

from podium.errors import RewardError
from podium.isolation.sandbox import Result, passed
from podium.rewards import CodeTests, program_tests
from podium.rewards.program_tests import read_tests

GROUPED = "import collections\ndef f(x):\n d = collections.defaultdict(list)\n for k, v in x: d[k].append(v)\n return d"
FORMS = {
    "sets": ("def f(a, b): return set(a) & set(b)", ["assert set(f((3, 4), (4, 5))) == set((4,))"], 1.0),
    "a float for an int": ("def f(x): return x / 2", ["assert f(10) == 5", "assert 2 == f(4)"], 1.0),
    "a subclass of dict": (GROUPED, ["assert f([('a', 1), ('a', 3)]) == ({'a': [1, 3]})"], 1.0),
    "tuples are no lists": ("def f(): return [1]", ["assert f() == (1,)", "assert f() == [1]"], 0.5),
    "near": (
        "def f(r): return 3.14159 * r",
        [
            "assert math.isclose(f(3), 9.42, rel_tol=0.001)",
            "assert abs(f(1) - 3.1) < 0.1",
            "assert abs(f(1) - 3) <= 0.1",
        ],
        2 / 3,
    ),
    "true and false": ("def f(x): return x > 1", ["assert f(2)", "assert not f(1)", "assert f(0) is False"], 1.0),
    "one of": ("def f(x): return -x", ["assert f(2) in (2, -2)", "assert f(2) in [2, 3]"], 0.5),
    "functions of pytest": (
        "def f(x): return sum(x)",
        "import pytest\nfrom solution import f\nimport math\n"
        'def test_a():\n  """One."""\n  x = [1, 2]\n  found = f(x)\n  told = 3\n'
        "  assert found == told\n  assert [found] == [math.floor(3.5)] or True\ndef test_b(): assert f([2]) == 3",
        0.5,
    ),
    "a text of several": ("def f(x): return x", "import math\nassert f(1) == 1\nassert f(2) == 3", 0.5),
    "keys of any kind": ("def f(): return {(1, 2): {3}, 'b': b'x'}", ["assert f() == {(1, 2): {3}, 'b': b'x'}"], 1.0),
    "computed": (
        "def f(x): return x",
        ["assert f(1000000007) == 10**9 + 7", "assert f([0, 0]) == [0] * 2", "assert f([0, 1]) == list(range(2))"],
        1.0,
    ),
    "strictly below": ("def f(x): return 4", ["assert abs(f(1) - 5) < 1", "assert abs(f(1) - 5) <= 1"], 0.5),
    "the same object": ("def f(x): return x", ["assert f(1) is True", "assert f(True) is True"], 0.5),
    "imports of a test": (
        "def f(x): return x['a']",
        "from collections import Counter\nassert f(Counter('aab')) == 2\nassert f(Counter('b')) == 0",
        1.0,
    ),
    "numbers of other kinds": (
        "import enum\nclass E(enum.IntEnum):\n A = 3\ndef f(x): return {0: E.A, 1: 1 + 2j, 2: bytearray(b'x')}[x]",
        ["assert f(0) == 3", "assert f(1) == 1+2j", "assert f(2) == b'x'"],
        1.0,
    ),
    "a list in Python's notation": ("def f(x): return x", "['assert f(1) == 1', 'assert f(1) == 2']", 0.5),
    "indented, with a comment": ("def f(x): return x", "    # one\n    assert f(1) == 1\n    assert(f(2) == 2)", 1.0),
    "lines": ("print(sum(map(int, open(0))))", {"inputs": [["1", "2"]], "outputs": [["3"]]}, 1.0),
    "functional": (
        "class Solution:\n def f(self, a, b): return a + b",
        [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": '{"func_name": "f"}'}],
        1.0,
    ),
    "functions of Python around it": (
        "def f(x, y=1): return x / 3",
        ["assert round(f(1), 2) == 0.33", "assert f(max(1, 3), set([1])) == 1.0", "assert f(f(9)) == 1"],
        1.0,
    ),
    "nulls": ("def f(x): return x", [None, "assert f(1) == 1"], 1.0),
    "infinity": ("def f(): return float('inf')", ["assert f() == float('inf')"], 1.0),
    "an object": ("def f(): return object()", ["assert f() == 1", "assert f() == None"], 0.0),
    "lists": ("print(int(input()) ** 2)", {"inputs": ["3", "4"], "outputs": ["9\n", "17"]}, 0.5),
    "other names": ("print(int(input()) ** 2)", {"input": ["3"], "output": ["9"]}, 1.0),
    "rows of two": ("print(int(input()) ** 2)", [{"input": "3", "output": "9"}, {"input": "1", "output": "2"}], 0.5),
    "a function": ("def f(x): return x * x", {"inputs": [[3], [4]], "outputs": [[9], 16], "fn_name": "f"}, 1.0),
    "a method": (
        "class Solution:\n def f(self, x): return [x]",
        {"inputs": [[3], [4]], "outputs": [[3], [5]], "fn_name": "f"},
        0.5,
    ),
    "cases": (
        "print(int(input()) ** 2)",
        {"language": "python", "test_cases": [{"fn_name": None, "input": "3", "output": "9", "type": "stdin_stdout"}]},
        1.0,
    ),
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_a_dataset_is_run(form: str) -> None:
    source, tests, share = FORMS[form]
    reward = CodeTests(extract="raw", sandbox="none")
    assert reward(completions=[source], tests=[tests]) == pytest.approx([share])
    if not isinstance(tests, str):
        assert reward(completions=[source], tests=[json.dumps(tests)]) == pytest.approx([share])


def test_what_an_assertion_expects_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr("podium.isolation.sandbox.Sandbox.run", lambda self, source, tests: sent.extend(tests) or [])
    texts = ["assert f(1) == 4711", "assert abs(f(1) - 4711) < 4712", "assert f(1) in [4711]", "assert 4711 == f(1)"]
    CodeTests(extract="raw", sandbox="none")(completions=["def f(x): pass"], tests=[texts])
    assert sent == [{"expression": "f(1)"}] * 4


@pytest.mark.parametrize(
    "text",
    [
        "assert f(1) == f(2)",
        "assert f(1) == 3 and f(2) == 4",
        "assert f(1) < 3",
        "assert 1 == 1",
        "assert f(1) == 1 == f(2)",
        "assert [f(x) for x in (1, 2)] == [g(x) for x in (1, 2)]",
        "assert math.isclose(f(1), 2, rel_tol=f(2))",
        "assert math.isclose(f(1), f(2))",
        "assert (f(3) == 9) == True",
        "assert (f(3) == 9) is True",
        "assert str(f(3) == 9) == 'True'",
        "assert [f(3) == 9, f(2) == 4] == [True, True]",
        "assert same(f(3), 9) == True",
        "assert score(f(3), 9) == 1.0",
        "assert score(f(3), gold=9) == 1.0",
        "assert allclose(f(2), 1.41)",
        "assert math.isclose(f(2), 1.41) == True",
        "assert np.isclose(f(2), 1.41)",
        "assert f(2).startswith('abc')",
        "assert all([f(3), f(2)]) == True",
        "assert f(1) == {(((0,) * 2000,) * 2000,) * 2000}",
        "assert f(1) == 10 ** 99999999",
        "assert f(1) == [0] * 99999999",
        "assert f(1) == [0] * 4000 * 4000",
        "assert f(1) == list(range(99999999))",
        "assert f(1) == {**{}}",
        "assert f(1) == [*[1]]",
        "assert all((f(x) == x for x in (1, 2)))",
        "def test_it(capsys):\n  assert f(1) == 1",
        "def test_it():\n  x = [1]\n  f(x)\n  assert x == [2]",
        "def test_it():\n  with raises(ValueError): f(1)\n  assert 1",
        "def test_it():\n  x = 3\n  assert f([x for x in (1, 2)]) == 4",
        "def test_it():\n  x = f(3)\n  assert same(x, 9) == 1",
        "def test_it():\n  x = [1, 1]\n" + "  x = [x, x]\n" * 99 + "  assert f(x) == 1",
    ],
)
def test_what_cannot_be_compared_outside_is_left_out_and_said_once(
    text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_tests, "_SAID", set())
    with caplog.at_level(logging.WARNING):
        assert read_tests([text, text, "assert f(1) == 2"]) == [{"expression": "f(1)", "one_of": [2]}]
        assert read_tests([text]) is None
    assert caplog.text.count("left out") == 1
    assert ("def test_it" if text.startswith("def test_it(c") or "x, x" in text else "assert") in caplog.text


def test_rows_that_cannot_be_read_are_not_scored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some can: a bad row of a large table ends no run. Where none can, the column is another one."""
    monkeypatch.setattr(program_tests, "_SAID", set())
    deep = "assert f(" + "1+" * 4999 + "1) == 1"
    bad = ["def tested(): pass", "", None, deep, "[" * 100_000, "x = 1\nassert f(x) == 1"]
    bad += [{"language": "cpp", "test_cases": []}, "assert f(1) == " + "-" * 100_000 + "1"]
    reward = CodeTests(extract="raw", sandbox="none")
    rows = [["assert f(1) == 1"], *bad]
    with caplog.at_level(logging.WARNING):
        assert reward(completions=["def f(x): return x"] * len(rows), tests=rows) == [1.0] + [None] * len(bad)
    assert caplog.text.count("not scored") == 1
    with pytest.raises(RewardError, match="neither JSON nor an assertion"):
        reward(completions=["x = 1"] * 2, tests=["def tested(): pass", "?"])


@pytest.mark.parametrize(
    "value", ["", "[1]", '["tuple"]', '["object", []]', '{"a": 1}', "NaN", '["set", [["list", []]]]']
)
def test_what_no_harness_wrote_passes_nothing(value: str) -> None:
    assert not passed({"expression": "f()", "one_of": [1, [], {}, set()]}, Result(outcome="ok", value=value))

"""Tests of a program, in the forms that datasets give them.

    {"stdin": "3\\n", "stdout": "9\\n"}                                  # or "input" and "output"
    {"call": "square", "args": [3], "expected": 9}                       # "Solution.square" makes a Solution first
    "assert square(3) == 9"                                              # MBPP, AceCode
    "def test_three(): assert square(3) == 9"                            # KodCode: functions of pytest
    {"inputs": ["3\\n"], "outputs": ["9\\n"], "fn_name": "square"}       # APPS, TACO, CodeContests; fn_name: a function
    {"language": "python", "test_cases": [{"input": "3\\n", "output": "9\\n"}]}

An assertion is taken apart: the side with the call is evaluated in the sandbox, what is expected is compared outside.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import RewardError
from podium.rewards.assertions import UNREADABLE, Test, asserted

logger = logging.getLogger(__name__)

_SCHEMA = (
    'A test is {"stdin": "3", "stdout": "9"}, {"call": "square", "args": [3], "expected": 9} or '
    '"assert square(3) == 9"; see docs/rewards.md for the forms of datasets.'
)


def read_rows(rows: Sequence[Any]) -> list[list[Test] | None]:
    """The tests of each row; None for rows that have none, or none that can be read, of which the first is logged.

    Raises `RewardError` where no row has any that can be read.
    """
    read: list[list[Test] | None] = []
    errors = []
    for index, tests in enumerate(rows):
        try:
            read.append(read_tests(tests, index))
        except RewardError as error:
            errors.append(error)
            read.append(None)
    if errors and not any(read):
        raise errors[0]
    if errors:
        _say_first(_NOT_SCORED, str(errors[0]))
    return read


def read_tests(tests: Any, index: int = 0) -> list[Test] | None:
    """The tests of a row as a list; None where the row has none. `index` is for the message.

    Assertions whose expected value is no literal are left out, and the first of a process is logged. Raises
    `RewardError` for what is no list of tests.

    >>> read_tests('[{"stdin": "1", "stdout": "2"}]')
    [{'stdin': '1', 'stdout': '2'}]
    >>> read_tests({"inputs": ["1", "2"], "outputs": ["1", "4"]})
    [{'stdin': '1', 'stdout': '1'}, {'stdin': '2', 'stdout': '4'}]
    >>> read_tests(["assert set(f((1, 2))) == set((2, 1))"])
    [{'expression': 'set(f((1, 2)))', 'one_of': [{1, 2}]}]
    """
    tests = tests.tolist() if hasattr(tests, "tolist") else tests
    if tests is None or (isinstance(tests, str) and not tests.strip()):
        return None
    if isinstance(tests, str):
        tests = _parsed(tests, index)
    if isinstance(tests, Mapping):
        tests = _spread(tests, index)
    if not isinstance(tests, Sequence) or not all(isinstance(test, Mapping | str | None) for test in tests):
        start = str(tests)[:80]
        raise RewardError(
            f"the `tests` of completion {index} are not a list of tests: {start!r}. {_SCHEMA}",
            index=index,
            tests=start,
            schema=_SCHEMA,
        )
    return [test for entry in tests if entry is not None for test in _read(entry, index)] or None


def _parsed(text: str, index: int) -> Any:
    """JSON, a list or mapping in Python's notation, or Python text with assertions as a list of one."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except UNREADABLE:
            continue
    if "assert" in text:
        return [text]
    start = text[:120]
    raise RewardError(
        f"the `tests` of completion {index} are text that is neither JSON nor an assertion: {start!r}. {_SCHEMA}",
        index=index,
        text=start,
        schema=_SCHEMA,
    )


def _spread(tests: Mapping[str, Any], index: int) -> Any:
    """The tests of a mapping of lists, one by one; the mapping itself where it is none."""
    language = tests.get("language") or "python"
    if str(language).casefold() not in ("python", "python3", "py"):
        raise RewardError(
            f"the `tests` of completion {index} are of programs in {language}, and the sandbox runs Python.",
            index=index,
            language=language,
        )
    if "test_cases" in tests:
        return tests["test_cases"]
    for key, other in (("inputs", "outputs"), ("input", "output")):
        inputs = tests.get(key)
        outputs = tests.get(other)
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            return [{"input": one, "output": other, "fn_name": tests.get("fn_name")} for one, other in pairs]
    return tests


def _read(test: Mapping[str, Any] | str, index: int) -> Sequence[Test]:
    """A test with its own keys alone: a table of rows has every key everywhere, and nulls where it was not set."""
    if isinstance(test, str):
        if (found := asserted(test)) is None:
            start = test[:120]
            raise RewardError(
                f"a test of completion {index} is {start!r}. {_SCHEMA}",
                index=index,
                dict=start,
                schema=_SCHEMA,
            )
        tests, unread = found
        if unread:
            _say_first(_LEFT_OUT, unread[0][:200])
        return tests
    by_call = isinstance(test.get("call"), str)
    if by_call and "expected" in test and isinstance(test.get("args") or [], list):
        own = {"call": test["call"], "args": test.get("args") or [], "kwargs": test.get("kwargs") or {}}
        return [own | {"expected": test["expected"]}]
    inputs, expected = (test.get(key) if test.get(key) is not None else test.get(other) for key, other in _ALIKE)
    name, is_function = _function_of(test)
    read = None
    if name is not None:
        read = _called(name, inputs, expected)
    elif not by_call and not is_function:
        read = {"stdin": _lines(inputs or ""), "stdout": _lines(expected)}
    if read is None or None in read.values():
        start = str(dict(test))[:120]
        raise RewardError(
            f"a test of completion {index} is {start!r}. {_SCHEMA}", index=index, dict=start, schema=_SCHEMA
        )
    return [read]


_ALIKE = (("stdin", "input"), ("stdout", "output"))


def _function_of(test: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The function that a test calls, and whether it calls one at all."""
    metadata = test.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = {}
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = str(test.get("testtype") or test.get("type") or "")
    return (name if isinstance(name, str) and "stdin" not in kind else None), kind in ("functional", "function_call")


def _called(name: str, inputs: Any, expected: Any) -> Test | None:
    """A call, of arguments in a list or as lines of JSON. APPS wraps what a function returns in a list of one."""
    try:
        arguments = [json.loads(line) for line in inputs.splitlines()] if isinstance(inputs, str) else inputs
        values = [json.loads(expected) if isinstance(inputs, str) and isinstance(expected, str) else expected]
    except ValueError:
        return None
    if isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    return {"call": name, "args": arguments, "kwargs": {}, "one_of": values} if isinstance(arguments, list) else None


def _lines(text: Any) -> str | None:
    """Input or output as a text; lists are of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    return text if isinstance(text, str) else None


_NOT_SCORED = "Rows whose tests cannot be read are not scored: %s"
_LEFT_OUT = "A test that cannot be compared from outside is left out, and others like it: %s"
_SAID = set[str]()


def _say_first(what: str, text: str) -> None:
    """Log a message, the first of its kind in a process."""
    if what not in _SAID:
        logger.warning(what, text)
    _SAID.add(what)

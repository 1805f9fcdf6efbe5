from __future__ import annotations

import json

from podium.data.tasks import FUNCTIONS, HELD_OUT_FUNCTIONS, load_task, tiny_functions
from podium.rewards import CodeStages

SOLUTIONS = {
    "double": "2 * x",
    "is_even": "x % 2 == 0",
    "add": "a + b",
    "as_list": "[a, b]",
    "to_text": "str(x)",
    "power": "a ** b",
}


def test_right_functions_get_full_marks_and_wrong_ones_part():
    train, _ = tiny_functions()
    by_name = {json.loads(row["tests"])[0]["call"]: row for row in train}
    reward = CodeStages(sandbox="none")
    for name, body in SOLUTIONS.items():
        row = by_name[name]
        signature = row["prompt"][-1]["content"].split(" returns")[0]
        parameters = "a, b" if "(a, b)" in signature else "x"
        right = f"```python\ndef {name}({parameters}):\n    return {body}\n```"
        wrong = f"```python\ndef {name}({parameters}):\n    return None\n```"
        scores = reward(completions=[right, wrong, "no code"], tests=[row["tests"]] * 3)
        assert [round(score, 6) for score in scores] == [1.0, 0.3, 0.0], name


def test_no_held_out_function_is_trained_on():
    train, held_out = tiny_functions()
    names = [{json.loads(row["tests"])[0]["call"] for row in rows} for rows in (train, held_out)]
    assert names[1] == set(HELD_OUT_FUNCTIONS)
    assert not names[0] & names[1]
    assert len(names[0]) + len(names[1]) == len(FUNCTIONS)


def test_every_task_tells_functions_apart():
    """The same five values for two functions would pay for the wrong one."""
    train, held_out = tiny_functions()
    outcomes = {}
    for row in (*train, *held_out):
        tests = json.loads(row["tests"])
        outcomes[tests[0]["call"]] = (len(tests[0]["args"]), [repr(test["expected"]) for test in tests])
    assert len({repr(each) for each in outcomes.values()}) == len(outcomes)


def test_it_loads_as_a_built_in_task():
    train, held_out = load_task("builtin:tiny-functions")
    assert (train.num_rows, held_out.num_rows) == (42, 8)
    assert train.column_names == ["prompt", "tests"]

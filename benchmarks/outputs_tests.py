"""What `podium rewards test`, `environments test` and `agents test` find in planted mistakes and in sound ones.

The functions and classes are those of the tests: rewards of `tests/e2e/planted_rewards.py`, games and tools of
`tests/unit/test_environment_tester.py`; besides them the library, legitimate rewards, shipped recipes and programs.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.legitimate_rewards import REWARDS, sums
from benchmarks.outputs import command, neutral, scratch
from benchmarks.outputs_verbs import steady

ROOT = Path(__file__).parent.parent
PLANTED_REWARDS = ROOT / "tests/e2e/planted_rewards.py"
GAMES = ROOT / "tests/unit/test_environment_tester.py"
BY_THE_CLOCK = {"sleeps", "hangs_on_empty", "IsSlow", "Hangs", "Waits"}
"""What is found in them depends on the load of the machine."""
NUMBERS = [{"number": n} for n in (3, 5, 1, 7)]
"""Rows of the games, which have a number that is to be guessed."""

ASK = """
import json, urllib.request


def ask(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""


"""
PROGRAMS = {
    "compares": """
def run(base_url, api_key, row, answer):
    return float(ask(base_url, api_key, row["prompt"]).strip() == answer)
""",
    "pays any words": """
def run(base_url, api_key, row, answer):
    reply = ask(base_url, api_key, row["prompt"])
    return 1.0 if reply.strip() == answer else 0.7 * bool(reply.strip())
""",
    "pays silence": """
def run(base_url, api_key, row, answer):
    return 0.0 if ask(base_url, api_key, row["prompt"]).strip() else 0.5
""",
    "asks for nothing": """
def run(row):
    return 0.5
""",
    "raises": """
def run(base_url, api_key, row, answer):
    return float(int(ask(base_url, api_key, row["prompt"])) == int(answer))
""",
    "pays nothing": """
def run(base_url, api_key, row, answer):
    ask(base_url, api_key, row["prompt"])
    return 0.0
""",
    "returns a text": """
def run(base_url, api_key, row, answer):
    return ask(base_url, api_key, row["prompt"])
""",
}


def tests() -> dict[str, Any]:
    """Exit code and JSON report of each test of a reward, an environment and a program."""
    found: dict[str, Any] = {}
    with scratch() as folder:
        _write(folder / "sums.jsonl", sums())
        _write(folder / "numbers.jsonl", NUMBERS)
        for name, words in _commands(folder):
            found[name] = neutral(_report(words), folder)
    for name, reward in REWARDS.items():
        found[f"legitimate: {name}"] = _examined(reward)
    return found


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _commands(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name of a case, and the words of its command."""
    from podium.recipe import shipped_recipes
    from podium.rewards import LIBRARY

    for name in _public(PLANTED_REWARDS, ast.FunctionDef) - {"content", "inside"}:
        yield f"reward: {name}", ("rewards", "test", f"{PLANTED_REWARDS}:{name}", "--data", "sums.jsonl")
    for name in LIBRARY:
        yield f"library: {name}", ("rewards", "test", name, "--data", "sums.jsonl")
    for name in _public(GAMES, ast.ClassDef):
        words = ("environments", "test", f"{GAMES}:{name}", "--data", "numbers.jsonl")
        yield f"game: {name}", words
        yield f"game with an oracle: {name}", (*words, "--oracle", f"{GAMES}:halves")
    for name in shipped_recipes():
        yield f"rewards of {name}", ("rewards", "test", name)
        yield f"environments of {name}", ("environments", "test", name)
    for name, source in PROGRAMS.items():
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(ASK + source)
        yield f"program: {name}", ("agents", "test", f"{path}:run", "--data", "sums.jsonl", "--row", "1")


def _public(path: Path, kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> set[str]:
    """Names of the functions or classes that a file defines, without the tests."""
    names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kind)}
    return {name for name in names if not name.startswith("_")} - BY_THE_CLOCK


def _report(words: tuple[str, ...]) -> dict[str, Any]:
    result = command(*words, "--json")
    try:
        report = json.loads(result["printed"])
    except ValueError:
        report = result["printed"]
    return {"exit": result["exit"], "crash": result["crash"], "report": _without_places(steady(report))}


def _examined(reward: Any) -> Any:
    from podium.rewards import examine

    parts = ("code", "severity", "what", "fix")
    found = examine(reward.make(), reward.rows()).findings
    return _without_places([{part: getattr(finding, part) for part in parts} for finding in found])


def _without_places(value: Any) -> Any:
    """Without line numbers, which another commit's file changes, and without the folder of the commit."""
    text = json.dumps(value, default=str).replace(str(ROOT), "ROOT")
    return json.loads(re.sub(r"(?<=\.py):\d+", "", text))

"""The test of tools and environments finds planted bugs, each by its code, and says nothing of sound ones."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from podium import TextEnvironment
from podium.agents import plain_text
from podium.agents import tools as agents_tools
from podium.agents.resolve import resolve_tools
from podium.agents.table import resolve_environment
from podium.agents.tester import audit, examine
from podium.agents.tools import Tool
from podium.cli import app
from podium.data.rows import DataSpec, load_data
from podium.runs import findings
from podium.tester import episode_rules
from podium.tester.policies import arguments_of

ROWS = [{"number": n} for n in (3, 5, 1, 7)]


class Guess(TextEnvironment):
    """A number from 1 to 7 in three turns."""

    most = 3

    def reset(self, number: int = 4, **row: Any) -> str:
        self.number, self.tries = number, 0
        return "Guess my number from 1 to 7."

    def step(self, text: str) -> Any:
        self.tries += 1
        guess = int(text) if text.strip().isascii() and text.strip().isdigit() else 0
        if guess == self.number:
            return None, 1.0, True, {}
        return ("higher" if guess < self.number else "lower"), 0.0, self.tries >= self.most, {}


def halves(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Binary search, from the conversation alone."""
    low, high = 1, 7
    for turn, reply in zip(messages[1::2], messages[2::2], strict=False):
        guess = int(turn["content"])
        low, high = (guess + 1, high) if reply["content"] == "higher" else (low, guess - 1)
    return str((low + high) // 2)


class Maze:
    """A corridor: TRL's environments, whose methods are tools."""

    def reset(self, number: int = 3, **row: Any) -> str:
        self.goal, self.place = number, 0
        return f" The exit is {number} steps to the right."

    def walk(self, steps: int) -> str:
        """
        Walk along the corridor.

        Args:
            steps: Number of steps to the right; negative ones go to the left.
        """
        self.place += steps
        return f"You are at {self.place}."

    def look(self) -> str:
        """Look around."""
        return "A corridor."

    def get_reward(self) -> float:
        return float(self.place == self.goal)


def walks_there(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    return None if messages[-1]["role"] == "tool" else ("walk", {"steps": row["number"]})


def codes(target: Any, rows: Sequence[Mapping[str, Any]] = ROWS, **settings: Any) -> dict[str, str]:
    """Codes and severities, in the order of the report."""
    return {each.code: each.severity for each in audit(target, rows, **settings)}


@pytest.fixture(autouse=True)
def calls_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in the thread that asks for them, but for one that hangs: handing over takes most of an episode."""

    def at_once(work: Callable[[], Any], name: str) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            future.set_exception(error)
        return future

    if "hangs" not in request.node.name:
        for module in (plain_text, agents_tools):
            monkeypatch.setattr(module, "in_thread", at_once)


# ---- planted bugs ----


class SharesAList(Guess):
    seen: ClassVar[list[str]] = []

    def reset(self, **row: Any) -> str:
        self.seen.clear()
        return super().reset(**row)

    def step(self, text: str) -> Any:
        self.seen.append(text)
        observation, *rest = super().step(text)
        return (observation and f"{observation}, {len(self.seen)} tries"), *rest


class ResetsByChance(Guess):
    def reset(self, **row: Any) -> str:
        return super().reset(**row) + f" Hint: {random.SystemRandom().random()}"


class IgnoresTheRow(Guess):
    def reset(self, **row: Any) -> str:
        return super().reset(number=9)


class ForgetsToReset(Guess):
    def __init__(self) -> None:
        self.history: list[str] = []

    def step(self, text: str) -> Any:
        self.history.append(text)
        observation, *rest = super().step(text)
        return (observation and f"{observation} ({len(self.history)} so far)"), *rest


class PaysSilence(Guess):
    def step(self, text: str) -> Any:
        observation, reward, done, info = super().step(text)
        return observation, reward if reward or not text else -0.5, done, info


class PaysAnyWord(Guess):
    def step(self, text: str) -> Any:
        return (None, 0.8, True, {}) if text and not text.isdigit() else super().step(text)


class PaysEachTime(Maze):
    def reset(self, **row: Any) -> str:
        self.walks = 0
        return super().reset(**row)

    def walk(self, steps: int) -> str:
        """
        Walk along the corridor.

        Args:
            steps: Number of steps.
        """
        self.walks += 1
        return super().walk(steps)

    def get_reward(self) -> float:
        return 0.1 * self.walks


class NeverPays(Guess):
    def step(self, text: str) -> Any:
        observation, _, done, info = super().step(text)
        return observation, 0.0, done, info


class ReturnsAnObject(Maze):
    def look(self) -> Any:  # type: ignore[override]
        """Look around."""
        return object()


class ReturnsBytes(Maze):
    def look(self) -> Any:  # type: ignore[override]
        """Look around."""
        return b"\xff\x00"


class ReturnsABook(Maze):
    def look(self) -> str:
        """Look around."""
        return "word " * 5000


class IsSlow(Maze):
    seconds = 0.26

    def look(self) -> str:
        """Look around."""
        time.sleep(self.seconds)
        return "A corridor."


class RollsDice(Guess):
    def step(self, text: str) -> Any:
        observation, *rest = super().step(text)
        return (observation and f"{observation} {random.SystemRandom().random()}"), *rest


class NeverEnds(Guess):
    most = 10**9


class RaisesOnText(Guess):
    def step(self, text: str) -> Any:
        self.guess = int(text)
        return super().step(text)


class Hangs(Guess):
    def step(self, text: str) -> Any:
        time.sleep(3)
        return super().step(text)


class ReturnsThree(Guess):
    def step(self, text: str) -> Any:
        return super().step(text)[:3]


class HasNoDocstring(Maze):
    def jump(self, height: int) -> str:
        return "ok"


class HasNoReset:
    def look(self) -> str:
        """Look around."""
        return "A corridor."


class CannotBeMade(Guess):
    def __init__(self) -> None:
        raise FileNotFoundError("words.txt")


class PaysNaN(Maze):
    def get_reward(self) -> float:
        return float("nan")


class RefusesItsSchema(Maze):
    def walk(self, steps: int) -> str:
        """
        Walk along the corridor.

        Args:
            steps: Number of steps.
        """
        raise ValueError("steps must be a list")


class PaysForAttendance(Maze):
    def get_reward(self) -> float:
        return 1.0


class NamesItsNumber(Guess):
    def step(self, text: str) -> Any:
        observation, *rest = super().step(text)
        return (observation and f"{observation}; debug: target={self.number}"), *rest


class Remembers(Guess):
    seen: ClassVar[list[str]] = []

    def step(self, text: str) -> Any:
        self.seen.append(text)
        observation, *rest = super().step(text)
        return (observation and f"{observation}, {len(self.seen)} tries"), *rest


class TellsLater(Guess):
    def step(self, text: str) -> Any:
        observation, *rest = super().step(text)
        return (observation and (observation if self.tries < 2 else f"{observation} (It was {self.number}.)")), *rest


class KeepsADefault(Guess):
    def step(self, text: str, seen: list[str] = []) -> Any:  # noqa: B006
        seen.append(text)
        observation, *rest = super().step(text)
        return (observation and f"{observation}, {len(seen)} tries"), *rest


class MakesAVariable(Guess):
    def step(self, text: str) -> Any:
        MakesAVariable.count = getattr(MakesAVariable, "count", 0) + 1  # type: ignore[attr-defined]
        observation, *rest = super().step(text)
        return (observation and f"{observation}, {MakesAVariable.count} tries"), *rest  # type: ignore[attr-defined]


class PaysTheFirst(Guess):
    solved: ClassVar[set[int]] = set()

    def step(self, text: str) -> Any:
        observation, reward, done, info = super().step(text)
        paid = bool(reward) and self.number not in self.solved
        self.solved |= {self.number} if paid else set()
        return observation, float(paid), done, info


BUGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "E001 no reset": (HasNoReset, {}),
    "E001 cannot be made": (CannotBeMade, {}),
    "E002 no docstring": (HasNoDocstring, {}),
    "E003 text that is not expected": (RaisesOnText, {}),
    "E003 refuses its own schema": (RefusesItsSchema, {}),
    "E004 three values": (ReturnsThree, {}),
    "E004 nan": (PaysNaN, {}),
    "E005 hangs": (Hangs, {"limit": 0.3}),
    "E006 shared state": (SharesAList, {}),
    "E006 a list that grows": (Remembers, {}),
    "E006 pays the first instance": (PaysTheFirst, {}),
    "E006 a default argument": (KeepsADefault, {}),
    "E006 a variable that is made while it plays": (MakesAVariable, {}),
    "E007 chance in reset": (ResetsByChance, {}),
    "E008 ignores the row": (IgnoresTheRow, {}),
    "E009 forgets to reset": (ForgetsToReset, {}),
    "E010 a try costs more than silence": (PaysSilence, {}),
    "E011 any word": (PaysAnyWord, {"oracle": halves}),
    "E012 each call": (PaysEachTime, {}),
    "E013 never pays": (NeverPays, {"oracle": halves}),
    "E014 an object": (ReturnsAnObject, {}),
    "E014 bytes": (ReturnsBytes, {}),
    "E015 a book": (ReturnsABook, {}),
    "E016 slow": (IsSlow, {"turns": 1, "budget": 1.0}),
    "E017 dice": (RollsDice, {}),
    "E018 never ends": (NeverEnds, {}),
    "E019 attendance": (PaysForAttendance, {}),
    "E020 names its number": (NamesItsNumber, {}),
    "E020 names it in turn 2": (TellsLater, {}),
}


@pytest.mark.cases(3)
@pytest.mark.defect("AG9", "planted bugs, those of the report and other forms of them")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n == "E016 slow" else []) for n in BUGS])
def test_each_bug_is_found(name: str) -> None:
    target, settings = BUGS[name]
    found = codes(target, **settings)
    assert name[:4] in found, found
    assert set(found) - {name[:4]} <= {"E010"}, "nothing but its consequences"


@pytest.mark.slow
def test_slow_calls_are_found_by_a_shorter_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_rules, "SLOW_SECONDS", episode_rules.SLOW_SECONDS / 5)
    monkeypatch.setattr(IsSlow, "seconds", IsSlow.seconds / 5)
    assert set(codes(IsSlow, turns=1, budget=1.0)) == {"E016"}


def test_every_code_has_a_bug_and_a_page() -> None:
    pages = {code for code in findings.codes() if code.startswith("E")}
    assert {name[:4] for name in BUGS} == pages
    for code in pages:
        for section in ("What it means", "Usual causes", "What to do"):
            assert f"## {section}" in findings.page(code), code


def test_calls_are_measured_and_steps_of_environments_in_text_alone() -> None:
    """A turn without a call ends an episode with tools; nothing runs."""
    reports = [examine(kind, ROWS, oracle=lambda row, messages: "3") for kind in (Maze, Guess)]
    assert [{each.name for each in report.measured} for report in reports] == [{"walk", "look"}, {"step"}]


# ---- games that pay for the wrong thing, with and without an oracle ----


class Broken(Guess):
    """A turn is paid by a rule of its own."""

    most = 3

    def paid(self, text: str) -> float:
        raise NotImplementedError

    def step(self, text: str) -> Any:
        self.tries += 1
        reward = float(self.paid(text))
        return ("no" if self.tries < self.most else None), reward, self.tries >= self.most, {}


def broken(paid: Callable[[Any, str], float], **members: Any) -> type:
    return type("Broken", (Broken,), {"paid": lambda self, text: paid(self, text), **members})


def names_it(self: Any, **row: Any) -> str:
    return f"{Guess.reset(self, **row)} [number={self.number}]"


GAMES: dict[str, tuple[type, str, str]] = {  # with the code without an oracle and with one; empty: doubt alone
    "cannot be won": (broken(lambda game, text: text == game.number), "", "E013"),
    "punishes the right answer": (broken(lambda game, text: -(text == str(game.number))), "", "E013"),
    "pays by length": (broken(lambda game, text: len(text) / 100), "E011", "E013"),
    "a list of all numbers": (broken(lambda game, text: str(game.number) in text.split()), "E011", "E011"),
    "the prompt": (broken(lambda game, text: "Guess my number" in text), "E011", "E013"),
    "please": (broken(lambda game, text: "please" in text or text == str(game.number)), "E011", "E011"),
    "every turn": (broken(lambda game, text: text == str(game.number)), "E012", "E012"),
    "an exclamation mark in turn 2": (broken(lambda game, text: "!" in text and game.tries == 2), "E011", "E013"),
    "a substring": (broken(lambda game, text: str(game.number) in text), "E011", "E011"),
    "in the prompt": (type("InPrompt", (Guess,), {"reset": names_it}), "E020", "E020"),
    "in an observation": (NamesItsNumber, "E020", "E020"),
    "a file": (broken(lambda game, text: os.path.exists("paid") or text == str(game.number)), "E012", "E012"),
    "the clock": (broken(lambda game, text: time.time_ns() // 10**6 % 10**9 == 7), "", "E013"),
}


def says_it(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    return str(row["number"]) if len(messages) == 1 else None


@pytest.mark.cases(3)
@pytest.mark.defect("AG10", "games that pay for the wrong thing, with and without an oracle")
@pytest.mark.parametrize("name", GAMES)
def test_nothing_found_is_never_said_of_a_broken_game(name: str) -> None:
    game, alone, judged = GAMES[name]
    for code, oracle in ((alone, None), (judged, says_it)):
        report = examine(game, ROWS, oracle=oracle)
        found = {each.code for each in report.findings}
        assert not code or code in found, (oracle, report.findings)
        assert "nothing found" not in report.closing
        assert f"policies x {len(ROWS)} rows" in report.closing
        assert ("give --oracle" in report.closing) or oracle is not None
        assert "clocks" in report.closing


def test_what_nobody_has_won_is_said() -> None:
    assert "No policy has earned anything: whether" in examine(NeverPays, ROWS).closing
    assert "No policy has earned" not in examine(Guess, ROWS).closing
    assert "Without an oracle" in examine(Guess, ROWS).closing
    assert "oracle it is" not in examine(Guess, ROWS, oracle=halves).closing
    assert "Nothing was played" in examine(CannotBeMade, ROWS).closing


# ---- sound ones ----


class Shop(Maze):
    """Not buying is right for half of the rows."""

    def reset(self, number: int = 3, **row: Any) -> str:
        self.good, self.bought = number < 4, False
        return f" The lamp costs {number}."

    def walk(self, steps: int) -> str:
        """
        Buy lamps.

        Args:
            steps: Number of lamps.
        """
        self.bought = True
        return "Bought."

    def get_reward(self) -> float:
        return float(self.bought == self.good)


class Bandit(TextEnvironment):
    """Eight rounds, each paid."""

    max_turns = 8

    def reset(self, **row: Any) -> str:
        return "Choose 1 or 2."

    def step(self, text: str) -> Any:
        return "A coin." if text == "1" else "Nothing.", float(text == "1"), False, {}


class Copies(TextEnvironment):
    """The task is to copy."""

    def reset(self, number: int = 3, **row: Any) -> str:
        self.number = number
        return f"Copy: {number}"

    def step(self, text: str) -> Any:
        return None, float(text == str(self.number)), True, {}


def buys(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    return ("walk", {"steps": 1}) if row["number"] < 4 and messages[-1]["role"] == "user" else None


class Words(TextEnvironment):
    """Twenty questions; the last word of an episode is the solution, and the prompt lists all of them."""

    def reset(self, number: int = 1, **row: Any) -> str:
        self.word, self.tries = NAMES[number], 0
        return f"I think of one of these: {', '.join(sorted(NAMES.values()))}."

    def step(self, text: str) -> Any:
        self.tries += 1
        over = self.tries == 4 or text.strip().lower() == self.word
        return (f"It was {self.word}." if over else "no"), float(text.strip().lower() == self.word), over, {}


NAMES = {3: "apple", 5: "river", 1: "stone", 7: "cloud"}


def names(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    return NAMES[row["number"]] if len(messages) == 1 else None


@pytest.mark.defect(
    "AG9", "sound games: a shop where not buying is right, a list of all answers, the solution at the end"
)
@pytest.mark.parametrize(
    ("target", "oracle"),
    [
        (Words, None),
        (Words, names),
        (Shop, buys),
        (Shop, None),
        (Bandit, lambda row, messages: "1"),
        (Copies, says_it),
        (Copies, None),
    ],
)
def test_no_sound_one_is_an_error(target: Any, oracle: Any) -> None:
    found = [each for each in examine(target, ROWS, oracle=oracle).findings if each.severity == "error"]
    assert not found, found


def test_a_call_where_there_are_no_tools_is_no_turn() -> None:
    def calls(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, int]]:
        return "guess", {"number": 3}

    assert codes(Guess, ROWS, oracle=calls)["E004"] == "error"


def test_arguments_are_made_for_every_valid_schema() -> None:
    """Programs send those that their frameworks write: without a type, with several, or `true`."""
    properties = {"a": True, "b": {}, "c": {"type": []}, "d": {"type": ["integer", "null"]}, "e": {"enum": ["x"]}}
    for parameters, names in (
        ({"properties": properties}, set(properties)),
        ({"properties": None}, set()),
        ({}, set()),
    ):
        schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        made = arguments_of(Tool(name="f", function=print, schema=schema), 0)
        assert made.keys() == names
        assert not names or (made["d"], made["e"]) == (3, "x")


def test_few_rows_prove_nothing() -> None:
    assert codes(NeverPays, ROWS, oracle=halves)["E013"] == "error"
    assert codes(NeverPays, ROWS[:2], oracle=halves)["E013"] == "warning"


def test_chance_is_not_called_shared_state() -> None:
    assert "E006" not in codes(RollsDice)


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


class Dice(Guess):
    """Chance that follows the seed of the group."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        self.dice = random.Random(seed)
        return super().reset(**row)

    def step(self, text: str) -> Any:
        observation, *rest = super().step(text)
        return (observation and f"{observation} {self.dice.randrange(6)}"), *rest


class Waits(Maze):
    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (Guess, {"oracle": halves}),
        (Guess, {}),
        (Maze, {"oracle": walks_there}),
        (Maze, {}),
        (Dice, {}),
        (Waits, {"oracle": walks_there}),
        (multiply, {}),
    ],
)
def test_nothing_is_said_of_sound_ones(target: Any, settings: dict[str, Any]) -> None:
    assert codes(target, **settings) == {}


def follows(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    """The look-ups of a row's chain, in their order, then the last code."""
    *asked, last = row["codes"]
    done = sum(each["role"] == "tool" for each in messages)
    return ("look_up", {"code": asked[done]}) if done < len(asked) else last


@pytest.mark.parametrize(
    ("spec", "data", "settings"),
    [("builtin:guess", "builtin:guesses", {}), ("builtin:chain", "builtin:chains", {"oracle": follows})],
)
def test_environments_of_the_recipes_are_sound(spec: str, data: str, settings: dict[str, Any]) -> None:
    rows = [dict(row) for row in load_data(DataSpec(dataset=data))[0].select(range(4))]
    assert codes(resolve_environment(spec), rows, **settings) == {}


def test_rows_that_are_missing_are_named() -> None:
    [finding] = audit(resolve_environment("builtin:guess"))
    assert finding.code == "E003"
    assert "--data" in finding.fix


def test_tools_of_the_library_are_sound() -> None:
    [calculator] = resolve_tools(["builtin:calculator"])
    assert [code for code, severity in codes(calculator, [{}]).items() if severity == "error"] == []


def test_the_table_has_what_each_policy_earns() -> None:
    report = examine(Guess, ROWS, oracle=halves)
    earned = {each.policy: each.rewards for each in report.earned}
    assert earned["silence"] == (0.0,) * 4
    assert earned["oracle"] == (1.0,) * 4
    assert report.kind == "text"
    [step] = report.measured
    assert step.name == "step"
    assert step.failed == 0


def test_an_oracle_that_raises_is_a_finding() -> None:
    def broken(row: Any, messages: Any) -> Any:
        raise RuntimeError("no more turns")

    assert "E003" in codes(Guess, oracle=broken)


# ---- the command ----


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # before the folders of other tests, which have a `game` too
    monkeypatch.delitem(sys.modules, "game", raising=False)
    Path("game.py").write_text(
        "from podium import TextEnvironment\n"
        "import os\n\n"
        "class Guess(TextEnvironment):\n"
        "    def reset(self, number=4, **row):\n"
        "        self.number, self.tries = number, 0\n"
        "        return 'Guess my number from 1 to 7.'\n\n"
        "    def step(self, text):\n"
        "        self.tries += 1\n"
        "        right = text.strip() == str(self.number)\n"
        "        return ('no' if not right else None), float(right), right or self.tries >= 3, {}\n\n"
        "class Ends(Guess):\n"
        "    def step(self, text):\n"
        "        os._exit(3)\n\n"
        "def right(row, messages):\n"
        "    return str(row['number'])\n\n"
        "def double(x: int) -> int:\n"
        '    """\n    Double a number.\n\n    Args:\n        x: The number.\n    """\n'
        "    return 2 * x\n"
    )
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": "Play. ", "number": n}) + "\n" for n in (3, 5)))
    return tmp_path


@pytest.mark.slow
def test_the_command_prints_what_is_earned(files: Path) -> None:
    done = CliRunner().invoke(
        app, ["environments", "test", "game.py:Guess", "--data", "rows.jsonl", "--oracle", "game.py:right"]
    )
    assert done.exit_code == 0, done.output
    assert "oracle" in done.output
    assert "Guess: an environment in plain text; 2 rows" in done.output


def test_the_command_gives_json_and_an_exit_code(files: Path) -> None:
    done = CliRunner().invoke(app, ["environments", "test", "game.py:Ends", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.output)
    assert report["errors"] == 1
    assert report["findings"][0]["code"] == "E003"
    assert [each["name"] for each in report["tested"]] == ["game.py:Ends"]


@pytest.mark.slow
def test_an_error_is_overruled_by_its_code(files: Path) -> None:
    Path("lost.py").write_text(
        "from game import Guess\n\nclass Lost(Guess):\n    def step(self, text):\n        return 'no', 1 / 0, 1, {}\n"
    )
    called = ["environments", "test", "lost.py:Lost", "--data", "rows.jsonl"]
    done = CliRunner().invoke(app, called)
    assert done.exit_code == 1, done.output
    assert "--ignore E003" in done.output
    done = CliRunner().invoke(app, [*called, "--ignore", "E003"])
    assert done.exit_code == 0, done.output
    assert "E003" in done.output


@pytest.mark.usefixtures("tested_here")
def test_of_a_sorted_table_rows_of_all_kinds_are_played(files: Path) -> None:
    """A mistake that only later rows show is found."""
    Path("late.py").write_text(
        "from game import Guess\n\nclass Late(Guess):\n"
        "    def reset(self, n, **row):\n        self.n = n\n        return 'begin'\n\n"
        "    def step(self, text):\n        return 'no', 1 / (self.n < 20), True, {}\n"
    )
    Path("sorted.jsonl").write_text("".join(json.dumps({"prompt": "x", "n": n}) + "\n" for n in range(40)))
    done = CliRunner().invoke(app, ["environments", "test", "late.py:Late", "--data", "sorted.jsonl", "--json"])
    report = json.loads(done.output)
    assert [each["num_rows"] for each in report["tested"]] == [6]
    assert "E003" in [each["code"] for each in report["findings"]], report


@pytest.mark.slow
def test_a_recipe_is_tested_on_its_own_rows(files: Path) -> None:
    Path("run.yaml").write_text(
        "model: builtin:smollm2-135m-instruct\ndataset: rows.jsonl\nenvironment: game.py:Guess\n"
        "tools: [game.py:double]\nmax_steps: 5\n"
    )
    done = CliRunner().invoke(app, ["environments", "test", "run.yaml", "--json"])
    assert done.exit_code == 0, done.output
    tested = {each["name"]: each for each in json.loads(done.output)["tested"]}
    assert set(tested) == {"double", "Guess"}
    assert tested["Guess"]["num_rows"] == 2


@pytest.mark.slow
def test_a_function_in_a_file_is_a_tool(files: Path) -> None:
    done = CliRunner().invoke(app, ["environments", "test", "game.py:double"])
    assert done.exit_code == 0, done.output
    assert "double: a tool" in done.output


@pytest.mark.slow
def test_a_name_that_is_not_there_is_one_message(files: Path) -> None:
    done = CliRunner().invoke(app, ["environments", "test", "game.py:Gues"])
    assert done.exit_code == 2
    assert "has no function `Gues`" in done.output
    done = CliRunner().invoke(app, ["environments", "test", "game.py"])
    assert done.exit_code == 2
    assert "`game.py` names no function of the file. It has " in done.output
    assert "fix: game.py:" in done.output

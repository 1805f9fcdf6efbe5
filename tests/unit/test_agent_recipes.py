"""Tools and environments in recipes: read with file and line, checked before weights, shown turn by turn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from podium.agents.environments import reset
from podium.agents.table import resolve_environment
from podium.checks import check_recipe
from podium.cli import app
from podium.data.extract import text_of
from podium.data.tasks import guesses
from podium.errors import ConfigError
from podium.recipe import load
from podium.records import Call, Completion, Turn
from podium.rewards import tool_use
from podium.runs.conversations import passages, tree_passages, written
from podium.runs.environment import source_of

chat, sample = (importlib.import_module(f"podium.cli.{name}") for name in ("chat", "sample"))  # not the verbs

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def bare(a, b):
    return a * b
'''
GAME = """
import podium


class Game(podium.TextEnvironment):
    def reset(self, number, **row):
        self.number = int(number)

    def step(self, text):
        return None, 1.0, True, {}


class Silent:
    def reset(self, **row):
        return None


class Deaf(Game):
    def step(self):
        return None, 1.0, True, {}
"""
RECIPE = (
    "model: builtin:smollm2-135m-instruct\ndataset: builtin:guesses\nmax_steps: 2\nper_device_train_batch_size: 8\n"
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`recipe("tools: [tools.py:multiply]")`: a file with these lines behind the usual ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "game.py").write_text(GAME)

    def write(lines: str, base: str = RECIPE) -> str:
        (tmp_path / "run.yaml").write_text(base + lines + "\n")
        return "run.yaml"

    return write


def test_tools_and_environments_are_resolved_beside_the_recipe(recipe: Any) -> None:
    made = load(recipe("tools: [tools.py:multiply, builtin:calculator]\nenvironment: game.py:Game\nmax_turns: 3"))
    assert [tool.name for tool in made.agents.tools] == ["multiply", "calculator"]
    assert type(made.agents.environment()).__name__ == "Game"  # type: ignore[operator, misc]
    assert made.config["max_turns"] == 3
    assert set(made.agents.arguments()) == {"tools", "environment_factory"}
    assert load("quickstart").agents.arguments() == {}


@pytest.mark.slow
def test_files_beside_the_recipe_are_found_from_the_recipe_of_its_run(tmp_path: Path, monkeypatch: Any) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    mine, run = tmp_path / "mine", tmp_path / "runs" / "first"
    mine.mkdir()
    run.mkdir(parents=True)
    (mine / "tools.py").write_text(TOOLS)
    (mine / "rows.py").write_text("def make(number=2):\n    return [{'prompt': f'{n}'} for n in range(number)]\n")
    (mine / "score.py").write_text("def right(completions):\n    return [1.0 for _ in completions]\n")
    text = "model: builtin:smollm2-135m-instruct\ndataset: rows.py:make?number=3\n"
    (mine / "run.yaml").write_text(
        text + "rewards: [{function: score.py:right}]\ntools: [tools.py:multiply]\nmax_steps: 1\n"
    )
    made = load("mine/run.yaml")
    assert [spec.name for spec in made.rewards] == ["score.py:right"]
    assert made.given["dataset"] == "mine/rows.py:make?number=3"
    (run / "config.yaml").write_text(yaml.safe_dump(made.given))
    again = load("runs/first/config.yaml")
    assert [tool.name for tool in again.agents.tools] == ["multiply"]
    assert len(again.load_rows().train) == 3
    assert [spec.name for spec in again.rewards] == ["mine/score.py:right"]


def test_rows_that_are_not_there_are_looked_for_beside_the_recipe_and_said_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rows.py").write_text("def make():\n    return [{'prompt': 'one', 'answer': '1'}]\n")
    (mine / "run.yaml").write_text(
        "model: builtin:smollm2-135m-instruct\ndataset: row.py:make\nrewards: [json_format]\n"
    )
    found = [each for each in check_recipe("mine/run.yaml") if each.code == "D056"]
    assert len(found) == 1, found
    assert "looked in" in found[0].what
    assert str(mine) in found[0].what
    assert "Similar: rows.py" in found[0].what


def test_a_mixture_has_rows_for_a_test_without_a_model(tmp_path: Path, monkeypatch: Any) -> None:
    from podium.cli.rows import rows_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text("def make(word='a'):\n    return [{'prompt': word}]\n")
    (tmp_path / "run.yaml").write_text(
        "model: builtin:smollm2-135m-instruct\ndataset: [{path: rows.py:make}, {path: 'rows.py:make?word=b'}]\n"
        "rewards: [json_format]\n"
    )
    assert {row["prompt"] for row in rows_of("", load("run.yaml").data)} == {"a", "b"}


@pytest.mark.cases(1)
@pytest.mark.usefixtures("tested_here")
@pytest.mark.parametrize("more", [["--data", "rows.jsonl"], []], ids=str)
def test_each_of_several_environments_is_tested_with_its_own_rows(
    more: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """As in training: the column `environment` chooses, and is not passed on; `--data` gets the recipe's prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(
        "import podium\n"
        "class Game(podium.TextEnvironment):\n"
        "    def reset(self, word, prompt, environment=''):\n"
        "        assert word.startswith(self.first) and prompt == f'say {word}' and not environment\n"
        "        self.word = word\n"
        "    def step(self, text):\n"
        "        return None, float(text == self.word), True, {}\n"
        "class A(Game):\n    first = 'a'\n"
        "class B(Game):\n    first = 'b'\n"
    )
    rows = "".join(json.dumps({"word": f"{x}{i}", "environment": x}) + "\n" for i in range(9) for x in "ab")
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "run.yaml").write_text(
        "model: builtin:smollm2-135m-instruct\ndataset: rows.jsonl\nprompt: 'say {word}'\n"
        "environment: {a: game.py:A, b: game.py:B}\n"
    )
    result = CliRunner().invoke(app, ["environments", "test", "run.yaml", "--json", "--rows", "2", *more])
    assert [each for each in json.loads(result.stdout)["findings"] if each["severity"] == "error"] == []


@pytest.mark.slow
def test_flags_name_them_too(recipe: Any) -> None:
    made = load(recipe("rewards: [tool_use]"), {"tools": "tools.py:multiply", "environment": "builtin:guess"})
    assert [tool.name for tool in made.agents.tools] == ["multiply"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        ("tools: [nowhere.py:f]", "C053", "run.yaml:5: there is no file nowhere.py"),
        ("tools: [tools.py:nothing]", "C053", "no function `nothing`"),
        ("tools: [tools.py:bare]", "C053", "bare"),
        ("tools: [builtin:calculater]", "C053", "builtin:calculater"),
        ("tools: [tools.py:multiply, tools.py:multiply]", "C053", "two tools are called `multiply`"),
        ("tools: [3.5]", "C053", "a tool is a name"),
        ("environment: game.py:Nothing", "C054", "Nothing"),
        ("environment: builtin:gess", "C054", "there is no environment `builtin:gess`"),
        ("environment: builtin:guess?smallest=1", "C054", "no setting `smallest`"),
        ("environment: {a: game.py:Game, b: elsewhere:x}", "C054", "elsewhere:x"),
    ],
)
def test_a_mistake_has_its_place(recipe: Any, lines: str, code: str, said: str) -> None:
    found = [each for each in check_recipe(recipe(lines + "\nrewards: [tool_use]")) if each.severity == "error"]
    assert [each.code for each in found if said in each.what] == [code], found
    assert "run.yaml:5" in found[0].what
    with pytest.raises(ConfigError, match=r"run\.yaml:5"):
        load("run.yaml")


@pytest.mark.slow
def test_an_environment_that_cannot_be_reset_is_found(recipe: Any) -> None:
    found = check_recipe(
        recipe("environment: game.py:Game\ndataset: builtin:products", RECIPE.replace("dataset: builtin:guesses\n", ""))
    )
    [finding] = [each for each in found if each.code == "C054"]
    assert "number" in finding.what
    assert not [each for each in check_recipe(recipe("environment: game.py:Game")) if each.severity == "error"]


@pytest.mark.cases(1)
@pytest.mark.defect("AG5", "rows without a prompt, or with an empty one, in a recipe with an environment")
@pytest.mark.parametrize("prompt", [None, "", "Play."])
@pytest.mark.parametrize("speaks", [True, False])
def test_rows_whose_prompt_reset_writes(recipe: Any, prompt: str | None, speaks: bool) -> None:
    rows = [{"number": 1 + i % 7} for i in range(16)]
    for row in rows[1:] if prompt == "Play." else rows:  # or one row of them without
        row.update({} if prompt is None else {"prompt": [{"role": "user", "content": prompt}]})
    Path("rows.json").write_text(json.dumps(rows))
    Path("mute.py").write_text(
        "from podium import TextEnvironment\nclass Game(TextEnvironment):\n"
        f"    def reset(self, **row):\n        return {'Guess.' if speaks else None!r}\n"
        "    def step(self, text):\n        return None, 0.0, True, {}\n"
    )
    base = RECIPE.replace("builtin:guesses", "rows.json")
    found = [each for each in check_recipe(recipe("environment: mute.py:Game", base)) if each.severity == "error"]
    assert [each.code for each in found] == ([] if speaks else ["C054"])
    if not speaks:
        assert "neither the row nor `reset`" in found[0].what


@pytest.mark.cases(1)
@pytest.mark.parametrize("prompt", [{}, {"prompt": None}], ids=["no column", "null"])
def test_rows_without_a_prompt_have_the_system_message_and_are_held_out(recipe: Any, prompt: dict[str, None]) -> None:
    """By all their columns, since `reset` tells them apart."""
    Path("rows.jsonl").write_text("".join(json.dumps({"number": i, **prompt}) + "\n" for i in range(40)))
    base = RECIPE.replace("builtin:guesses", "rows.jsonl")
    file = recipe("environment: builtin:guess\nsystem: Be brief.\nheld_out: 0.25", base)
    found = check_recipe(file)
    assert [each for each in found if each.severity == "error"] == []
    assert [each.what.endswith("beside what `reset` adds to its prompt") for each in found if each.code == "D040"] == [
        True
    ]
    train, held_out = load(file).load_rows()
    assert (len(train), len(held_out)) == (35, 5)
    system, user = train[0]["prompt"]
    assert (system["content"], user["content"]) == ("Be brief.", "")


@pytest.mark.slow
@pytest.mark.cases(1)
def test_an_environment_is_not_reset_without_the_rows_that_cannot_be_read(recipe: Any) -> None:
    base = RECIPE.replace("builtin:guesses", "rows.jsonl").replace("model:", "prompt: '{digit}'\nmodel:")
    Path("rows.jsonl").write_text(json.dumps({"number": 3}) + "\n")
    found = check_recipe(recipe("environment: game.py:Game", base))
    assert {each.code for each in found if each.severity == "error"} == {"D052"}


@pytest.mark.slow
def test_rows_that_are_all_held_out_have_one_prompt(recipe: Any) -> None:
    """The fix is that of an empty held-out side."""
    base = RECIPE.replace("builtin:guesses", "rows.jsonl")
    Path("rows.jsonl").write_text('{"prompt": "Play.", "number": 3}\n' * 9)
    for share in (0.001, 0.999):
        found = check_recipe(recipe(f"environment: builtin:guess\nchat: true\nheld_out: {share}", base))
        assert ["then all columns count" in each.fix for each in found if each.code == "D022"] == [True]


def test_a_step_that_takes_no_text_is_found(recipe: Any) -> None:
    found = [each for each in check_recipe(recipe("environment: game.py:Deaf")) if each.severity == "error"]
    assert any("`Deaf.step` cannot be called with a turn's text" in each.what for each in found), found


@pytest.mark.slow
def test_an_environment_that_is_not_there_has_no_consequences(recipe: Any) -> None:
    """Rows with equal prompts are told apart by their other columns, as with the right name."""
    base = RECIPE.replace("builtin:guesses", "rows.csv")
    Path("rows.csv").write_text("prompt,number\n" + "Play.,3\nPlay.,5\n" * 8)
    right, wrong = (check_recipe(recipe(f"environment: game.py:{name}", base)) for name in ("Game", "Gane"))
    assert {each.code for each in wrong} - {each.code for each in right} == {"C054"}
    assert "D016" in {each.code for each in check_recipe(recipe("rewards: [exact_match]", base))}


@pytest.mark.slow
def test_something_must_be_rewarded(recipe: Any) -> None:
    found = [each for each in check_recipe(recipe("environment: game.py:Silent")) if each.severity == "error"]
    assert any(each.code == "C031" and "get_reward" in each.what for each in found)
    found = check_recipe(recipe("environment: game.py:Game\naccuracy: Gane"))
    assert any("Gane" in each.what for each in found if each.severity == "error")


def test_rows_are_not_needed_where_steps_are_counted(recipe: Any) -> None:
    base = "model: builtin:smollm2-135m-instruct\nenvironment: game.py:Silent\nrewards: [tool_use]\n"
    assert load(recipe("max_steps: 3", base)).load_rows() == (None, None)
    with pytest.raises(ConfigError, match="no `dataset`"):
        load(recipe("", base))


@pytest.mark.slow
def test_changed_files_have_another_digest(recipe: Any, tmp_path: Path) -> None:
    made = load(recipe("tools: [tools.py:multiply]\nenvironment: game.py:Game"))
    [tool] = made.agents.tools
    before = [source_of(each, "x")["sha256"] for each in (tool.function, made.agents.environment)]
    assert len(set(before)) == 2
    (tmp_path / "tools.py").write_text(TOOLS + "# changed\n")
    (tmp_path / "game.py").write_text(GAME + "# changed\n")
    assert [source_of(each, "x")["sha256"] for each in (tool.function, made.agents.environment)] != before


# ---- the environments and rewards of the recipes ----


def test_the_best_play_wins_every_game_and_blind_play_three() -> None:
    def played(number: int, guess: Any) -> float:
        game = resolve_environment("builtin:guess")()
        reset(game, {"number": number}, named=False)
        said = ""
        for turn in range(3):
            step = game.take_step(guess(turn, said))
            said += (step.observation or " ")[0]
            if step.done:
                break
        return float(game.get_reward())

    search = {"": "4", "l": "2", "h": "6", "ll": "1", "lh": "3", "hl": "5", "hh": "7"}
    numbers = sorted({row["number"] for row in guesses(7)[0]})
    assert [played(n, lambda turn, said: search[said]) for n in numbers] == [pytest.approx(1.0)] * 7
    assert sum(played(n, lambda turn, said: "461"[turn]) > 0.99 for n in numbers) == 3
    assert played(5, lambda turn, said: "5 or 6") == 0


def test_a_chain_pays_for_look_ups_in_order_and_nothing_after_one_too_many() -> None:
    chain = resolve_environment("builtin:chain")()
    chain.reset(codes=["11", "22", "33"])
    with pytest.raises(ValueError, match="no code 33"):
        chain.look_up("33")
    assert (chain.look_up("22"), chain.get_reward()) == ("33 (last)", 0.0)
    assert (chain.look_up("11"), chain.look_up("22"), chain.get_reward()) == ("22", "33 (last)", 1.0)
    assert (chain.look_up("22"), chain.get_reward()) == ("33 (last)", 0.0)
    chain.reset(codes=["11", "22", "33"])
    assert (chain.look_up("11"), chain.get_reward()) == ("22", 0.5), "the next episode begins anew"


def test_a_result_that_nothing_follows_is_no_answer() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{}]}
    episode = [called, {"role": "tool", "name": "f", "content": "9022"}]
    assert (text_of(episode), tool_use([episode])) == ("", [1.0])


# ---- shown ----

HOSTILE = "\x1b[2J9\x1b]0;title\x07022"


def episode() -> Completion:
    asked = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 347, "b": 26}}}
    call = Call(name="multiply", arguments={"a": 347, "b": 26}, content=HOSTILE, failed=False, seconds=0.25)
    replies = ({"role": "tool", "name": "multiply", "content": HOSTILE},)
    first = Turn(
        start=0,
        stop=2,
        message={"role": "assistant", "content": "", "tool_calls": [asked]},
        calls=(call,),
        replies=replies,
    )
    last = Turn(start=5, stop=6, message={"role": "assistant", "content": HOSTILE}, seconds=0.5)
    return Completion(
        token_ids=(1,) * 6, logps=(-1.0, -2.0, -0.5), finish="stop", text="x", policy_step=0, turns=(first, last)
    )


def test_an_episode_is_printed_as_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    turns = json.loads(written(episode()) or "")
    assert [(each.drawn, each.text) for each in passages(turns)] == [
        (True, "multiply(a=347, b=26)"),
        (False, HOSTILE),
        (True, HOSTILE),
    ]
    shown = {"row": 3, "prompt": "347 * 26?", "answer": None}
    numbers = {"rewards": {"r": 1.0}, "reward": 1.0, "advantage": 0.5, "finish": "stop", "tokens": 6}
    completions = [{"text": "x", "turns": turns, **numbers}, {"text": "alone", "turns": [], **numbers}]
    monkeypatch.setattr(sample, "console", Console(width=100))
    sample.print_groups([{**shown, "completions": completions}], ["r"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "  model: 2 tokens, 0 s, log-probability -1.50\n  > multiply(a=347, b=26)\n" in out
    assert (
        "      tool multiply: 0.25 s\n      | 9022\n  model: 1 tokens, 0.5 s, log-probability -0.50\n  > 9022\n" in out
    )
    assert "  > alone" in out


def test_a_tree_of_many_branches_is_laid_out_and_none_is_further_right_than_the_limit() -> None:
    turn = {"start": 0, "stop": 1, "message": {"role": "assistant", "content": "7"}, "replies": []}
    again = {"role": "user", "content": "again"}
    facts = {"answers": 0, "shared": 0, "tokens": 0, "prompt": [again], "turns": [turn], "scored": False}
    made = tree_passages([], [{**facts, "of": i, "messages": i} for i in range(3000)])
    assert len([each for each in made if each.begins]) == 3000 + 2999  # each goes on with its answer
    assert [each.depth for each in made if each.drawn][-1] == 6
    parallel = tree_passages([], [{**facts, "of": 0, "messages": 0}, {**facts, "of": 1, "messages": 1, "prompt": []}])
    assert [(each.depth, each.head.split(":")[0]) for each in parallel] == [
        (0, "branch 1"),
        (0, "user"),
        (1, "branch 1 goes on"),
        (1, "model"),
        (1, "branch 2, from branch 1 before any answer, another answer"),
        (1, "model"),
    ]


def test_chat_runs_the_tools_of_a_run(capsys: Any) -> None:
    from podium.agents.resolve import resolve_tools

    class Scripted(chat.Speaker):  # type: ignore[misc, name-defined]
        def _written(self, turns: Any) -> tuple[list[int], list[int]]:
            return [0], [len(turns)]

    class Format:
        def parse(self, token_ids: Any, **_: Any) -> dict[str, Any]:
            call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "347 * 26"}}}
            return {"role": "assistant", "content": ""} | ({"tool_calls": [call]} if token_ids[0] < 3 else {})

    speaker = Scripted(None, None, max_tokens=8, temperature=0.0)
    speaker.tools, speaker.most_rounds, speaker._chat = [*resolve_tools(["builtin:calculator"])], 8, Format()
    turns: list[dict[str, Any]] = [{"role": "user", "content": "347 * 26?"}]
    speaker.answer(turns)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[2]["content"] == "9022"
    assert "[calculator: 9022]" in capsys.readouterr().out


def test_rows_need_no_prompt_where_an_environment_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text(GAME.replace("number, **row", "word, **row").replace("int(number)", "0"))
    Path("words.jsonl").write_text("".join(json.dumps({"word": each}) + "\n" for each in ("apple", "pear") * 20))
    lines = "model: tiny\ndataset: words.jsonl\nmax_steps: 2\nreport_to: []\n"
    Path("run.yaml").write_text(lines + "environment: game.py:Game\n")
    assert "D001" not in {each.code for each in check_recipe("run.yaml")}
    Path("run.yaml").write_text(lines + "rewards: [answer_match]\n")
    assert "D001" in {each.code for each in check_recipe("run.yaml")}

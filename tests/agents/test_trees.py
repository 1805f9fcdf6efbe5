"""Episodes of a program that forks: trees in `podium sample`, in the run's folder, and in `podium chat --row`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import podium
from podium.cli import app
from podium.testing import save_tiny_model
from tests.e2e.test_agents_verb import ASK

FORKS = """
def run(base_url, api_key, row):
    messages = list(row["prompt"])
    worker = ask(base_url, api_key, [{"role": "system", "content": "You work."}, user("sub-task")])
    messages += [{"role": "assistant", "content": ask(base_url, api_key, messages)}, user("go on")]
    ask(base_url, api_key, messages)
    ask(base_url, api_key, [*messages[:-1], user("or so")])
    last = ask(base_url, api_key, [*messages[:-1], user("go on again")])
    return float(len(last) % 5)
"""


def typed(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"}, input="")
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose program has a worker, and edits its last question twice."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path
    rows = [{"prompt": [{"role": "user", "content": f"Row {i}"}], "level": i} for i in (0, 1)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(ASK + FORKS)
    model = save_tiny_model(folder / "model", max_position_embeddings=4096)
    recipe = {"model": model, "dataset": "rows.jsonl", "agent": "agent.py:run", "max_completion_length": 900}
    recipe |= {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 1, "use_cpu": True}
    recipe |= {"generation_kwargs": {"eos_token_id": [2, *range(10, 60)]}, "seed": 3, "output_dir": "runs/x"}
    (folder / "run.yaml").write_text(json.dumps(recipe))
    return folder


def assert_tree(shown: str) -> None:
    """The worker apart; the question and its answer once, and below them three ways to go on."""
    lines = shown.splitlines()
    heads = [line for line in lines if "branch " in line]
    assert heads[0].startswith("  branch 1: ")
    assert [line.split(":")[0] for line in heads[1:]] == [
        "  branch 2, a conversation of its own",
        "      branch 2 goes on",
        "      branch 3, from branch 2 behind answer 1, user",
        "      branch 4, from branch 2 behind answer 1, user",
    ]
    assert heads[-1].endswith(", scored")
    texts = [line.strip() for line in lines if line.strip().startswith("| ")]
    assert texts[:2] == ["| You work.", "| sub-task"]
    assert texts[3:] == ["| go on", "| or so", "| go on again"]
    assert sum(line.strip().startswith("model: ") for line in lines) == 5


@pytest.mark.parametrize("form", ["text", "json"])
def test_podium_sample_shows_an_episode_as_a_tree(forking: Path, form: str) -> None:
    result = CliRunner().invoke(app, ["sample", "run.yaml", "-n", "1", *["--json"] * (form == "json")])
    assert result.exit_code == 0, result.output
    if form == "json":
        [group] = json.loads(result.stdout)["groups"]
        for each in group["completions"]:
            branches = each["branches"]
            assert [branch["of"] for branch in branches] == [0, 0, 2, 2]
            assert [branch["messages"] for branch in branches] == [0, 0, 2, 2]
            assert [len(branch["turns"]) for branch in branches] == [1, 2, 1, 1]
            assert [branch["scored"] for branch in branches] == [False, False, False, True]
            whole = branches[1]["tokens"] + branches[1]["turns"][0]["stop"]
            assert all(whole <= branch["shared"] < branch["tokens"] for branch in branches[2:])
        return
    shown, _, numbers = result.stdout.partition("\nRewards ")
    assert "groups with spread" in numbers
    _, *episodes = shown.split("\n  agent ")
    assert len(episodes) == 2
    for each in episodes:
        assert_tree(each)


def test_the_page_of_samples_has_the_tree(forking: Path) -> None:
    typed("sample", "run.yaml", "-n", "1", "--html", "page.html")
    page = (forking / "page.html").read_text()
    assert page.count('<div class="branch in0">') == 2 * 2
    assert page.count('<div class="branch in1">') == 2 * 3
    assert page.count("<pre>or so</pre>") == 2


@pytest.mark.slow
def test_a_trained_program_is_reported_as_trees_and_played_again(forking: Path) -> None:
    spoilt = FORKS.replace(
        "    return", "    if row['level'] == 1:\n        print('\\x1b[31mbad')\n        {}['key']\n    return"
    )
    (forking / "agent.py").write_text(ASK + spoilt)
    typed("train", "run.yaml", code=0)
    rollouts = podium.Run.load("runs/x").rollouts
    assert len(rollouts) == 4
    for row in rollouts.to_dict("records"):
        trees = json.loads(row["branches"])
        drawn = [turn["stop"] - turn["start"] for each in trees for turn in each["turns"]]
        assert len(drawn) == 5
        assert row["num_tokens"] == sum(drawn)
        assert row["question"] == "sub-task"  # of the first request
    failed = rollouts[rollouts["row"] == 1]
    assert set(failed["program_failed"]) == {"raised KeyError: 'key'"}
    assert failed["program_log"].str.startswith("\x1b[31mbad").all()
    assert rollouts[rollouts["row"] == 0]["program_log"].isna().all()
    watched = typed("watch", "runs/x", "--once")
    _, best, worst, end = re.split("\n(?:best|worst|failed): row ", watched)
    for each in (best, worst):
        assert each.startswith("0, reward ")
        assert_tree(each)
    assert end.startswith("1, reward none, advantage 0.00, ")
    assert "not trained on" in end.splitlines()[0]
    assert_tree(end.partition("  The program raised KeyError: 'key'\n      | bad\n")[0])
    assert "\x1b" not in watched
    played = typed("chat", "runs/x", "--row", "0", code=0)
    assert "Row 0: sub-task" in played
    assert_tree(played[played.index("  branch 1") :])
    assert "\x1b" not in typed("chat", "runs/x", "--row", "1", code=2)
    assert "podium chat RUN --row 0" in typed("chat", "runs/x", code=0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chat", "model", "--row", "0"], "fix: podium chat model"),
        (["chat", "runs/x", "--row", "9"], "fix: --row 0"),
        (["chat", "runs/x", "--row", "0", "--system", "Be."], "fix: podium chat runs/x --row 0"),
        (["chat", "script", "--row", "3"], "trainer.generate_completions(rows[3:4])"),
    ],
)
def test_rows_that_cannot_be_played_have_a_message_with_what_to_type(
    forking: Path, words: list[str], says: str
) -> None:
    for name in ("runs/x", "script"):
        shutil.copytree("model", name)
        (forking / name / "config.yaml").write_text("seed: 1\n" if name == "script" else Path("run.yaml").read_text())
    assert says in typed(*words, code=2)


def test_a_row_of_an_environment_is_played_too(forking: Path) -> None:
    (forking / "game.py").write_text(
        "import podium\n\n\nclass Guess(podium.TextEnvironment):\n    max_turns = 2\n\n"
        "    def reset(self, **row):\n        pass\n\n"
        "    def step(self, text):\n        return 'no', 0.5, False, {}\n"
    )
    recipe = {**json.loads(Path("run.yaml").read_text()), "environment": "game.py:Guess"}
    shutil.copytree("model", "runs/x")
    (forking / "runs/x/config.yaml").write_text(json.dumps({x: y for x, y in recipe.items() if x != "agent"}))
    played = typed("chat", "runs/x", "--row", "1", "--temperature", "0", "--max-tokens", "300")
    assert played.startswith("Loading the model ...\nRow 1: Row 1\n")  # the first line is on stderr
    assert "  Guess 1.00; ended: stop" in played
    assert played.count("  model: ") == 2
    assert "| no" in played

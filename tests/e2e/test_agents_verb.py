"""`podium agents test` finds planted mistakes of programs, each by its code, and says nothing of a sound one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.agents.programs.program import resolve_program
from podium.cli import app

ASK = """
import json, urllib.request


def ask(base_url, api_key, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""


def user(text):
    return {"role": "user", "content": text}
"""
SOUND = """
def run(base_url, api_key, row, answer):
    return float(ask(base_url, api_key, row["prompt"]).strip() == answer)
"""
ROWS = [
    {"prompt": [{"role": "user", "content": "What is 17 + 25?"}], "answer": "42"},
    {"prompt": [{"role": "user", "content": "What is 30 + 5?"}], "answer": "35"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["agents", "test", *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout


def report_on(program: str, *words: str, code: int = 0) -> dict[str, Any]:
    """The report on a program in a file of its own."""
    file = Path(f"agent_{len(list(Path().glob('agent_*.py')))}.py")  # processes keep what they have imported
    file.write_text(ASK + program)
    return json.loads(typed(f"{file}:run", "--data", "rows.jsonl", "--row", "1", "--json", *words, code=code))


def whats(report: dict[str, Any]) -> dict[str, str]:
    return {each["code"]: each["what"] for each in report["findings"]}


@pytest.mark.slow
def test_scripted_answers_are_whole_whatever_the_program_asks_for() -> None:
    """In bytes they are longer than a model's: 8 tokens are enough for this answer."""
    report = report_on(
        """
def run(base_url, api_key, row, answer):
    reply = ask(base_url, api_key, row["prompt"], max_tokens=8)
    return float(reply.strip().endswith(answer))
"""
        + """
def says(row, messages):
    return "The answer is " + row["answer"]
""",
        "--oracle",
        "agent_0.py:says",
    )
    assert report["findings"] == []
    assert report["played"][0]["replies"] == ["The answer is 35"]
    assert [each["reward"] for each in report["played"]][:2] == [1.0, 0.0]


@pytest.mark.slow
def test_the_words_that_are_paid_without_sense_are_shown() -> None:
    report = report_on(
        """
def run(base_url, api_key, row, answer):
    reply = ask(base_url, api_key, row["prompt"])
    return 1.0 if reply.strip() == answer else 0.7 * bool(reply.strip())
"""
    )
    noise = next(each["replies"][0] for each in report["played"] if each["policy"] == "noise")
    assert noise[:20] in whats(report)["E011"]


@pytest.mark.slow
def test_a_program_that_is_slow_before_it_asks_is_told_that_commands_import_anew() -> None:
    Path("slow.py").write_text("import time\ntime.sleep(60)\n")
    report = json.loads(typed(f"command: {sys.executable} slow.py", "--data", "rows.jsonl", "--json", "--limit", "0.1"))
    [found] = report["findings"]
    assert found["code"] == "E005"
    assert found["what"].endswith(", and made no request by then")
    assert "a command imports modules in every episode" in found["fix"]


@pytest.mark.slow
def test_a_row_without_a_prompt_has_the_one_of_training(folder: Path) -> None:
    rows = [{"question": f"What is {i} + 5?", "answer": str(i + 5)} for i in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    report = report_on(SOUND)
    assert report["findings"] == []
    assert report["played"][0]["reward"] == 1.0


def test_a_sound_program_is_played_by_every_policy_and_has_no_findings() -> None:
    report = report_on(SOUND)
    assert report["findings"] == []
    rewards = {each["policy"]: each["reward"] for each in report["played"]}
    assert rewards.pop("oracle") == 1.0
    assert set(rewards) == {
        *("silence", "noise", "repetition", "refusal", "malformed call", "unknown tool", "long answer")
    }
    assert set(rewards.values()) == {0.0}
    assert all(each["turns"] == 1 and each["ended"] == "returned" for each in report["played"])
    assert len(report["played"][-1]["replies"][0]) == 20_000
    closing = report["closing"]
    assert closing.startswith("0 findings in 8 policies, each twice: oracle, silence,")
    assert "files of its working folder" in closing
    assert "`answer` in the requests" in closing
    assert "is not known" not in closing


def test_a_program_that_asks_for_nothing_is_not_said_to_have_been_tried() -> None:
    report = report_on("def run(row):\n    return 0.5\n", code=1)
    [found] = report["findings"]
    assert found["code"] == "C065"
    assert "none of the 16 episodes of" in found["what"]
    assert "None of its episodes has got an answer: what it does with answers is not known." in report["closing"]
    assert "in the requests" not in report["closing"]


@pytest.mark.slow
def test_what_could_not_be_looked_at_is_not_said_to_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.tester.programs.MOST_FILES", 1)
    ROW = {"prompt": [{"role": "user", "content": "Say 42."}], "answer": "42"}
    Path("rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 2)
    closing = report_on(SOUND)["closing"]
    assert "Looked at: processes that are left. Other" in closing


@pytest.mark.slow
def test_a_client_of_the_module_serves_one_async_episode_after_the_other() -> None:
    """Its connections belong to an event loop, which a process has one of. A task that is left does not go on."""
    program = """
import asyncio
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="x", max_retries=0)
LATE = []


async def run(base_url, api_key, row, answer):
    assert all(each.done() for each in LATE)
    LATE.append(asyncio.create_task(asyncio.sleep(60)))
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    made = await client.chat.completions.create(model="policy", messages=row["prompt"])
    return float(made.choices[0].message.content == answer)
"""
    report = report_on(program)
    assert report["findings"] == []
    assert {each["ended"] for each in report["played"]} == {"returned"}


@pytest.mark.slow
def test_crashes_are_told_with_the_replies_that_cause_them() -> None:
    program = """
def run(base_url, api_key, row, answer):
    return float(int(ask(base_url, api_key, row["prompt"])[:9]) == int(answer))
"""
    report = report_on(program)
    raised = [each["what"] for each in report["findings"] if each["code"] == "E003"]
    assert any("with the replies of silence;" in each for each in raised)
    assert any(each.endswith("with the replies of malformed call, unknown tool") for each in raised)
    assert any("invalid literal" in each and each.endswith("with the replies of refusal") for each in raised)
    assert {each["ended"] for each in report["played"] if each["policy"] in ("oracle", "repetition")} == {"returned"}
    assert {each["severity"] for each in report["findings"]} == {"warning"}
    always = report_on("def run(row):\n    raise KeyError('k')\n", code=1)
    assert "with the replies of every policy (8)" in whats(always)["E003"]
    assert "1 warning." in typed("agent_1.py:run", "--data", "rows.jsonl", "--ignore", "E003")


@pytest.mark.slow
def test_episodes_that_all_fail_are_an_error_also_where_each_says_something_else() -> None:
    program = """
def run(base_url, api_key, row):
    raise ValueError(%s)
"""
    report = report_on(program % "ask(base_url, api_key, row['prompt'])[:9] or object()", code=1)
    found = [each for each in report["findings"] if each["code"] == "E003"]
    assert len(found) > 2
    assert {each["severity"] for each in found} == {"error"}
    assert all(each["fix"].startswith("treat any answer as possible") for each in found)
    [found] = report_on(program % "object()", code=1)["findings"]
    words, output = found["what"].split("; it wrote:\n")
    assert words.endswith("raised ValueError: <object object>, with the replies of every policy (8)")
    assert "raise ValueError(object())" in output
    assert found["fix"] == "correct what it does before its first request is answered"


def test_a_command_that_fails_is_shown_with_what_it_wrote(folder: Path) -> None:
    """Without control characters."""
    (folder / "own.py").write_text("import sys\nprint('\\x1b[31mno such', 'key')\nsys.exit(3)\n")
    report = json.loads(typed(f"command: {sys.executable} own.py", "--data", "rows.jsonl", "--json", code=1))
    what = whats(report)["E003"]
    assert what.endswith(
        "own.py` ended with exit code 3, with the replies of every policy (8); it wrote:\n  no such key"
    )


@pytest.mark.slow
def test_a_last_line_of_a_command_that_is_no_reward_is_shown(folder: Path) -> None:
    variables = "os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']"
    own = f"import os\nprint('score:', len(ask({variables}, [user('hi')])))\n"
    (folder / "own.py").write_text(ASK + own)
    report = json.loads(typed(f"command: {sys.executable} own.py", "--data", "rows.jsonl", "--json"))
    assert "ended with the line 'score: 2' with the replies of oracle" in whats(report)["E003"]
    assert [each["severity"] for each in report["findings"]] == ["note"]


def test_the_python_of_a_command_is_the_one_that_runs_podium(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "python3").write_text("#!/bin/sh\nexit 7\n")
    (folder / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert resolve_program({"command": ["python3", "own.py"]}).command[0] == sys.executable  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_function_finds_the_endpoint_in_its_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what it was to have of the user's: a key for another endpoint."""
    program = """
import os
from openai import OpenAI

def run(row, answer):
    made = OpenAI().chat.completions.create(model="policy", messages=row["prompt"])
    assert os.environ["ANTHROPIC_API_KEY"] %s os.environ["OPENAI_API_KEY"]
    return float(made.choices[0].message.content == answer)
"""
    assert report_on(program % "==")["findings"] == []
    monkeypatch.setenv("ANTHROPIC_API_KEY", "mine")
    Path("own.py").write_text(program % "== 'mine' !=")
    assert json.loads(typed("own.py:run?env=ANTHROPIC_API_KEY", "--data", "rows.jsonl", "--json"))["findings"] == []


@pytest.mark.slow
def test_requests_that_are_refused_are_told_where_the_program_goes_on() -> None:
    program = """
def run(base_url, api_key, row, answer):
    try:
        ask(base_url, api_key, row["prompt"], n=2)
    except Exception:
        return %s
"""
    told = whats(report_on(program % "float(ask(base_url, api_key, row['prompt']) == answer)"))["E003"]
    words = "16 requests in 16 of 16 episodes were answered with an error, and it went on; the first with 400: 'n'"
    assert told == f"{words} can only be 1 here"
    report = report_on(program % "0.0", code=1)
    assert [each["code"] for each in report["findings"]] == ["C065"]
    assert "; it refused 16 requests, the first with 400: 'n' can only be 1 here." in whats(report)["C065"]
    assert report["played"][0]["rejected"] == 1


@pytest.mark.slow
def test_advice_on_what_a_program_pays_has_no_words_of_an_environment() -> None:
    """Where the oracle has not been asked, too."""
    program = """
import pathlib

def run(base_url, api_key, row, answer):
    if not pathlib.Path("asked").exists():
        pathlib.Path("asked").touch()
        return 0.0
    return float(ask(base_url, api_key, row["prompt"]) == "" )
"""
    [fix] = [each["fix"] for each in report_on(program, code=1)["findings"] if each["code"] == "E013"]
    assert fix == "look at what it compares"


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_and_named() -> None:
    program = """
import time

def run(base_url, api_key, row):
    if "sorry" in ask(base_url, api_key, row["prompt"]):
        time.sleep(60)
    return 0.0
"""
    report = report_on(program, "--limit", "1")
    assert whats(report)["E005"].endswith("took more than 1 s by itself with the replies of refusal")
    assert "each twice but for refusal:" in report["closing"]


@pytest.mark.slow
def test_a_program_that_asks_for_ever_gives_up_at_the_limits() -> None:
    program = """
def run(base_url, api_key, row):
    messages = list(row["prompt"])
    while True:
        text = ask(base_url, api_key, messages)
        messages += [{"role": "assistant", "content": text}, user("more")]
"""
    report = report_on(program, "--turns", "3")
    assert report["findings"] == []
    assert {each["ended"] for each in report["played"]} == {"gave up"}
    turns = {each["policy"]: each["turns"] for each in report["played"]}
    assert turns.pop("long answer") == 1
    assert set(turns.values()) == {3}


@pytest.mark.slow
def test_state_between_episodes_is_told_apart_from_chance() -> None:
    kept = """
count = []

def run(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    count.append(1)
    return float(len(count))
"""
    what = whats(report_on(kept, code=1))["E006"]
    assert "keeps state between episodes: with the replies of oracle the reward is 1, and 16 after" in what
    chance = """
import os

def run(base_url, api_key, row):
    ask(base_url, api_key, [*row["prompt"], user(os.urandom(8).hex())])
    return 0.0
"""
    found = whats(report_on(chance))
    assert found["E017"].endswith("the second time: request 1 is another one")
    assert "E006" not in found


@pytest.mark.slow
def test_files_and_processes_that_are_left_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.tester.programs.SETTLE_SECONDS", 0.01)
    program = """
import subprocess

def run(base_url, api_key, row):
    ask(base_url, api_key, row["prompt"])
    open("notes.txt", "a").write("x")
    subprocess.Popen(["sleep", "77"])
    return 0.0
"""
    processes, files = [each["what"] for each in report_on(program)["findings"] if each["code"] == "E009"]
    assert files == "the episodes left 1 file in its working folder: notes.txt"
    assert processes.endswith(" of 16 episodes left processes behind: sleep 77")


@pytest.mark.slow
def test_an_answer_in_a_request_is_shown_where_it_is_no_chance() -> None:
    program = """
def run(base_url, api_key, row, answer):
    messages = [{"role": "system", "content": f"%s"}, *row["prompt"]]
    return float(ask(base_url, api_key, messages).strip() == answer)
"""
    what = whats(report_on(program % "The solution is {answer}."))["E020"]
    assert "'35', with the replies of silence, as the message of system 'The solution is 35.'" in what
    assert "E020" not in whats(report_on(program % "There are 35 rules."))


@pytest.mark.slow
def test_what_is_paid_is_judged_by_the_rules_of_environments() -> None:
    program = """
def run(base_url, api_key, row):
    text = ask(base_url, api_key, row["prompt"])
    return %s
"""
    assert "silence is paid" in whats(report_on(program % "(0.0 if text else 0.8) + float(text == '35')"))["E010"]
    found = report_on(program % "float('I ' in text) - float(text == '35')")
    assert next(each["fix"] for each in found["findings"] if each["code"] == "E013").endswith("its first reply is '35'")


@pytest.mark.slow
def test_commands_recipes_and_oracles(folder: Path) -> None:
    body = "import os, json\nrow = json.load(open(os.environ['PODIUM_ROW']))\n"
    body += "text = ask(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], row['prompt'])\n"
    (folder / "own.py").write_text(ASK + body + "print(float(text == f\"it is {row['answer']}\"))\n")
    (folder / "oracle.py").write_text("def says(row, messages):\n    return f\"it is {row['answer']}\"\n")
    words = ("--data", "rows.jsonl", "--oracle", "oracle.py:says", "--json")
    report = json.loads(typed(f"command: {sys.executable} own.py", *words))
    assert report["findings"] == []
    assert report["played"][0]["replies"] == ["it is 42"]
    assert report["played"][0]["reward"] == 1.0
    (folder / "agent.py").write_text(ASK + SOUND)
    recipe = "model: builtin:smollm2-135m-instruct\ndataset: rows.jsonl\noutput_dir: runs/x\nmax_steps: 1\n"
    (folder / "run.yaml").write_text(recipe + "agent: agent.py:run\n")
    shown = typed("run.yaml")
    assert "0 findings in 8 policies" in shown
    assert "a program; row 0" in shown
    (folder / "run.yaml").write_text(recipe + "rewards: [exact_match]\n")
    typed("run.yaml", code=2)
    typed("agent.py:run", "--data", "rows.jsonl", "--row", "9", code=2)
    typed("agent.py:run", code=2)

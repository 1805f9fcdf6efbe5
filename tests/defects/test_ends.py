"""How runs end: signals, processes that rewards leave behind or end, lost processes, records that are incomplete."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import typer
from tqdm import tqdm
from typer.testing import CliRunner

from podium.cli import app
from podium.cli.launch import LAUNCHER, LOST, MISTAKE, OUTPUT, _explained, as_started
from podium.errors import DataError, LostProcessError, RewardError
from podium.isolation.forked import Ended, forked
from podium.records import Completion, Group, Prompt
from podium.rewards import resolve_rewards
from podium.rewards.score import CallSettings, score
from podium.runs import environment
from podium.runs.doctor import examine
from podium.runs.occupied import occupying
from podium.runs.report.live import PageServer
from podium.trainer import checkpointing
from podium.trainer.checkpointing import losses_named
from podium.trainer.processes import ScoresByProcess, differing_rows

Now = Callable[[str], None]


@pytest.mark.defect("ADend", "the interpreter's end after Ctrl-C takes no search of all objects")
def test_the_end_of_a_command_is_quick(now: Now) -> None:
    """The exit handlers of all others run before objects are left to the operating system."""
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('last', gc.get_freeze_count() > 1000))\n"
        "sys.argv = ['podium', 'version']\n"
        "from podium.cli import main\n"
        "atexit.register(lambda: print('first', gc.get_freeze_count() > 1000))\n"
        "try:\n    main()\n"
        "finally:\n    atexit.register(lambda: print('after', gc.get_freeze_count() > 1000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    now(" ".join(done.stdout.split()))
    assert done.stdout.splitlines()[1:] == ["after False", "first True", "last True"]


@pytest.mark.defect("ADend", "a closed terminal: what is printed afterwards raises nothing")
def test_output_to_a_closed_terminal_is_dropped() -> None:
    from podium.isolation.machine import drop_if_gone

    ours, theirs = pty.openpty()
    os.close(ours)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"step 5")
    drop_if_gone(theirs)
    assert os.write(theirs, b"step 5") == 6
    os.close(theirs)


@pytest.mark.defect("ADend", "a scheduler signals all processes, and the launcher passes the signal on")
def test_a_signal_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    stop = checkpointing.EndsOnSignal()
    with stop.listening(said.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(said) == 1
        monkeypatch.setattr(checkpointing, "SAME_SIGNAL_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_ctrl_c_ends_at_once() -> None:
    said: list[str] = []
    stop = checkpointing.EndsOnSignal()
    with stop.listening(said.append):
        os.kill(os.getpid(), signal.SIGINT)
        assert said == [
            "SIGINT: a checkpoint is saved after this step, then the run ends. A second one ends it at once."
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_after_the_grace_a_run_ends_without_a_checkpoint() -> None:
    said: list[str] = []
    stop = checkpointing.EndsOnSignal(grace=0.1)
    with stop.listening(said.append):
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
    assert said[1] == "--grace 0.1 is over: the run ends without a checkpoint of this step."
    assert stop.agreed == 0


def test_a_run_that_ends_within_the_grace_is_left_alone() -> None:
    with checkpointing.EndsOnSignal(grace=0.2).listening(lambda text: None):
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.4)


# ---- rewards that end, replace or copy a process ----


def groups(texts: list[str]) -> list[Group]:
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
    )
    return [Group(prompt=Prompt(id=0, row=0, token_ids=(1,), text="", content="2+2="), completions=completions)]


def leaves(completions):
    os._exit(0)


def is_replaced(completions):
    os.execlp("true", "true")


async def leaves_later(completions):
    os._exit(0)


def ends_its_child(completions):
    child = os.fork()
    if child == 0:
        os._exit(7)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


@pytest.mark.cases(3)
@pytest.mark.parametrize("limit", [None, 5.0], ids=["no-limit", "limit"])
@pytest.mark.parametrize(
    ("reward", "said"),
    [
        pytest.param(
            leaves, "os._exit", marks=pytest.mark.defect("ADleave", "os._exit(0) in a reward of this process")
        ),
        pytest.param(is_replaced, "os.execv", marks=pytest.mark.defect("ADleave", "os.execlp")),
        pytest.param(leaves_later, "os._exit", marks=pytest.mark.defect("ADleave", "os._exit in an async reward")),
    ],
)
def test_a_reward_cannot_end_the_run_without_a_word(reward: Any, said: str, limit: float | None, now: Now) -> None:
    def work(send: Callable[[Any], None]) -> None:
        with pytest.raises(RewardError) as error:
            score(groups(["4"]), resolve_rewards([reward]), settings=CallSettings(limit=limit))
        send(str(error.value))

    [message] = forked(work, seconds=60)  # or a failure would end the tests with exit code 0
    now(message)
    assert f"raised SystemExit: {said}" in message
    assert f"`{reward.__name__}`" in message


@pytest.mark.defect("ADleave", "a forked child may end by os._exit")
def test_a_child_of_a_reward_may_end() -> None:
    [scored] = score(groups(["4", "5"]), resolve_rewards([ends_its_child]))
    assert scored.rewards_GK[:, 0].tolist() == [7.0, 7.0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("limit", [None, 5.0], ids=["no-limit", "limit"])
@pytest.mark.defect("ADleave", "os.fork, and the child returns")
def test_a_copy_of_the_run_is_ended(limit: float | None, capfd: pytest.CaptureFixture[str], now: Now) -> None:
    children = []

    def forks(completions):
        child = os.fork()
        if child:
            children.append(child)
        return [1.0] * len(completions)

    score(groups(["4"]), resolve_rewards([forks]), settings=CallSettings(limit=limit))
    ended = os.waitpid(children[0], 0)[1]
    said = capfd.readouterr().err
    now(said)
    assert ended == 0
    assert "forked this process; the copy, which went on with the run, is ended" in said


@pytest.mark.defect("ADleave", "an alarm that is left set")
def test_an_alarm_is_put_back(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    def alarmed(completions):
        signal.alarm(100)
        return [1.0] * len(completions)

    score(groups(["4"]), resolve_rewards([alarmed]))
    now(caplog.messages[-1])
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert "changed the alarm clock" in caplog.text


LEAVES_BEHIND = """
import os, subprocess, time

def forks(completions):
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        open("child", "w").write(str(os.getpid()))
        os.write(done, b".")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    return [1.0] * len(completions)

def serves(completions):
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("child", "w").write(str(server.pid))
    return [1.0] * len(completions)

def serves_and_ends(completions):
    serves(completions)
    os._exit(3)
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("forks", marks=pytest.mark.defect("ADleave", "a file reward forks with setsid")),
        pytest.param("serves", marks=pytest.mark.defect("ADleave", "a file reward starts a server")),
        pytest.param("serves_and_ends", marks=pytest.mark.defect("ADleave", "its worker has ended before")),
    ],
)
def test_what_a_file_reward_starts_ends_with_its_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, now: Now
) -> None:
    from podium.rewards.from_file import file_reward

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(LEAVES_BEHIND)
    reward = file_reward(f"mine.py:{name}")
    result = reward.ask({"completions": ["a"]}, num_completions=1, limit=30.0)
    assert bool(result.failures) == (name == "serves_and_ends")
    with caplog.at_level(logging.WARNING):
        for worker in reward._workers().workers:
            worker.kill()
    now(caplog.messages[-1])
    assert "1 process that a worker process left behind, ended now: " in caplog.text
    deadline = time.monotonic() + 10
    while not is_gone(int(Path("child").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.defect("ADleave", "what stays in the worker's own group is no news")
def test_a_plain_child_of_a_worker_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from podium.rewards.from_file import file_reward

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(LEAVES_BEHIND.replace(", start_new_session=True", ""))
    reward = file_reward("mine.py:serves")
    assert reward.ask({"completions": ["a"]}, num_completions=1, limit=30.0).values == (1.0,)
    for worker in reward._workers().workers:
        worker.kill()
    assert not caplog.messages


# ---- podium doctor ----


@pytest.mark.defect("ADdoctor", "the proof stopped a run that records nothing")
def test_doctor_reads_what_the_proof_stopped(tmp_path: Path, now: Now) -> None:
    check = {"code": "P007", "name": "gradient", "detail": "differs by 0.1", "fix": "none known", "result": "FAILED"}
    passed = {**check, "code": "P004", "result": "ok"}
    (tmp_path / "proof.json").write_text(json.dumps({"passed": False, "checks": [check, passed]}))
    [issue] = examine(tmp_path).issues
    now(issue.finding.what)
    assert (issue.finding.code, issue.finding.severity) == ("P007", "error")
    assert "differs by 0.1" in CliRunner().invoke(app, ["doctor", str(tmp_path)]).output


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        pytest.param("config.yaml", b"a: [1", "cannot be read", marks=pytest.mark.defect("ADdoctor", "no YAML")),
        pytest.param("config.yaml", b"\xff\xfe", "cannot be read", marks=pytest.mark.defect("ADdoctor", "no UTF-8")),
        pytest.param("metrics.jsonl", b'{"step": 1}\n[]\n', "no step", marks=pytest.mark.defect("ADdoctor", "metrics")),
        pytest.param("proof.json", b'{"checks": 3}', "no step", marks=pytest.mark.defect("ADdoctor", "proof.json")),
        pytest.param("proof.json", b'{"checks": [3]}', "no step", marks=pytest.mark.defect("ADdoctor", "its checks")),
    ],
)
def test_damaged_records_are_one_message(file: str, text: bytes, said: str, tmp_path: Path, now: Now) -> None:
    (tmp_path / file).write_bytes(text)
    with pytest.raises(DataError) as error:
        examine(tmp_path)
    now(str(error.value))
    assert said in str(error.value)


@pytest.mark.defect("ADdoctor", "findings of another shape")
def test_findings_of_another_shape_are_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = ['{"code": "M1"}', '{"severity": "\\ud800", "code": 3, "what": null, "changes": [1]}', "[]"]
    (tmp_path / "findings.jsonl").write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    assert [issue.finding.code for issue in examine(tmp_path).issues] == ["M1", "3"]


@pytest.mark.defect("ADleave", "a run that was killed: doctor says so")
def test_doctor_says_that_a_run_was_killed(tmp_path: Path, now: Now) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "values": {"reward": 0.5}}\n')
    assert "without a word" not in CliRunner().invoke(app, ["doctor", str(tmp_path)]).output
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / ".running").write_text(json.dumps({"host": "x", "pid": gone.pid, "began": 0.0}))
    (tmp_path / "checkpoint-1").mkdir()
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)]).output
    now(said)
    assert f"It ended without a word of its own: process {gone.pid} was killed" in said
    assert f"To go on from {tmp_path / 'checkpoint-1'}: " in said
    with occupying(tmp_path):
        assert "without a word" not in CliRunner().invoke(app, ["doctor", str(tmp_path)]).output


@pytest.mark.defect("LSdoctor", "a record of numbers alone")
def test_doctor_says_which_detectors_could_look(tmp_path: Path, now: Now) -> None:
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}]}))
    done = CliRunner().invoke(app, ["doctor", str(log)])
    now(done.output.strip())
    assert [each.values["reward"] for each in examine(log).history] == [0.25, 0.5]
    assert "The detectors that read numbers alone found nothing" in done.output


# ---- podium watch ----


@pytest.mark.defect("ADwatch", "readers who leave print no traceback, faults do")
def test_readers_who_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with PageServer([tmp_path]) as server:
        for error in (BrokenPipeError(32, "Broken pipe"), ConnectionResetError(), TimeoutError()):
            try:
                raise error
            except OSError:
                server.handle_error(None, ("127.0.0.1", 1))
        assert capsys.readouterr().err == ""
        try:
            raise KeyError("x")
        except KeyError:
            server.handle_error(None, ("127.0.0.1", 1))
        assert "KeyError" in capsys.readouterr().err


# ---- several processes ----


@pytest.mark.parametrize(
    ("error", "said", "is_silent"),
    [
        pytest.param(
            RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"),
            "has ended, or cannot be reached: [../gloo/transport",
            False,
            marks=pytest.mark.defect("LSlost", "a dead node under torchrun"),
        ),
        pytest.param(
            RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation"),
            "did not answer for 20 s: it was stopped, or hangs",
            True,
            marks=pytest.mark.defect("LSlost", "a process that was stopped (SIGSTOP)"),
        ),
    ],
)
def test_a_lost_process_is_one_message_with_the_way_on(
    error: Exception, said: str, is_silent: bool, tmp_path: Path, now: Now
) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(LostProcessError) as raised, losses_named(tmp_path):
        raise error
    now(str(raised.value))
    assert said in raised.value.what
    assert f"to go on from {tmp_path / 'checkpoint-4'}: the same with resume_from_checkpoint: true" in raised.value.fix
    assert raised.value.is_silent == is_silent
    assert raised.value.__suppress_context__, "no page of traceback above it"


@pytest.mark.defect("LSlost", "other errors stay what they are")
def test_other_errors_are_not_renamed(tmp_path: Path) -> None:
    for error in (RuntimeError("CUDA error"), RewardError("gloo"), ValueError("closed by peer")):
        with pytest.raises(type(error)) as raised, losses_named(tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.defect("LSlost", "the launcher's SIGKILL of a process that hung is no lack of memory")
def test_a_process_that_hung_is_not_out_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, now: Now
) -> None:
    report = "[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 124 (pid: 11)\n"
    report += "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n"
    (tmp_path / LAUNCHER).write_text(report)
    monkeypatch.setattr("podium.cli.launch._keep", lambda folder, words: None)
    (tmp_path / "0.code").write_text("1")
    assert _explained(tmp_path, 1, []) == 137
    assert "out" in capsys.readouterr().err
    (tmp_path / "0.code").write_text("124")
    assert _explained(tmp_path, 1, []) == 124
    said = capsys.readouterr().err
    now(said)
    assert "Process 1 did not answer (stopped, or it hangs)" in said
    assert "memory" not in said


@pytest.mark.defect("LSlost", "without podium's launcher the message is printed, and the exit code kept")
def test_a_run_under_torchrun_says_it_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OUTPUT, raising=False)
    with pytest.raises(typer.Exit) as ended, as_started():
        raise LostProcessError("Another process has ended.", fix="to go on from x")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: Another process has ended.\n  fix: to go on from x\n"


def ended(folder: Path, codes: dict[int, int], log: str = "") -> Path:
    """The folder of a run whose processes noted these codes."""
    for rank, code in codes.items():
        (folder / f"{rank}.code").write_text(str(code))
        (folder / f"{rank}.txt").write_text(f"the log of process {rank}\n")
    (folder / LAUNCHER).write_text(log)
    return folder


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({0: LOST, 1: MISTAKE}, 2, "error: In process 1: reward function `f` raised\n"),
        ({0: 143, 1: MISTAKE}, 2, "error: In process 1: reward function `f` raised\n"),
        ({0: MISTAKE, 1: MISTAKE}, 2, ""),
        ({0: LOST, 1: 1}, 1, "Process 1 wrote last:\nthe log of process 1\n"),
        ({0: 1, 1: LOST}, 1, ""),
        ({0: LOST, 1: LOST}, 1, "Process 0 wrote last:\nthe log of process 0\n"),
        ({0: LOST}, 139, "error: Process 1 was ended by SIGSEGV, and the run with it.\n"),
    ],
    ids=["mistake", "mistake, ended by the launcher", "both", "traceback", "of the first", "lost", "killed"],
)
def test_the_process_that_failed_first_speaks(
    codes: dict[int, int],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = "[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -11 (pid: 12)\n" if len(codes) == 1 else ""
    folder = ended(tmp_path, codes, log)
    (folder / "1.error").write_text("reward function `f` raised")
    monkeypatch.setattr("podium.cli.launch._keep", lambda folder, words: None)
    assert _explained(folder, 1, []) == code
    assert capsys.readouterr().err == said


def test_a_mistake_and_an_end_of_all_are_left_for_the_launching_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that all processes agree on is no failure to torch's launcher, which kills the others at a failure."""
    monkeypatch.setenv(OUTPUT, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("podium.cli.launch._write_to", lambda folder, rank: None)
    with pytest.raises(RewardError), as_started():
        raise RewardError("`f` raised", fix="correct line 4")
    assert (tmp_path / "1.code").read_text() == "2"
    assert (tmp_path / "1.error").read_text() == "`f` raised\n  fix: correct line 4"
    for error, code in ((typer.Exit(143), "143"), (typer.Exit(3), "3"), (KeyboardInterrupt(), "130")):
        (tmp_path / "1.code").unlink()
        with pytest.raises(typer.Exit) as exit_, as_started():
            raise error
        assert exit_.value.exit_code == 0
        assert (tmp_path / "1.code").read_text() == code


def test_none_on_another_process_is_said_once() -> None:
    scores = ScoresByProcess(1, 2)
    round_PGK = np.array([[[1.0], [np.nan]], [[np.nan], [np.nan]]])
    [finding] = scores.findings(round_PGK, ["judge"], [0, 1])
    assert "None for 3 of 4 completions of a round, which are not trained on" in finding.what
    assert "process 0: 1 of 2, process 1: 2 of 2" in finding.what
    assert not [*scores.findings(round_PGK, ["judge"], [0, 1])]
    own = np.array([[[np.nan], [np.nan]], [[1.0], [0.0]]])
    assert not [*ScoresByProcess(1, 2).findings(own, ["judge"], [0, 1])], "the first process says it itself"


def test_none_of_one_function_on_one_process_is_told_from_chance() -> None:
    scores, missing = ScoresByProcess(2, 2), np.array([[[1.0, 1.0]], [[1.0, np.nan]]])
    found = [[*scores.findings(missing, ["length", "judge"], [0, 1])] for _ in range(9)]
    assert [bool(each) for each in found] == [False] * 5 + [True] + [False] * 3
    assert found[5][0].what.startswith("`judge` returned None for all 6 completions of process 1")
    routed = ScoresByProcess(2, 2)  # each function judges its own rows, which fall where they may
    for ranks in ([0, 1], [1, 0]) * 9:
        assert not [*routed.findings(np.array([[[1.0, np.nan]], [[np.nan, 1.0]]]), ["a", "b"], ranks)]


def test_an_interrupt_that_a_destructor_drops_comes_again() -> None:
    program = """
import os, signal, sys, time
from podium.cli import _interrupt_again
sys.unraisablehook = _interrupt_again
class Closes:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
try:
    Closes()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted\n", done.stderr


def test_a_log_with_odd_values_is_read(tmp_path: Path) -> None:
    lines: list[object] = [{"step": step, "reward": 0.5, "loss": 0.1} for step in range(1, 12)]
    for odd in (None, 5, "x", [1], {"step": 3, "loss": 10**400}, {"step": float("inf"), "loss": 1.0}):
        log = tmp_path / "trainer_state.json"
        log.write_text(json.dumps({"log_history": [*lines, odd]}))
        assert examine(str(log)) is not None
    log.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"trainer_state\.json"):
        examine(str(log))


class Seen:
    def __str__(self) -> str:
        return object.__repr__(self)


@pytest.mark.defect("LSrows", "rows that differ between processes")
def test_rows_are_compared_by_what_they_hold(now: Now) -> None:
    rows = [{"prompt": "1+1=", "seen": Seen()} for _ in range(2)]
    digests = [environment.describe_environment([], [row])["data"]["sha256"] for row in rows]
    assert differing_rows(digests) is None, "an object's place in memory is not its contents"
    other = environment.describe_environment([], [{"prompt": "1+2=", "seen": Seen()}])["data"]["sha256"]
    finding = differing_rows([*digests, other])
    assert finding is not None
    now(finding.what)
    assert "process 2 has other training rows than process 0" in finding.what
    assert differing_rows([None, None]) is None, "streams have no digest"


@pytest.mark.defect("LSrows", "stopped before the first step, and overruled by the line it prints")
def test_differing_rows_stop_a_run(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: Now
) -> None:
    trainer = make_trainer()
    trainer.health.compare_rows()
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    monkeypatch.setattr("podium.trainer.health.gather_object", lambda each: [*each, "another"])
    with pytest.raises(DataError) as error:
        trainer.health.compare_rows()
    now(str(error.value))
    assert "on_finding: {D061: ignore}" in str(error.value)
    trainer.args.on_finding = {"D061": "ignore"}
    trainer.health.compare_rows()


def test_a_child_that_is_killed_with_tqdms_lock_does_not_stop_the_run() -> None:
    """tqdm's lock is shared with forks: the run's next note waited for ever."""
    tqdm.write("", file=io.StringIO())  # makes the lock

    def hangs(send: Any) -> None:
        tqdm.get_lock().acquire()
        send("held")
        time.sleep(60)

    messages = forked(hangs, seconds=2.0)
    assert next(messages) == "held"
    with pytest.raises(Ended):
        next(messages)
    written = threading.Thread(target=tqdm.write, args=("",), kwargs={"file": io.StringIO()}, daemon=True)
    written.start()
    written.join(5)
    assert not written.is_alive()

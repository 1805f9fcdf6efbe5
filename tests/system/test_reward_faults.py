"""Whatever a reward function does, its call ends in values or in one clear message; in a worker, within its limit."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from podium.errors import ConfigError, PodiumError, RewardError
from podium.isolation import workers
from podium.records import Completion, Group, Prompt
from podium.rewards import call, check_rewards, resolve_rewards, resolve_weights, score
from podium.rewards.from_file import file_reward
from podium.rewards.score import CallSettings
from podium.runs.environment import reward_source

FILE = Path(__file__).with_name("faulty_rewards.py")
LIMIT = 0.6


def group(row: int, *texts: str) -> Group:
    completions = tuple(
        Completion(token_ids=(row, g), logps=(0.0, 0.0), finish="stop", text=text, policy_step=0)
        for g, text in enumerate(texts)
    )
    columns = {"answer": f"{row}", "level": row}
    prompt = Prompt(id=row, row=row, token_ids=(1,), text=f"q{row}", content=f"q{row}", columns=columns)
    return Group(prompt=prompt, completions=completions)


GROUPS = [group(10, "a", "bb"), group(11, "ccc", "d")]
AT_CCC = r"\n  at row 11, completion 1 of 2: 'ccc'"
OVER = rf"ran over its limit of {LIMIT:g} s"


@functools.cache
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faulty_rewards", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def reward_of(place: str, name: str) -> Any:
    """The function, called in a worker or in this process."""
    return file_reward(f"{FILE}:{name}") if place == "file" else getattr(module(), name)


def scores(reward: Any, **settings: Any) -> list[float | None]:
    """Of all four completions. The worker is there before the clock starts."""
    rewards = resolve_rewards([reward])
    started = time.monotonic()
    try:
        scored = score(GROUPS, rewards, settings=CallSettings(**{"limit": LIMIT, **settings}))
    finally:
        seconds = time.monotonic() - started
        assert seconds < LIMIT + 1 + os.getloadavg()[0], f"{seconds:.2f} s"
    return [None if value != value else value for each in scored for value in each.rewards_GK[:, 0].tolist()]


LENGTHS = [1.0, 2.0, 3.0, 1.0]
COUNT = [0.0, 1.0, 2.0, 3.0]

FAULTS: dict[str, str | list[float | None]] = {
    # R13, raises
    "raises_at_once": "raised ValueError: wrong" + AT_CCC,
    "raises_exit": "raised SystemExit: 0" + AT_CCC,
    "raises_interrupt": "raised Interrupt: not by the user" + AT_CCC,
    "raises_bare": "raised Bare: odd" + AT_CCC,
    "raises_unspeakable": r"raised Unspeakable: \(its text cannot be made\)" + AT_CCC,
    "raises_group": "raised ExceptionGroup: several" + rf".*{AT_CCC}",
    "raises_stop": "raised StopIteration" + AT_CCC,
    "raises_timeout": "raised TimeoutError: the judge's own" + AT_CCC,
    "raises_in_a_thread": LENGTHS,
    "recursion": r"raised RecursionError: .*" + AT_CCC,
    "memory": "raised MemoryError" + AT_CCC,
    "chained": "raised KeyError: 'missing'" + AT_CCC,
    # R14, returns
    "nothing": "returned 0 values for 4 completions. The first without one is row 10, completion 1 of 2: 'a'",
    "one_less": "returned 3 values for 4 completions. The first without one is row 11, completion 2 of 2: 'd'",
    "one_more": "returned 5 values for 4 completions",
    "scalar": "returned float 0.5; expected a list of 4 numbers",
    "none": "returned None; .*without `return`",
    "generator": [1.0, 2.0, 3.0, 4.0],
    "generator_function": LENGTHS,
    "generator_that_raises": r"raised ZeroDivisionError: division by zero" + AT_CCC,
    "mapped": LENGTHS,
    "queue": COUNT,
    "series": COUNT,
    "mapping": "returned dict",
    "unordered": "returned set",
    "text": "returned str '1234'",
    "truth": "returned bool True",
    "truths": [1.0, 0.0, 1.0, 0.0],
    "vector": COUNT,
    "matrix": r"returned a ndarray of shape \(4, 1\)",
    "not_a_number": "returned NaN as value 2" + AT_CCC,
    "infinite": "returned inf as value 2" + AT_CCC,
    "minus_infinite": "returned -inf as value 2" + AT_CCC,
    "huge": [0.0, 1.0, 1e38, 3.0],
    "huge_int": "returned inf as value 2" + AT_CCC,
    "mixed": [0.0, None, 2.0, None],
    "all_none": [None] * 4,
    "string_value": "returned str '1.0' as value 2" + AT_CCC,
    "nested": r"returned list \[2\] as value 2" + AT_CCC,
    "odd_value": "returned Number without a repr as value 2" + AT_CCC,
    "forgotten_await": "returned a coroutine that was not awaited",
    # R16, async
    "async_good": LENGTHS,
    "async_raises": "raised ValueError: wrong" + AT_CCC,
    "async_leaks": LENGTHS,
    "async_exits": "raised SystemExit: 1",
    "own_loop": LENGTHS,
    # 2.2
    "changes_its_inputs": [1.0, 2.0, 3.0, 4.0],
    "takes_messages": "raised TypeError.*the prompts are plain, so each completion is a string",
    "logs_too_few": r"raised ValueError: log_extra\('note', ...\) got 1 values for 4 completions",
}
"""What becomes of each, in a worker and in this process alike."""

DEADLY: dict[str, str] = {
    "leaves": r"ended its worker process \(exit code 0\)" + AT_CCC,
    "leaves_with_three": r"ended its worker process \(exit code 3\)" + AT_CCC,
    "segfault": "ended its worker process with SIGSEGV" + AT_CCC + ".*faulty_rewards.py",
    "aborts": "ended its worker process with SIGABRT" + AT_CCC,
    "kills_itself": r"ended its worker process with SIGKILL \(out of memory, or killed from outside\?\)" + AT_CCC,
    "closes_everything": "(ended|closed the connection of) its worker process",
    "writes_into_the_connection": "(ended|closed the connection of) its worker process",
    "pipe_holder": r"ended its worker process \(exit code 0\)" + AT_CCC,
    "c_loop_without_signals": OVER + AT_CCC + ".*faulty_rewards.py",
    "never_lets_go": OVER + AT_CCC + ".* in stubborn",
    # R15, hangs
    "sleeps": OVER + AT_CCC + ".*faulty_rewards.py",
    "busy": OVER + AT_CCC + ".* in spin",
    "c_loop": OVER + AT_CCC + ".*faulty_rewards.py",
    "regex": OVER + AT_CCC + ".*faulty_rewards.py",
    "locks": OVER + AT_CCC + ".* in deadlock",
    "waits_for_a_socket": OVER + AT_CCC + ".* in blocked_socket",
    "made_up": OVER + ".* in made_up",
    "async_hangs": OVER + r"\n  at row 10, completion 1 of 2: 'a'",
    "async_blocks": OVER + ".* in async_blocks",
    "async_never_lets_go": OVER,
}
"""What would take a process with it, or is waited for there: only in a worker."""

TORCH = {
    "tensor": COUNT,
    "tensor_with_gradient": COUNT,
    "tensor_in_two_dimensions": r"returned a Tensor of shape \(2, 2\)",
}

CASES = [
    *(("file", name, expected) for name, expected in {**FAULTS, **DEADLY}.items()),
    *(("process", name, expected) for name, expected in {**FAULTS, **TORCH}.items()),
]


@pytest.mark.cases(11)
@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("place", "name", "expected"), CASES, ids=[f"{place}-{name}" for place, name, _ in CASES])
def test_every_fault_ends_in_values_or_one_message(place: str, name: str, expected: Any) -> None:
    reward = reward_of(place, name)
    if isinstance(expected, list):
        assert scores(reward) == expected
        return
    with pytest.raises(RewardError) as caught:
        scores(reward)
    message = str(caught.value)
    assert re.match(r"reward function `\w+` \(\S*faulty_rewards.py:\d+\) ", message), message
    assert re.search(expected, message, re.DOTALL), message
    assert "call.py" not in message
    assert "calls.py" not in message
    assert "child.py" not in message
    assert scores(reward_of(place, "good")) == LENGTHS, "the next call is none the worse"


@pytest.mark.parametrize("place", ["file", "process"])
def test_an_exception_object_that_is_raised_again_has_the_frames_of_now(place: str) -> None:
    reward = reward_of(place, "raises_one_object")
    messages = []
    for _ in range(2):
        with pytest.raises(RewardError, match="made once") as caught:
            scores(reward)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].count("in raises_one_object") == 1


# ---- what is raised on a later call, in a thread, by the user ----


@pytest.mark.parametrize("place", ["file", "process"])
def test_raises_on_a_later_call(place: str) -> None:
    reward = reward_of(place, "raises_on_third_call")
    assert scores(reward) == scores(reward) == LENGTHS
    with pytest.raises(RewardError, match="judge is down\n  while scoring 4 completions, the first of them row 10"):
        scores(reward)


@pytest.mark.parametrize("name", ["raises_exit", "good"])
def test_called_from_another_thread(name: str) -> None:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(scores(getattr(module(), name)))
        except RewardError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT + 2)
    [result] = found
    assert result == LENGTHS if name == "good" else "SystemExit" in result


def test_the_users_interrupt_is_let_through_at_once() -> None:
    for place in ("file", "process"):
        rewards = resolve_rewards([reward_of(place, "sleeps")])
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            score(GROUPS, rewards, settings=CallSettings(limit=20))
        assert time.monotonic() - started < 10
    assert scores(reward_of("file", "good")) == LENGTHS


def test_without_a_limit_nothing_is_interrupted() -> None:
    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.1)
        return [0.0] * 4

    for reward in (slow, file_reward(f"{FILE}:rows")):
        score(GROUPS, resolve_rewards([reward]), settings=CallSettings(limit=None))


# ---- files that cannot be used ----

BROKEN = {
    "syntax": ("def f(:\n", r"broken.py:1: "),
    "raises": ("x = 1\ny = x / 0\n", r"importing broken.py failed at .*broken.py:2: ZeroDivisionError"),
    "exits": ("raise SystemExit(2)\n", r"importing broken.py failed at .*broken.py:1: SystemExit: 2"),
    "dies": ("import os\nos._exit(7)\n", r"importing broken.py ended its worker process \(exit code 7\)"),
    "crashes": (
        "import ctypes\nctypes.string_at(0)\n",
        r"importing broken.py ended its worker process with SIGSEGV.*broken.py",
    ),
    "hangs": ("import time\ntime.sleep(60)\n", r"importing broken.py took more than 1 s.*Åre 用户/broken.py\", line 2"),
    "missing_module": ("import nothing_of_that_name\n", "ModuleNotFoundError"),
    "no_function": ("def g(completions): return []\n", "has no function `f`. It has g"),
    "no_callable": ("f = 3\n", "`f` in broken.py is int; a reward is a function"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_used_is_one_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, expected = BROKEN[name]
    folder = tmp_path / "a folder in Åre 用户"
    folder.mkdir()
    (folder / "broken.py").write_text(source)
    monkeypatch.setattr(workers, "LOAD_SECONDS", 1.0 if name == "hangs" else 20.0)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        file_reward("broken.py:f", folder=folder)
    assert re.search(expected, str(caught.value), re.DOTALL), str(caught.value)
    assert time.monotonic() - started < workers.LOAD_SECONDS + 10


def test_a_file_that_is_not_there_has_near_names(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    with pytest.raises(ConfigError, match=r"there is no file reward.py .*Similar: rewards.py"):
        file_reward("reward.py:f", folder=tmp_path)


def test_missing_columns_and_weights_are_said_before_the_run() -> None:
    rewards = resolve_rewards([reward_of("file", "needs_a_column"), reward_of("file", "good")])
    with pytest.raises(RewardError, match=r"`needs_a_column` \(.*faulty_rewards.py:\d+\) needs `solution`.*answer"):
        check_rewards(rewards, ["prompt", "answer"])
    with pytest.raises(PodiumError, match=r"weights \(1\) must match number of reward functions \(2\)"):
        resolve_weights([1.0], rewards)


# ---- workers ----


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The file under another name, so that its workers are this test's alone."""
    copy = tmp_path / "own_rewards.py"
    copy.write_text(FILE.read_text())
    return copy


def test_a_worker_sees_no_secrets_no_gpu_and_imports_nothing_heavy(
    monkeypatch: pytest.MonkeyPatch, fresh: Path
) -> None:
    monkeypatch.setenv("PODIUM_TEST_KEY", "secret")
    assert scores(file_reward(f"{fresh}:environment")) == [0.0, 0.0, 0.0, 1.0]
    assert scores(file_reward(f"{fresh}:environment", env=["PODIUM_TEST_KEY"])) == [1.0, 0.0, 0.0, 1.0]


def test_a_path_string_is_a_reward_function_and_the_file_is_not_imported_here(fresh: Path) -> None:
    fresh.write_text("import sys\nsys.modules['podium_was_here'] = sys\n" + fresh.read_text().replace("from __f", "# "))
    [reward] = resolve_rewards(f"{fresh}:sees")
    assert (reward.name, reward.is_async) == ("sees", False)
    assert reward.wants == {"completions", "trainer_state", "log_metric", "log_extra", "level"}
    metrics: list[tuple[str, float]] = []
    state = SimpleNamespace(global_step=7, log_history=[{"loss": 1.0}])
    scored = score(GROUPS, [reward], trainer_state=state, log_metric=lambda *each: metrics.append(each))
    assert metrics == [("step", 7.0)]
    assert [each.extras for each in scored] == [{"level": (10, 10)}, {"level": (11, 11)}]
    assert "podium_was_here" not in sys.modules


def test_one_process_a_file_for_the_whole_run_and_a_fresh_one_after_a_kill() -> None:
    number, sleeps = reward_of("file", "process_number"), reward_of("file", "sleeps")
    first = scores(number)
    assert scores(number) == first
    with pytest.raises(RewardError):
        scores(sleeps)
    assert scores(number) != first


def test_random_numbers_in_a_worker_follow_the_runs_seed() -> None:
    draws = reward_of("file", "draws")
    random.seed(3)
    first, second = scores(draws), scores(draws)
    random.seed(3)
    assert scores(draws) == first != second


@pytest.mark.slow
def test_rows_are_shared_out_where_a_function_judges_each_by_itself(fresh: Path) -> None:
    rewards = [file_reward(f"{fresh}:{name}") for name in ("rows", "process_number")]
    assert [reward.row_wise for reward in rewards] == [True, False]
    assert scores(rewards[0], num_workers=3) == LENGTHS
    by_row = scores(file_reward(f"{fresh}:process_number", row_wise=True), num_workers=2)
    assert by_row[0] == by_row[1] != by_row[2] == by_row[3]
    assert len(set(scores(rewards[1], num_workers=2))) == 1
    with pytest.raises(RewardError, match=OVER + AT_CCC):
        scores(file_reward(f"{fresh}:sleeps", row_wise=True), num_workers=2)
    with pytest.raises(RewardError, match="3 values for 2 completions, its share"):
        scores(file_reward(f"{fresh}:one_less", row_wise=True), num_workers=2)


ORPHAN = """
import sys, time
from podium.rewards.from_file import file_reward
number = file_reward(sys.argv[1] + ":process_number")
busy = file_reward(sys.argv[1] + ":busy")
from podium.isolation.workers import _pools
print([worker.process.pid for pool in _pools.values() for worker in pool.workers][0], flush=True)
{then}
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("then", ["time.sleep(60)", "busy(completions=['ccc'])", ""])
def test_a_worker_ends_with_the_run_however_that_ends(then: str, fresh: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHAN.format(then=then))
    with subprocess.Popen([sys.executable, str(script), str(fresh)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        if then:
            time.sleep(0.3)
            run.kill()
        run.wait()
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < until, "the worker outlived the run"
        time.sleep(0.05)


def test_a_column_that_cannot_be_sent_is_named() -> None:
    rewards = resolve_rewards([file_reward(f"{FILE}:changes_its_inputs")])
    prompt = Prompt(id=0, row=0, token_ids=(1,), text="q", content="q", columns={"answer": threading.Lock()})
    with pytest.raises(RewardError, match="column `answer` cannot be sent to the worker"):
        score([Group(prompt=prompt, completions=GROUPS[0].completions)], rewards)


# ---- failures that do not end the run ----


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["scalar", "raises_at_once", "sleeps", "segfault"])
def test_a_failed_call_becomes_none_where_others_still_judge(name: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics: dict[str, float] = {}
    rewards = resolve_rewards([reward_of("file", name), reward_of("process", "good")])
    settings = CallSettings(limit=LIMIT, on_error="none")
    scored = score(GROUPS, rewards, settings=settings, log_metric=lambda key, value: metrics.update({key: value}))
    assert all(each.rewards_GK[:, 0].tolist() != each.rewards_GK[:, 0].tolist() for each in scored)
    assert [value for each in scored for value in each.rewards_GK[:, 1].tolist()] == LENGTHS
    failed = rewards[0].name
    assert metrics == {f"rewards/{failed}/failed": 1.0, "rewards/good/failed": 0.0}
    assert "4 of 4 values become None (on_reward_error)" in caplog.text


@pytest.mark.slow
def test_a_failed_call_becomes_a_number() -> None:
    assert scores(reward_of("file", "segfault"), on_error=-0.5) == [-0.5] * 4
    assert scores(reward_of("process", "not_a_number"), on_error=-0.5) == [0.0, 1.0, -0.5, 3.0]


def test_a_completion_is_never_compared_by_fewer_functions_than_its_siblings() -> None:
    """`bad` fails on one of two completions: beside a sum of two rewards, its sum of one would be a wrong number."""
    rewards = resolve_rewards([module().not_a_number, module().good])
    many = [*GROUPS, *(group(20 + i, "a", "bb") for i in range(2))]

    def bad(completions: list[str]) -> list[float]:
        return [float("nan") if text == "ccc" else 1.0 for text in completions]

    rewards = resolve_rewards([bad, module().good])
    scored = score(many, rewards, settings=CallSettings(on_error="none"))
    row = scored[1].rewards_GK[0]
    assert row.tolist() != row.tolist()
    assert all(value != value for value in row)
    assert scored[1].rewards_GK[1].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_a_run_stops_where_errors_leave_nothing_to_train_on() -> None:
    """Not where one completion has a score; None by the function's own will does not count."""

    def fails(count: int, own: int) -> Any:
        return lambda completions: [float("nan")] * count + [None] * own + [1.0] * (len(completions) - count - own)

    ten = [group(i, "a", "bb") for i in range(5)]
    for count, own in ((2, 0), (9, 0), (0, 10), (2, 7)):
        score(ten, resolve_rewards([fails(count, own)]), settings=CallSettings(on_error="none"))
    for count, own in ((10, 0), (2, 8)):
        with pytest.raises(RewardError, match="None of the 10 completions") as at:
            score(ten, resolve_rewards([fails(count, own)]), settings=CallSettings(on_error="none"))
    assert at.value.code == "W018"
    assert "`<lambda>`" in str(at.value)
    with pytest.raises(RewardError, match="None of the 4 completions"):
        scores(reward_of("file", "leaves"), on_error="none")


def test_nothing_is_left_running() -> None:
    workers.stop_all()
    assert os.getpid() in {pid for pid, *_ in workers._pools}
    assert not any(worker.alive for pool in workers._pools.values() for worker in pool.workers)


@pytest.mark.slow
def test_idle_workers_end_once_nothing_refers_to_them(tmp_path: Path) -> None:
    files = [tmp_path / f"idle_{number}.py" for number in range(workers.POOLS_KEPT + 2)]
    for file in files:
        file.write_text("def good(completions):\n    return [1.0] * len(completions)\n")
    held = file_reward(f"{files[0]}:good")
    dropped = file_reward(f"{files[1]}:good")._pool.workers[0]
    for file in files[2:]:
        file_reward(f"{file}:good")
    assert held._pool.workers[0].alive
    assert not dropped.alive


@pytest.mark.slow
def test_a_worker_that_starts_again_runs_the_code_of_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file, a module and a package below its folder are edited between two calls, and the worker ends."""

    def write(number: int) -> None:
        (tmp_path / "mine.py").write_text(
            f"import os\nimport a_part\nfrom parts_of.third import third\n\n\ndef f(completions):\n"
            f"    return [float({number} + a_part.second() + third)] * len(completions)\n\n\n"
            f"def g(completions):\n    return [float(os.getpid())]\n"
        )
        (tmp_path / "a_part.py").write_text(f"def second():\n    return {10 * number}\n")
        (tmp_path / "parts_of").mkdir(exist_ok=True)
        (tmp_path / "parts_of" / "third.py").write_text(f"third = {100 * number}\n")

    def digest() -> str:
        [reward] = resolve_rewards([file_reward(f"{tmp_path}/mine.py:f")])
        return reward_source(reward)["sha256"]

    write(1)
    reward, number, first = file_reward(f"{tmp_path}/mine.py:f"), file_reward(f"{tmp_path}/mine.py:g"), digest()

    def end_worker() -> None:
        process = int(number(completions=["a"])[0] or 0)
        os.kill(process, signal.SIGKILL)
        [worker] = reward._workers().take(1)
        assert worker.process is not None
        worker.process.wait(timeout=30)

    assert reward(completions=["a"]) == [111.0]
    write(2)
    assert reward(completions=["a"]) == [111.0], "the worker has the code that it loaded"
    assert caplog.messages == []
    for _ in range(2):
        end_worker()
        assert reward(completions=["a"]) == [111.0]
    (tmp_path / "mine.py").unlink()
    end_worker()
    assert reward(completions=["a"]) == [111.0]
    assert reward.digest == first
    said = [message for message in caplog.messages if "(f)" in message]
    assert len(said) == 4, "the worker, and three files, once each"
    assert "is started again" in said[0]
    for name, message in zip(("a_part.py", "mine.py", "third.py"), sorted(said[1:]), strict=True):
        assert name in message.split(" has changed ")[0]
    write(3)
    assert file_reward(f"{tmp_path}/mine.py:f")(completions=["a"]) == [333.0], "a new run has the new code"
    assert digest() != first
    third = digest()
    (tmp_path / "a_part.py").write_text("def second():\n    return 0\n")
    fresh = [
        sys.executable,
        "-c",
        f"from podium.rewards import file_reward as f; print(f('{tmp_path}/mine.py:f').digest)",
    ]
    other = subprocess.run(fresh, capture_output=True, text=True, check=True).stdout.strip()
    assert third != other, "a module below the file is part of its code"
    write(3)
    assert subprocess.run(fresh, capture_output=True, text=True, check=True).stdout.strip() == third


def slow(completions: list[str]) -> list[float]:
    time.sleep(0.3)
    return [1.0] * len(completions)


async def polite(completions: list[str]) -> list[float]:
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "limit", "place"),
    [("slow", None, __file__), ("slow", 0.1, __file__), ("polite", 0.1, ""), ("file", None, "")],
)
def test_a_long_call_is_waited_for_and_said_once(
    name: str,
    limit: float | None,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A clock ends no run: a slow machine, or a judge with a queue, takes as long as it takes."""
    monkeypatch.setattr(call, "LONG_SECONDS", 0.05)
    monkeypatch.setattr(call, "_said", set())
    file = tmp_path / "patient.py"
    file.write_text("import time\ndef patient(completions):\n    time.sleep(0.3)\n    return [1.0] * len(completions)")
    reward = {"slow": slow, "polite": polite, "file": f"{file}:patient"}[name]
    rewards = resolve_rewards([reward])
    for _ in range(2):
        scored = score([group(0, "a", "b")], rewards, settings=CallSettings(limit=limit))
        assert scored[0].rewards_GK[:, 0].tolist() == [1.0, 1.0]
    [said] = [message for message in caplog.messages if "has run for" in message]
    assert str(rewards[0]) in said
    assert f"has run for {limit or 0.05:g} s" in said
    assert place in said
    assert "`reward_timeout`" in said


def test_a_quick_call_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert scores(module().good) == LENGTHS
    assert not [message for message in caplog.messages if "has run for" in message]

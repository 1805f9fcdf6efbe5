"""Reward functions that do everything wrong. Given as a file they run in a worker; imported, in the run's process.

Completions are `a`, `bb` (row 10) and `ccc`, `d` (row 11); what goes wrong in one row goes wrong at `ccc`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pandas as pd

calls = 0


def good(completions):
    return [float(len(text)) for text in completions]


def generator_function(completions):
    for text in completions:
        yield float(len(text))


def generator_that_raises(completions):
    for text in completions:
        yield 1 / (len(text) - 3)


ONE = ValueError("made once")


def raises_one_object(completions):
    for text in completions:
        if text == "ccc":
            raise ONE


def mapped(completions):
    return map(len, completions)


def at_ccc(act):
    """A reward that does something at the third completion."""

    def reward(completions):
        return [float(act()) if text == "ccc" else 0.0 for text in completions]

    return reward


def raising(error):
    def act():
        raise error

    return act


# ---- raises (R13) ----


class Interrupt(KeyboardInterrupt):
    pass


class Bare(BaseException):
    pass


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


raises_at_once = at_ccc(raising(ValueError("wrong")))
raises_exit = at_ccc(raising(SystemExit(0)))
raises_interrupt = at_ccc(raising(Interrupt("not by the user")))
raises_bare = at_ccc(raising(Bare("odd")))
raises_unspeakable = at_ccc(raising(Unspeakable()))
raises_group = at_ccc(raising(ExceptionGroup("several", [ValueError("one"), KeyError("two")])))
raises_stop = at_ccc(raising(StopIteration()))
raises_timeout = at_ccc(raising(TimeoutError("the judge's own")))


def raises_on_third_call(completions):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise ConnectionError("judge is down")
    return good(completions)


def raises_in_a_thread(completions):
    found = [None] * len(completions)

    def work():
        found[:] = good(completions)
        raise ValueError("too late")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


def deep(number=0):
    return deep(number + 1)


recursion = at_ccc(deep)
memory = at_ccc(lambda: bytearray(1 << 60))
chained = at_ccc(lambda: {}["missing"])


# ---- dies (R13) ----

leaves = at_ccc(lambda: os._exit(0))
leaves_with_three = at_ccc(lambda: os._exit(3))
segfault = at_ccc(lambda: ctypes.string_at(0))
aborts = at_ccc(os.abort)
kills_itself = at_ccc(lambda: os.kill(os.getpid(), signal.SIGKILL))


def closes_everything(completions):
    os.closerange(3, 1024)
    return good(completions)


def writes_into_the_connection(completions):
    for number in range(3, 1024):
        try:
            if socket.socket(fileno=os.dup(number)).send(b"rubbish that is longer than a header") > 0:
                break
        except OSError:
            continue
    return good(completions)


# ---- hangs (R15) ----


def spin():
    while True:
        pass


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def blocked_socket():
    ours, theirs = socket.socketpair()
    ours.recv(1)
    theirs.close()


def child_holds_the_pipe():
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os._exit(0)


def stubborn():
    while True:
        try:
            time.sleep(30)
        except BaseException:  # noqa: BLE001
            continue


def made_up(completions):
    """Swallows the interrupt and returns something."""
    with contextlib.suppress(BaseException):
        time.sleep(30)
    return [1.0] * len(completions)


sleeps = at_ccc(lambda: time.sleep(30))
busy = at_ccc(spin)
c_loop = at_ccc(lambda: 9**9**9)
c_loop_without_signals = at_ccc(lambda: sum(itertools.repeat(1)))
regex = at_ccc(lambda: re.match(r"(a+)+$", "a" * 60 + "b") is not None)
locks = at_ccc(deadlock)
waits_for_a_socket = at_ccc(blocked_socket)
pipe_holder = at_ccc(child_holds_the_pipe)
never_lets_go = at_ccc(stubborn)
sleeps_in_finally = at_ccc(stubborn)


# ---- returns (R14) ----


def returning(answer):
    def reward(completions):
        return answer()

    return reward


class Number:
    def __float__(self):
        return 1.0

    def __repr__(self):
        raise RuntimeError("no repr")


async def coroutine():
    return [0.0] * 4


nothing = returning(lambda: [])
one_less = returning(lambda: [1, 2, 3])
one_more = returning(lambda: [1] * 5)
scalar = returning(lambda: 0.5)
none = returning(lambda: None)
generator = returning(lambda: (each for each in [1, 2, 3, 4]))
queue = returning(lambda: collections.deque([0, 1, 2, 3]))
series = returning(lambda: pd.Series([0, 1, 2, 3]))
unordered = returning(lambda: {0, 1, 2, 3})
mapping = returning(lambda: {"reward": [1, 2, 3, 4]})
text = returning(lambda: "1234")
truth = returning(lambda: True)
truths = returning(lambda: [True, False, True, False])
vector = returning(lambda: np.array([0.0, 1.0, 2.0, 3.0]))
matrix = returning(lambda: np.ones((4, 1)))
not_a_number = returning(lambda: [0, 1, float("nan"), 3])
infinite = returning(lambda: [0, 1, float("inf"), 3])
minus_infinite = returning(lambda: [0, 1, -float("inf"), 3])
huge = returning(lambda: [0, 1, 1e38, 3])
huge_int = returning(lambda: [0, 1, 10**400, 3])
mixed = returning(lambda: [0, None, 2, None])
string_value = returning(lambda: [0, 1, "1.0", 3])
nested = returning(lambda: [0, 1, [2], 3])
odd_value = returning(lambda: [0, 1, Number(), 3])
forgotten_await = returning(lambda: coroutine())
all_none = returning(lambda: [None] * 4)


def with_torch(make):
    def reward(completions):
        import torch

        return make(torch)

    return reward


tensor = with_torch(lambda torch: torch.tensor([0.0, 1.0, 2.0, 3.0]))
tensor_with_gradient = with_torch(lambda torch: torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True))
tensor_in_two_dimensions = with_torch(lambda torch: torch.ones(2, 2))


# ---- async (R16) ----


async def async_good(completions):
    await asyncio.sleep(0)
    return good(completions)


async def async_raises(completions):
    await asyncio.sleep(0)
    return raises_at_once(completions)


async def async_hangs(completions):
    for _ in completions:
        await asyncio.sleep(30)


async def async_blocks(completions):
    time.sleep(3)
    return good(completions)


async def async_never_lets_go(completions):
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            await asyncio.sleep(3)
        except asyncio.CancelledError:
            continue
    return good(completions)


async def async_leaks(completions):
    async def later():
        await asyncio.sleep(0.01)
        raise ValueError("nobody looks")

    background.append(asyncio.create_task(later()))
    return good(completions)


background = []


def own_loop(completions):
    return asyncio.run(async_good(completions))


async def async_exits(completions):
    sys.exit(1)


# ---- the rest of the catalogue ----


def changes_its_inputs(completions, answer):
    completions.clear()
    answer.append("x")
    return [1.0, 2.0, 3.0, 4.0]


def takes_messages(completions):
    return [float(len(completion[0]["content"])) for completion in completions]


def logs_too_few(completions, log_extra):
    log_extra("note", ["x"])
    return good(completions)


def needs_a_column(completions, solution):
    return good(completions)


def sees(completions, trainer_state, log_metric, log_extra, level):
    log_metric("step", trainer_state.global_step)
    log_extra("level", level)
    return good(completions)


def environment(completions):
    secret = "PODIUM_TEST_KEY" in os.environ
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    heavy = bool({"torch", "transformers"} & set(sys.modules))
    return [float(secret), float(gpu), float(heavy), float(threading.current_thread() is threading.main_thread())]


def draws(completions):
    return [float(np.random.random()) for _ in completions]


def process_number(completions):
    return [float(os.getpid() % 100_000) for _ in completions]


def rows(completions):
    time.sleep(0.02 * len(completions))
    return [float(len(text)) for text in completions]


rows.row_wise = True

"""A run that is killed at any moment and resumed ends with the weights of a run that nobody killed, bit for bit.

Nothing is pretended here: processes get a SIGKILL, files are truncated. Runs are those of `killable.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import CheckpointError
from podium.runs import checkpoint

RUNS = ("base", "reuse", "lora", "adapter", "sync", "entropy", "stream", "generate", "ahead", "tools")


@dataclass
class Server:
    """The other end of `killable.py`."""

    process: subprocess.Popen[str]
    errors: Path
    pid: int = 0

    def start(self, run: str, folder: Path, *, resume: bool | str = False, die_at: int | None = None) -> None:
        order = {"run": run, "folder": str(folder), "resume": resume, "die_at": die_at}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.until("pid"))

    def until(self, word: str, *, least: int = 0) -> str:
        """Reads to a line of `word` and a number of at least that; gives the number. An end before it is a failure."""
        while True:
            line = self.process.stdout.readline()
            assert line, f"the server died:\n{self.said()[-4000:]}"
            found, _, rest = line.strip().partition(" ")
            if found == word and int(rest) >= least:
                return rest
            assert found != "ended", f"ended with {rest} before {word}:\n{self.said()[-4000:]}"

    def finish(self) -> None:
        """To the end of a run that must succeed."""
        status = int(self.until("ended"))
        assert status == 0, self.said()[-4000:]

    def killed(self) -> bool:
        """To the end of a run that may have been killed; whether it was."""
        status = int(self.until("ended"))
        assert status == 0 or os.WIFSIGNALED(status), self.said()[-4000:]
        return status != 0

    def said(self) -> str:
        return self.errors.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("server") / "stderr.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killable.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        yield Server(process, errors)
        process.stdin.close()
        process.wait(timeout=60)


@dataclass(frozen=True)
class Undisturbed:
    """A run to compare with."""

    folder: Path
    steps: int
    operations: int
    """File operations inside checkpoints."""
    seconds: float
    history: list[dict[str, Any]] = field(repr=False)
    weights: dict[str, torch.Tensor] = field(repr=False)


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Undisturbed] = {}

    def of(name: str) -> Undisturbed:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            server.start(name, folder)
            server.until("step")
            start = time.perf_counter()
            operations = int(server.until("saves"))
            seconds = time.perf_counter() - start
            server.finish()
            history = json.loads((folder / "history.json").read_text())
            known[name] = Undisturbed(
                folder=folder,
                steps=max(entry["step"] for entry in history),
                operations=operations,
                seconds=seconds,
                history=history,
                weights=load_file(folder / "final.safetensors"),
            )
        return known[name]

    return of


def assert_same(folder: Path, expected: Undisturbed) -> None:
    """Weights bit for bit; every logged number too, but for times."""
    weights = load_file(folder / "final.safetensors")
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(weights[name], value), name
    assert json.loads((folder / "history.json").read_text()) == expected.history
    assert not list(folder.glob(".tmp-*")), "nothing half written is left"


def has_checkpoint(folder: Path) -> bool:
    return bool(checkpoint.checkpoints(folder))


def test_the_runs_move_and_differ(undisturbed: Any) -> None:
    """The comparison below would say nothing of runs in which nothing happens."""
    base = undisturbed("base")
    assert base.steps == 9
    first = load_file(base.folder / "checkpoint-1" / "model.safetensors")
    assert all(not torch.equal(first[k], base.weights[k]) for k in first if k in base.weights)
    order = [entry["reward"] for entry in base.history if "reward" in entry]
    assert len(set(order)) > 6, "epochs draw other prompts or other completions"


@pytest.mark.slow
def test_a_run_ahead_of_its_weights_resamples(undisturbed: Any) -> None:
    """As the runs above."""
    ahead = [entry for entry in undisturbed("ahead").history if "rollouts/staleness" in entry]
    assert [entry["rollouts/staleness"] for entry in ahead] == [0, 2, 4, 4, 4, 4]
    assert max(entry["resampled_prompts"] for entry in ahead) > 0
    assert len({entry["random"] for entry in ahead}) == 6


@pytest.mark.slow
def test_the_reference_and_the_entropy_move(undisturbed: Any) -> None:
    """Of the runs that slow tests alone compare with."""
    assert undisturbed("reuse").steps == 24
    assert any(name.startswith("reference.") for name in undisturbed("sync").weights)
    coefficients = [entry["entropy_coef"] for entry in undisturbed("entropy").history if "entropy_coef" in entry]
    assert coefficients == sorted(coefficients)
    assert coefficients[-1] > 0.1


KILLS = [
    pytest.param(name, seed, marks=[] if (name, seed) == (RUNS[0], 0) else pytest.mark.slow)
    for name in RUNS
    for seed in range(4)
]


def killed_behind(server: Server, name: str, folder: Path, step: int, wait: float) -> bool:
    """Whether a run was still there to be killed `wait` seconds after the end of a step."""
    server.start(name, folder, resume=has_checkpoint(folder))
    server.until("step", least=step)
    time.sleep(wait)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(server.pid, signal.SIGKILL)
    return server.killed()


@pytest.mark.parametrize(("name", "seed"), KILLS)
def test_killed_at_a_random_moment(name: str, seed: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """One kill, or with odd seeds a second one after the first resume. A checkpoint is written after every step."""
    expected = undisturbed(name)
    moment = random.Random(f"{name} {seed}")
    done = 0
    for _ in range(1 + seed % 2):
        step = moment.randrange(done, expected.steps - 1) + 1
        wait = moment.random() * expected.seconds / expected.steps
        before = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-before"), dirs_exist_ok=True)
        while not killed_behind(server, name, tmp_path, step, wait):  # its last steps took less time than the others
            shutil.rmtree(tmp_path)
            shutil.copytree(before, tmp_path)
            step, wait = max(1, step - 1), wait / 2
        shutil.rmtree(before)
        done = min(step, expected.steps - 2)
    server.start(name, tmp_path, resume=has_checkpoint(tmp_path))
    server.finish()
    assert_same(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_while_tools_run(seed: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """Inside a round: some completions wait for their tools, others are in a later turn or done."""
    expected = undisturbed("tools")
    moment = random.Random(f"tools {seed}")
    server.start("tools", tmp_path)
    if after := moment.choice([0, 2, 4]):
        server.until("step", least=after)
    seen = int(server.until("call"))
    server.until("call", least=seen + moment.randrange(20))
    os.kill(server.pid, signal.SIGKILL)
    assert server.killed()
    server.start("tools", tmp_path, resume=has_checkpoint(tmp_path))
    server.finish()
    assert_same(tmp_path, expected)


@pytest.mark.slow
def test_tools_that_answer_in_another_order_change_no_bit(server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """Each call sleeps for a random time: three runs have the same weights and numbers."""
    expected = undisturbed("tools")
    assert max(entry.get("turns/max", 0) for entry in expected.history) > 2
    for again in ("second", "third"):
        server.start("tools", tmp_path / again)
        server.finish()
        assert_same(tmp_path / again, expected)


@pytest.mark.parametrize("twelfth", [pytest.param(i, marks=[pytest.mark.slow] if i != 6 else []) for i in range(12)])
def test_killed_inside_a_save(twelfth: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """At a file operation of the fifth checkpoint: opening, flushing, hashing, renaming."""
    expected = undisturbed("base")
    each = expected.operations / expected.steps
    server.start("base", tmp_path, die_at=round(each * (4 + twelfth / 12)) + 1)
    assert server.killed()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.name in ("checkpoint-4", "checkpoint-5")
    server.start("base", tmp_path, resume=True)
    server.finish()
    assert_same(tmp_path, expected)


@pytest.mark.slow
def test_kills_inside_saves_hit_half_written_ones(server: Server, undisturbed: Any, tmp_path: Path) -> None:
    expected = undisturbed("base")
    server.start("base", tmp_path, die_at=round(expected.operations / expected.steps * 4.5))
    assert server.killed()
    assert (tmp_path / ".tmp-checkpoint-5").is_dir()
    assert checkpoint.checkpoints(tmp_path)[0].name == "checkpoint-4"


STEPS = [
    *(pytest.param("base", step, marks=pytest.mark.versions) for step in (3, 9)),
    ("reuse", 12),
    ("ahead", 6),
    pytest.param("tools", 1, marks=pytest.mark.slow),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in RUNS[3:]),
    *(pytest.param("ahead", step, marks=pytest.mark.slow) for step in (1, 5, 10, 12)),
    *(pytest.param("reuse", step, marks=pytest.mark.slow) for step in (*range(1, 9), 24)),
    *(pytest.param("lora", step, marks=pytest.mark.slow) for step in (1, 5, 9)),
]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "step"), STEPS)
def test_resumed_from_a_given_step(name: str, step: int, server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """Inside a round, at its end, at the end of an epoch, at the end of the run; into another folder."""
    expected = undisturbed(name)
    server.start(name, tmp_path, resume=str(expected.folder / f"checkpoint-{step}"))
    server.finish()
    assert_same(tmp_path, expected)


# ---- damage ----


@pytest.fixture
def damaged(undisturbed: Any, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    folder = tmp_path / "run"
    for number in (7, 8, 9):
        name = f"checkpoint-{number}"
        shutil.copytree(undisturbed("base").folder / name, folder / name)
    return folder


FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "podium_state.json",
    "round-0.npz",
    "config.json",
    "manifest.json",
)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [truncate, flip, empty, Path.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_skipped(name: str, harm: Any, damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    harm(damaged / "checkpoint-9" / name)
    found = checkpoint.newest(damaged)
    assert found == damaged / "checkpoint-8"
    [message] = [record.getMessage() for record in caplog.records]
    assert "Skipped checkpoint-9" in message
    assert name in message or name == checkpoint.MANIFEST  # a bit of it may have made another file look wrong
    assert "checkpoint-8" in message


def test_no_flipped_bit_of_a_manifest_raises(damaged: Path) -> None:
    """Every tenth byte: found, or of no consequence, but never an error of ours."""
    manifest = damaged / "checkpoint-9" / checkpoint.MANIFEST
    original = manifest.read_bytes()
    for at in range(0, len(original), 10):
        data = bytearray(original)
        data[at] ^= 1 << (at // 10 % 8)
        manifest.write_bytes(data)
        checkpoint.damage(manifest.parent)
    manifest.write_text('{"files": ["model.safetensors"]}')
    assert checkpoint.damage(manifest.parent) == "its manifest.json cannot be read"


def test_an_empty_folder_is_skipped(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    (damaged / "checkpoint-10").mkdir()
    (damaged / "checkpoint-final").mkdir()
    assert checkpoint.newest(damaged) == damaged / "checkpoint-9"
    assert "checkpoint-10: it has no manifest.json" in caplog.text


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "manifest.json"])
def test_a_run_resumes_from_the_checkpoint_before(name: str, server: Server, undisturbed: Any, damaged: Path) -> None:
    """End to end: the log says which was skipped and why, and the run ends as if nothing had happened."""
    for path in (damaged / "checkpoint-9", damaged / "checkpoint-8"):
        truncate(path / name)
    server.start("base", damaged, resume=True)
    server.finish()
    assert_same(damaged, undisturbed("base"))
    for number in (9, 8):
        assert f"Skipped checkpoint-{number}: " in server.said()
    assert "resuming from checkpoint-7" in server.said()


def test_all_damaged_is_one_error(damaged: Path) -> None:
    for path in checkpoint.checkpoints(damaged):
        truncate(path / "optimizer.pt")
    with pytest.raises(CheckpointError) as error:
        checkpoint.newest(damaged)
    for number in (7, 8, 9):
        assert f"checkpoint-{number}: optimizer.pt has" in str(error.value)
    assert "resume_from_checkpoint" in str(error.value)


def test_a_damaged_checkpoint_asked_for_by_name_is_an_error(damaged: Path) -> None:
    flip(damaged / "checkpoint-9" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint-9 is damaged: model.safetensors has other contents"):
        checkpoint.to_resume_from(damaged, asked=str(damaged / "checkpoint-9"))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.to_resume_from(damaged, asked=str(damaged))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.to_resume_from(damaged / "nowhere", asked=True)


def replace_under_manifest(folder: Path, name: str, text: str) -> None:
    """Write a file of a checkpoint, and a manifest that it fits."""
    (folder / name).write_text(text)
    (folder / checkpoint.MANIFEST).unlink()
    checkpoint.write_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"global_step": null}', '{"global_step": "9"}'])
def test_a_state_without_a_step_is_skipped_under_a_manifest_that_fits(text: str, damaged: Path) -> None:
    newest = damaged / "checkpoint-9"
    replace_under_manifest(newest, "trainer_state.json", text)
    assert checkpoint.newest(damaged) == damaged / "checkpoint-8"
    with pytest.raises(CheckpointError, match=r"checkpoint-9 is damaged: trainer_state\.json"):
        checkpoint.to_resume_from(damaged, asked=str(newest))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("podium_state.json", ""),
        ("podium_state.json", "[]"),
        ("podium_state.json", "{}"),
        ("podium_state.json", '{"made_of": [1]}'),
        ("podium_state.json", '{"bfloat16_products": null, "entropy": 3, "plan": {}}'),
        ("trainer_state.json", '{"global_step": 9, "unknown": 1}'),
    ],
)
def test_a_state_of_another_shape_is_one_message(name: str, text: str, server: Server, damaged: Path) -> None:
    newest = damaged / "checkpoint-9"
    replace_under_manifest(newest, name, text)
    server.start("base", damaged, resume=True)
    with pytest.raises(AssertionError):
        server.finish()
    assert f"CheckpointError: {newest} cannot be gone on from: its {name} cannot be loaded" in server.said()


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")])
def test_a_file_with_the_name_of_a_checkpoint_is_kept_aside(make: Any, tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-12"
    make(final)
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.to_resume_from(tmp_path, asked=str(final))
    with checkpoint.atomic_folder(final) as staging:
        (staging / "config.json").write_text("{}")
    assert (final / "config.json").is_file()
    aside = tmp_path / "checkpoint-12.aside"
    assert aside.is_symlink() or aside.read_text() == "mine"


@pytest.mark.slow
def test_without_the_round_ahead_it_is_drawn_anew(server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """From a checkpoint of a run that did not sample ahead, and into one: each goes on as its own settings say."""
    server.start("ahead", tmp_path / "a", resume=str(undisturbed("base").folder / "checkpoint-5"))
    server.finish()
    server.start("base", tmp_path / "b", resume=str(undisturbed("ahead").folder / "checkpoint-5"))
    server.finish()


@pytest.mark.slow
def test_the_round_is_drawn_anew_under_other_batch_settings(server: Server, undisturbed: Any, tmp_path: Path) -> None:
    """A round of 4 x 4 completions in two shares does not fit a plan with one; it is not trained on by mistake."""
    server.start("base", tmp_path, resume=str(undisturbed("reuse").folder / "checkpoint-5"))
    server.finish()
    assert "shares 4 -> 1" in server.said()

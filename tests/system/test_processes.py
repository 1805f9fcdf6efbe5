"""Any number of processes, with whole or sharded weights, end with the weights and the log of one.

Runs are those of `ranks.py`, on CPUs over gloo; no collective may take longer than a minute.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.cli.launch import CONFIGS, machines_apart
from podium.runs import checkpoint
from podium.testing import tiny_model

SCRIPT = Path(__file__).with_name("ranks.py")

_spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

FLAGS = {
    "ddp": ["--multi_gpu"],
    "fsdp2": ["--config_file", str(CONFIGS / "fsdp2.yaml")],
    "kept": ["--config_file", str(CONFIGS / "fsdp2.yaml"), "--fsdp_reshard_after_forward=false"],
    "handed_on": ["--config_file", str(CONFIGS / "fsdp2.yaml"), "--fsdp_cpu_ram_efficient_loading=true"],
    "hsdp": ["--config_file", str(CONFIGS / "hsdp.yaml")],
    **{zero: ["--config_file", str(CONFIGS / f"{zero}.yaml")] for zero in ("zero1", "zero2", "zero3")},
}
"""`kept`: an adapter's base is gathered once in the run. `handed_on`: the first process has the weights. `hsdp`: as on
two machines."""


DIVISIONS = {"ddp": "ddp", **dict.fromkeys(("zero1", "zero2", "zero3"), "deepspeed")}
"""What Podium calls them; all others are `fsdp2`."""


@dataclass(frozen=True)
class World:
    """Processes and how they share the work."""

    division: str
    num_processes: int

    def __str__(self) -> str:
        return f"{self.division}-{self.num_processes}"


ONE = World("ddp", 1)
WORLDS = [World("ddp", 2), World("fsdp2", 2), World("ddp", 4), World("fsdp2", 4)]

PLAIN = tuple(name for name in ranks.RUNS if name != "long")
TOGETHER = WORLDS[:2]
VARIANTS = {
    World("kept", 2): ("full", "lora", "adapter", "adapter-resumed"),
    World("handed_on", 2): ("full", "lora", "one_prompt"),
    World("torchrun", 2): ("full", "lora"),
    **{World(zero, 2): ("full", "lora", "adam", "adam-resumed") for zero in ("zero1", "zero2", "zero3")},
    World("hsdp", 4): ("full", "lora", "adam", "sync", "adam-resumed", "adapter-resumed"),
}

IMAGES = {
    ONE: ("images", "images_lora", "encoder"),
    World("ddp", 2): ("images", "images_lora", "encoder", "encoder_rows", "encoder_adam-resumed"),
    World("fsdp2", 2): ("images", "images_lora", "encoder", "encoder_rows", "encoder_adam-resumed"),
    World("hsdp", 4): ("images", "encoder"),
    World("zero2", 2): ("images", "images_lora", "encoder"),
}
"""Runs on rows with images, which are started by themselves."""


def plain(world: World) -> tuple[str, ...]:
    """Runs that this way of sharing the work allows."""
    return tuple(name for name in PLAIN if world.division == "ddp" or name not in ranks.WHOLE)


def command(folder: Path, world: World, names: tuple[str, ...]) -> list[str]:
    launcher = [
        "-m",
        "accelerate.commands.launch",
        *FLAGS.get(world.division, ()),
        f"--num_processes={world.num_processes}",
        "--main_process_port=0",
    ]
    if world.division == "torchrun":  # with `fsdp: true` in the settings
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world.num_processes}"]
        names = tuple(f"{name}:fsdp" for name in names)
    return [sys.executable, *(launcher if world.num_processes > 1 else []), str(SCRIPT), str(folder), *names]


def launch(folder: Path, world: World, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_CONFIG_FILE": str(folder / "none.yaml"),
        "EXPECTED_DIVISION": DIVISIONS.get(world.division, "fsdp2") if world.num_processes > 1 else "one",
        **(machines_apart(2, 2) if world.division == "hsdp" else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH")])),
        **environment,
    }
    return subprocess.run(
        command(folder, world, names), env=surroundings, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`left(world, name)`: the folder with all that the runs have left."""

    @cache
    def of(world: World, names: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp(f"{world}")
        done = launch(folder, world, *names)
        assert done.returncode == 0, done.stderr[-6000:]
        return folder

    def of_run(world: World, name: str) -> Path:
        if world.division == "zero3":  # a second model of a process would be divided, and drawn, while it is made
            return of(world, (name,))
        if name.removesuffix("-resumed") in ranks.IMAGES:
            return of(world, IMAGES[world])
        if world in VARIANTS:
            return of(world, VARIANTS[world])
        others = [x for x in ranks.OTHERS if x not in ("continued", "killed", "encoder_adam-resumed")]
        return of(world, (*plain(world), *others))

    return of_run


def logs(folder: Path, name: str, *, keep: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What depends on the data alone; of the weights, a process sees what it has. `keep`: what else to give."""
    history = json.loads((folder / f"{name}.json").read_text())
    own = ("time", "second", "resident", "finding/", "logp_gap", "flos", "update_ratio", "moved_share")
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in own if part not in keep)} for entry in history
    ]


def case(world: World, name: str) -> Any:
    """The run of a world; DeepSpeed is not among the packages that tests are installed with."""
    lacks = world.division.startswith("zero") and importlib.util.find_spec("deepspeed") is None
    return pytest.param(world, name, marks=pytest.mark.skipif(lacks, reason="needs deepspeed"))


CASES = [
    *(case(world, name) for world in WORLDS for name in plain(world)),
    *(case(world, name) for world, names in VARIANTS.items() for name in names if name in PLAIN),
    *(case(world, name) for world, names in IMAGES.items() for name in names if world != ONE and name in IMAGES[ONE]),
    *(case(World("zero3", 2), name) for name in ("images_lora", "encoder")),
]


@pytest.mark.parametrize(("world", "name"), CASES, ids=str)
def test_many_processes_give_the_weights_of_one(world: World, name: str, left: Any) -> None:
    compare(left(ONE, name), left(world, name), name, 1e-4 if name == "adam" else 1e-6)


def compare(one: Path, other: Path, name: str, tolerance: float) -> None:
    """The weights of a run in two folders, to a share of the largest."""
    weights = load_file(one / f"{name}.safetensors")
    others = load_file(other / f"{name}.safetensors")
    assert weights.keys() == others.keys()
    largest = max(float(value.abs().max()) for value in weights.values())
    for key, value in weights.items():
        assert float((value - others[key]).abs().max()) < tolerance * largest, key


def test_padded_rows_with_images_train_alike_in_parts(left: Any) -> None:
    """`generate` draws other completions where a process has other prompts: two processes are compared with two."""
    compare(left(World("ddp", 2), "encoder_rows"), left(World("fsdp2", 2), "encoder_rows"), "encoder_rows", 1e-6)


@pytest.mark.parametrize(("world", "name"), CASES, ids=str)
def test_many_processes_log_what_one_logs(world: World, name: str, left: Any) -> None:
    for alone, together in zip(logs(left(ONE, name), name), logs(left(world, name), name), strict=True):
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            same = together[key] is None if value is None else together[key] == pytest.approx(value, rel=2e-4, abs=2e-5)
            assert same, (alone["step"], key, value, together[key])


def test_the_runs_learn_and_differ(left: Any) -> None:
    """Runs that do nothing would agree, too."""
    one = left(ONE, "full")
    weights = {name: load_file(one / f"{name}.safetensors") for name in ("full", "adam")}
    assert not torch.equal(weights["full"]["model.embed_tokens.weight"], weights["adam"]["model.embed_tokens.weight"])
    assert any(entry.get("grad_norm") for entry in logs(one, "no_signal_on_one"))
    assert all(entry.get("grad_norm", 0) == 0 for entry in logs(one, "no_signal_at_all"))
    assert any(entry.get("completions/min_length", 99) < 12 for entry in logs(one, "full"))


def test_divided_weights_are_not_copied(tmp_path: Path) -> None:
    done = launch(tmp_path, World("fsdp2", 2), "ahead")
    assert done.returncode != 0
    assert "ConfigError: async_rollouts copies the policy's weights, which FSDP and DeepSpeed divide" in done.stderr


@pytest.mark.parametrize("world", TOGETHER, ids=str)
def test_one_process_samples_nothing_to_train_on(world: World, left: Any) -> None:
    """Of what it sampled in `no_signal_on_one`: the other has all groups with a signal, and gives it one of them."""
    ends = [entry["frac_reward_zero_std"] for entry in logs(left(world, "no_signal_on_one"), "no_signal_on_one")[:-1]]
    assert all(share == 0.5 for share in ends)
    plan = ranks.trainer("no_signal_on_one", str(left(world, "full") / "plan")).run.plan
    two = type(plan)(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "ranks": 2})
    dealt = two.assign_to_ranks([len(row["prompt"]) for row in ranks.ROWS[:4]])
    assert [{ranks.ROWS[p]["flat"] for p in mine} for mine in dealt] == [{False}, {True}]


RESUMES = [
    *(case(world, "encoder_adam") for world in TOGETHER),
    *(case(world, name) for world in WORLDS for name in ranks.RESUMED),
    case(World("kept", 2), "adapter"),
    case(World("hsdp", 4), "adam"),
    case(World("hsdp", 4), "adapter"),
    *(case(World(zero, 2), "adam") for zero in ("zero1", "zero2", "zero3")),
]


@pytest.mark.parametrize(("world", "name"), [(ONE, "reuse"), (ONE, "adam")])
def test_a_resumed_run_of_one_process_is_bit_equal(world: World, name: str, left: Any) -> None:
    test_a_resumed_run_is_bit_equal(world, name, left)


@pytest.mark.parametrize(("world", "name"), RESUMES, ids=str)
def test_a_resumed_run_is_bit_equal(world: World, name: str, left: Any) -> None:
    """`reuse` from the middle of a round; `adam` with an optimizer that remembers."""
    folder = left(world, f"{name}-resumed")
    saved, resumed = (load_file(folder / f"{name}-{which}.safetensors") for which in ("saved", "resumed"))
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(saved[key], resumed[key]) for key in saved)
    model = "model.safetensors" if name != "adapter" else "adapter_model.safetensors"
    for key, value in load_file(folder / f"{name}-model" / model).items():
        inside = key if name != "adapter" else key.replace(".weight", ".default.weight")
        assert torch.equal(value, resumed[inside]), key


@pytest.mark.parametrize("world", TOGETHER, ids=str)
def test_checkpoints_hold_every_process(world: World, left: Any) -> None:
    output = left(world, "adam-resumed") / "adam-saved"
    for folder in checkpoint.checkpoints(output):
        assert checkpoint.damage(folder) is None
        names = {path.name for path in folder.iterdir()}
        assert {"round-0.npz", "round-1.npz", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= names
        parts = {f"{kind}" for kind in names if "-part-" in kind}
        assert len(parts) == (4 if world.division == "fsdp2" else 0)
    assert not list(output.glob(".tmp-*"))


FSDP2, FOUR, HSDP = World("fsdp2", 2), World("fsdp2", 4), World("hsdp", 4)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (FSDP2, ONE, "adam"),
        (FSDP2, ONE, "sync"),
        (FSDP2, ONE, "adapter"),
        (FSDP2, World("ddp", 2), "adam"),
        (FSDP2, FOUR, "adam"),
        (FSDP2, FOUR, "sync"),
        (FOUR, FSDP2, "adam"),
        (FOUR, FSDP2, "adapter"),
        (FOUR, HSDP, "adam"),
        (HSDP, FSDP2, "adam"),
        (HSDP, FOUR, "adam"),
    ],
    ids=str,
)
def test_a_checkpoint_of_parts_goes_on_in_any_division(
    before: World, after: World, name: str, left: Any, tmp_path: Path
) -> None:
    """Its round is drawn again, by the same random numbers: the weights are those of one process but for rounding."""
    checkpoint_3 = left(before, f"{name}-resumed") / f"{name}-saved" / "checkpoint-3"
    done = launch(tmp_path, after, "continued", CONTINUED=name, CONTINUED_FROM=str(checkpoint_3))
    assert done.returncode == 0, done.stderr[-6000:]
    alone = load_file(left(ONE, name) / f"{name}.safetensors")
    largest = max(float(value.abs().max()) for value in alone.values())
    for key, value in load_file(tmp_path / "continued.safetensors").items():
        assert float((value - alone[key]).abs().max()) < 1e-4 * largest, key


def test_whole_weights_do_not_go_on_in_parts(left: Any, tmp_path: Path) -> None:
    whole = left(World("ddp", 2), "adam-resumed") / "adam-saved" / "checkpoint-3"
    done = launch(tmp_path, FSDP2, "continued", CONTINUED="adam", CONTINUED_FROM=str(whole))
    assert done.returncode != 0
    assert "was written by processes with whole weights, and this run has 2 processes with sharded" in done.stderr


@pytest.mark.parametrize("world", TOGETHER, ids=str)
def test_samples_do_not_depend_on_the_number_of_processes(world: World, left: Any) -> None:
    assert (left(world, "sampled") / "sampled.json").read_text() == (left(ONE, "sampled") / "sampled.json").read_text()


# ---- as if on GPUs ----


@pytest.mark.parametrize("name", ["full", "lora"])
def test_data_parallel_in_half_precision_steps_as_one_process(name: str, halves: Any) -> None:
    """bfloat16 by autocast, over gloo: one step of SGD, whose differences are those of gradients."""
    before = load_file(halves(ONE) / "before.safetensors")
    alone, together = (load_file(halves(world) / f"{name}.safetensors") for world in (ONE, World("ddp", 2)))
    for key, value in alone.items():
        if name == "full" or "lora_B" in key:
            start = before.get(key, torch.zeros_like(value))
            step, other = value - start, together[key] - start
            assert float((step - other).norm()) <= 2**-7 * float(step.norm()), key  # one rounding of bfloat16


@pytest.mark.parametrize("name", ["full", "lora"])
@pytest.mark.parametrize("world", TOGETHER, ids=str)
def test_in_half_precision_what_is_sampled_is_what_is_trained(world: World, name: str, halves: Any) -> None:
    """By autocast (DDP) or by FSDP2's policy, under which weights themselves are bfloat16 in a forward."""
    [step, *_] = [entry for entry in logs(halves(world), name, keep=("logp_gap",)) if "loss" in entry]
    assert 0 < step["grad_norm"] < 1e3
    assert step["health/logp_gap_mean"] < 0.02


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`halves(world)`: the folder with the runs of that world in half precision."""

    @cache
    def of(world: World) -> Path:
        folder = tmp_path_factory.mktemp(f"half-{world}")
        weights = {name: value.clone() for name, value in tiny_model("llama").state_dict().items()}
        save_file(weights, folder / "before.safetensors")
        done = launch(folder, world, "full", "lora", AS_IF_CUDA="1")
        assert done.returncode == 0, done.stderr[-6000:]
        return folder

    return of


# ---- what may go wrong ----


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_fifty_steps_without_a_hang(world: World, tmp_path: Path) -> None:
    """Packs of different number and size on every process, some of them with none, and prompts drawn anew."""
    done = launch(tmp_path, world, "long")
    assert done.returncode == 0, done.stderr[-6000:]
    assert max(entry["step"] for entry in logs(tmp_path, "long")) == 50


@pytest.mark.parametrize("world", TOGETHER, ids=str)
def test_a_gradient_that_is_not_finite_on_one_process_is_applied_on_none(world: World, tmp_path: Path) -> None:
    """The run ends on all of them after three such steps in a row."""
    done = launch(tmp_path, world, "not_finite")
    assert done.returncode == 0, done.stderr[-6000:]
    assert max(entry["step"] for entry in logs(tmp_path, "not_finite")) == 6
    found = [json.loads(line) for line in (tmp_path / "not_finite/findings.jsonl").read_text().splitlines()]
    assert [finding["step"] for finding in found if finding["code"] == "M131"] == [2, 4, 5, 6]
    assert all(weight.isfinite().all() for weight in load_file(tmp_path / "not_finite.safetensors").values())


@pytest.mark.parametrize("world", WORLDS[:2], ids=str)
def test_a_killed_process_ends_the_run_which_resumes_bit_equal(world: World, tmp_path: Path) -> None:
    undisturbed = launch(tmp_path, world, "adam")
    assert undisturbed.returncode == 0, undisturbed.stderr[-6000:]
    died = launch(tmp_path, world, "killed", DIE_AT="3")
    stopped = time.time()
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr or "exitcode  : -9" in died.stderr
    newest = checkpoint.checkpoints(tmp_path / "killed")[0]
    assert newest.name in ("checkpoint-2", "checkpoint-3")
    assert stopped - newest.stat().st_mtime < 60
    again = launch(tmp_path, world, "killed")
    assert again.returncode == 0, again.stderr[-6000:]
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("adam", "killed"))
    assert all(torch.equal(one[key], other[key]) for key in one)

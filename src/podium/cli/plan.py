"""The plan of `podium check --devices N --gpu NAME`: from its flags, and as a table, as JSON and as a line to type."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podium.console.terminal import plain_text, print_wrapped, table
from podium.errors import ConfigError
from podium.errors.texts import as_line, as_yaml

if TYPE_CHECKING:
    from rich.console import Console

    from podium.planning.layouts import Candidate, Plan
    from podium.trainer.planned import Launch

LAYOUTS = ("ddp", "hsdp", "fsdp2", "zero1", "zero2", "zero3")
"""Names that `--accelerate` takes, the simplest first; the last three need DeepSpeed."""

ON_A_MACHINE = 8
"""Most devices of a machine where `--nodes` does not say how many machines there are."""

LEAST = 5e7
"""Bytes that a row of the table must have somewhere: with fewer it would show zeros."""

CALCULATED = "calculated, not measured"


def layouts_of(devices: int, gpu: str | None, nodes: int | None, accelerate: str | None) -> dict[str, Launch]:
    """The launches to compare, by the names that `--accelerate` takes.

    Raises `ConfigError` for flags that are missing, unknown, or do not go together.
    """
    from podium.cli.launch import HSDP, launch_of
    from podium.models.devices import gpu_named

    if gpu is None:
        raise ConfigError(
            "--devices and --nodes plan a run on GPUs that need not be here, and --gpu is not set: say which they are.",
            fix="--gpu h100, or a size: --gpu 80GB",
        )
    kind = gpu_named(gpu)
    machines = nodes or next(n for n in range(1, devices + 1) if devices % n == 0 and devices // n <= ON_A_MACHINE)
    if devices % machines:
        raise ConfigError(
            f"--devices {devices} --nodes {machines}: --devices counts those of all machines, which have equally many, "
            f"and {devices} cannot be divided by {machines}.",
            fix=f"--devices {(devices // machines + 1) * machines}",
            devices=devices,
            nodes=machines,
        )
    names = LAYOUTS[: None if devices > 1 else 1]
    if not 1 < machines < devices:
        names = tuple(name for name in names if name != HSDP)
    if accelerate is not None:
        names = (accelerate,)
    launches = {name: launch_of(name, devices, machines) for name in names}
    return {name: dataclasses.replace(launch, gpu=kind) for name, launch in launches.items()}


def command(words: Sequence[str], candidate: Candidate) -> str:
    """The words after `podium train` of a run in this layout; on several machines with places for rank and address."""
    launch = candidate.launch
    typed = [*words]
    for name, value in candidate.settings.items():
        typed += [f"--{name}", as_yaml(value)]
    if launch.processes > 1:
        typed += ["--processes", str(launch.processes // launch.machines)]
    if launch.machines > 1:
        typed += ["--nodes", str(launch.machines), "--node-rank", "R", "--rendezvous", "HOST:PORT"]
    if launch.processes > 1 and candidate.layout != LAYOUTS[0]:
        typed += ["--accelerate", candidate.layout]
    return shlex.join(typed)


def print_plan(to: Console, plan: Plan) -> None:
    """A table with a column for each candidate, why some do not fit, and which is the simplest that does."""
    from podium.planning.layouts import SPARE
    from podium.planning.memory import gigabytes

    def say(text: str) -> None:
        print_wrapped(to, plain_text(text))

    if plan.unknown:
        say(f"no plan: {plan.unknown}")
        return
    launch = plan.candidates[0].launch
    assert launch.gpu is not None
    prompts = f"of at most {plan.prompt_tokens:,} tokens" if plan.prompt_tokens else "of unknown length, not counted"
    half = "" if launch.gpu.bfloat16 else "; in float16, as it has no bfloat16"
    say(f"{CALCULATED}: GB on each of {launch.processes} {launch.gpu.described}, prompts {prompts}{half}")
    sized = [(_title(one), one.estimate) for one in plan.candidates if one.estimate is not None]
    if sized:
        rows = [(name, [estimate.parts[name] for _, estimate in sized]) for name in sized[0][1].parts]
        rows.append(("peak", [estimate.peak_bytes for _, estimate in sized]))
        cells = [[name, *(f"{size / 1e9:.1f}" for size in sizes)] for name, sizes in rows if max(sizes) >= LEAST]
        to.print(table([("", "left"), *((title, "right whole") for title, _ in sized)], cells))
    for one in plan.candidates:
        if one.problem:
            say(f"{_title(one)}: {one.problem}")
        if one.settings:
            settings = ", ".join(as_line(name, value) for name, value in one.settings.items())
            say(f"{_title(one)}: with {settings}; without, {gigabytes(one.peak_without)}")
    spare = f"{100 * SPARE:g} %"
    chosen = plan.chosen
    if chosen is None or chosen.estimate is None:
        say(f"None of them fits with {spare} left, {CALCULATED}.")
        return
    fits = f"{gigabytes(chosen.estimate.peak_bytes)} of {gigabytes(launch.gpu.num_bytes)}"
    rule = f" Of {order_of(plan)} it is the first that leaves {spare}." if len(plan.candidates) > 1 else ""
    say(f"{_title(chosen)} fits, {CALCULATED}: {fits}.{rule}")
    if chosen.host_bytes:
        say(f"Loading takes {gigabytes(chosen.host_bytes)} of each machine's own memory.")
    if launch.machines > 1:
        say(f"The line is for each of {launch.machines} machines; R is its number, from 0, HOST:PORT the first one's.")


def order_of(plan: Plan) -> str:
    """Return the order in which `Plan.chosen` takes the candidates, in words."""
    own = [one.layout for one in plan.candidates if one.launch.zero is None]
    of_deepspeed = [one.layout for one in plan.candidates if one.launch.zero is not None]
    return ", ".join([*own, "these with *", *of_deepspeed])


def _title(candidate: Candidate) -> str:
    name = candidate.layout if candidate.launch.processes > 1 else "one process"
    return f"{name} *" if candidate.settings else name


def as_json(plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    """The plan as plain data, sizes in bytes."""
    chosen = plan.chosen
    first = plan.candidates[0].launch if plan.candidates else None
    return {
        "basis": CALCULATED,
        "gpu": dataclasses.asdict(first.gpu) if first is not None and first.gpu is not None else None,
        "devices": None if first is None else first.processes,
        "machines": None if first is None else first.machines,
        "prompt_tokens": plan.prompt_tokens,
        "unknown": plan.unknown,
        "layouts": [_layout_as_json(candidate) for candidate in plan.candidates],
        "chosen": None if chosen is None else plan.candidates.index(chosen),
        "command": None if chosen is None else f"podium train {command(words, chosen)}",
    }


def _layout_as_json(candidate: Candidate) -> dict[str, Any]:
    estimate = candidate.estimate
    return {
        "layout": candidate.layout,
        "settings": dict(candidate.settings),
        "peak_bytes_without": candidate.peak_without or None,
        "fits": candidate.fits,
        "problem": candidate.problem,
        "host_bytes": candidate.host_bytes,
        "peak_bytes": None if estimate is None else estimate.peak_bytes,
        "parts": {} if estimate is None else dict(estimate.parts),
        "tokens_per_pack": None if estimate is None else estimate.tokens_per_pack,
        "gradient_checkpointing": None if estimate is None else estimate.checkpointing,
    }

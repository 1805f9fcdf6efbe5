"""Cases in processes of their own with a time limit, one JSON line each: what the scripts of this folder share.

Cases that share what they prepare (a model, say) are one group, and a group is one process. It writes a line as each of
its cases ends; when it crashes or hangs, its other cases get a line that says so, and the next group begins.

Heavy imports stay inside functions: the process that starts the others needs none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ERROR_LENGTH = 8000
"""Characters of an error that a line keeps."""

Measure = Callable[[str], dict[str, Any]]
"""Runs one case by its name and gives its figures; `ok` among them where the case judges itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a script is told on its command line."""

    device: str
    tiny: bool
    out: Path
    deadline: float
    """Time (`time.time()`) after which no case begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script's groups of cases."""

    name: str
    groups: Callable[[Options], Mapping[str, Sequence[str]]]
    """Names of the cases of each group."""
    prepare: Callable[[str, Options], Measure]
    """Makes what the cases of a group share, in their process."""
    limit: float
    """Seconds that one group may take."""


def main(script: Script) -> int:
    """Run every group, or in a process of its own the one that is named; exit code 1 where a case is not right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and fewer cases, to rehearse the script")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the JSON lines")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no case begins")
    parser.add_argument("--only", help="a group")
    parser.add_argument("--here", action="store_true", help="run that group in this process")
    given = parser.parse_args()
    options = Options(device=given.device, tiny=given.tiny, out=given.out, deadline=time.time() + given.budget)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.here:
        run_group(script, given.only, options)
        return 0
    groups = [given.only] if given.only else list(script.groups(options))
    right = [supervise(script, group, options) for group in groups]
    return int(not all(right))


# ---- the process that starts the others ----


def supervise(script: Script, group: str, options: Options) -> bool:
    """Run one group in a process of its own, and add lines for the cases that it left out; whether all are right."""
    before, started = len(lines(script, options)), time.time()
    left = options.deadline - started
    error = "not begun: no time was left"
    if left > 0:
        flags = ["--device", options.device, "--out", str(options.out.resolve()), *["--tiny"] * options.tiny]
        command = [sys.executable, "-m", f"benchmarks.gpu.{script.name}", "--only", group, "--here", *flags]
        error = run_process([*command, "--budget", f"{left:.0f}"], limit=min(script.limit, left))
    done = lines(script, options)[before:]
    for case in script.groups(options)[group]:
        if case not in {line["case"] for line in done}:
            add_line(script, group, case, options, ok=None if left <= 0 else False, error=error)
    done = lines(script, options)[before:]
    right = sum(bool(line["ok"]) for line in done)
    print(f"{script.name}, {group}: {right} of {len(done)} ok, {time.time() - started:.0f} s", flush=True)
    return right == len(done)


def run_process(command: Sequence[str], *, limit: float, **environment: str) -> str:
    """Run a command, and end all that it started when time is up; how it failed, "" if it did not."""
    surroundings = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=surroundings, start_new_session=True, **pipes)
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"stopped after {limit:.0f} s: {process.communicate()[1][-ERROR_LENGTH:]}"
    return f"exit code {process.returncode}: {errors[-ERROR_LENGTH:]}" if process.returncode else ""


# ---- the process of one group ----


def run_group(script: Script, group: str, options: Options) -> None:
    """Run all cases of a group, one after the other, and write a line for each."""
    import torch

    cases = script.groups(options)[group]
    if options.device == "cpu":
        take_gpu_branches()
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device")  # or the trainer would take the CPU
    measure = script.prepare(group, options)
    for case in cases:
        if time.time() > options.deadline:
            add_line(script, group, case, options, ok=None, error="not begun: no time was left")
            continue
        started = time.perf_counter()
        figures = attempt(measure, case)
        figures["seconds"] = round(time.perf_counter() - started, 2)
        add_line(script, group, case, options, **figures)
        free_memory()


def attempt(measure: Measure, case: str) -> dict[str, Any]:
    """Figures of a case, or how it failed."""
    try:
        return {"ok": True, **measure(case)}
    except Exception as error:  # noqa: BLE001  whatever it is, the other cases are still worth running
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:ERROR_LENGTH]}


def take_gpu_branches() -> None:
    """A CPU computes as a GPU does, in this process: CUDA's row of the table of devices stands under `cpu`.

    float16 gets the scaler that accelerate makes on GPUs alone.
    """
    import torch
    from accelerate import Accelerator

    from podium.models import devices

    devices.KINDS["cpu"] = devices.KINDS["cuda"]
    original = Accelerator.__init__

    def with_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu"), True

    Accelerator.__init__ = with_scaler


# ---- lines ----


def add_line(script: Script, group: str, case: str, options: Options, **figures: Any) -> None:
    """Append one line, and see it written: the next case may end the process."""
    line = {"script": script.name, "group": group, "case": case, "ok": False, "seconds": 0.0, **figures}
    line |= {"device": device_name(options.device), "tiny": options.tiny}
    with (options.out / f"{script.name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def lines(script: Script, options: Options) -> list[dict[str, Any]]:
    """All lines so far."""
    file = options.out / f"{script.name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def device_name(device: str) -> str:
    """The GPU's name where this process uses it: asking would make a context on it."""
    torch = sys.modules.get("torch")
    used = device == "cuda" and torch is not None and torch.cuda.is_initialized()
    return torch.cuda.get_device_name() if used else device


# ---- measuring ----


def synchronize(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Seconds of one call, to the end of the work that it gave to a GPU."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def free_memory() -> None:
    """What the last case held goes back to the device, and its peak is forgotten."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def device_kind(device: str, **changes: Any) -> Iterator[None]:
    """Within this context the device's row of `devices.KINDS` has these values."""
    from podium.models import devices

    before = devices.KINDS[device]
    devices.KINDS[device] = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        devices.KINDS[device] = before


def peak_bytes(device: str) -> int:
    """Most memory of tensors on a GPU since `free_memory`; of a CPU the largest resident size of this process."""
    import resource

    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def waits(device: str) -> Iterator[list[str]]:
    """Within this context, what makes the host wait for the device; to be read afterwards.

    On a GPU torch itself warns of each; on a CPU operators count that would wait on a GPU, transfers left out.
    """
    import warnings

    import torch

    found: list[str] = []
    if device != "cuda":
        with waiting_operators(found):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{x.filename}:{x.lineno}" for x in caught if "called a synchronizing" in str(x.message)]


def waiting_operators(found: list[str]) -> Any:
    """A mode that appends the names of operators whose result a host looks at."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    waiting = {aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.masked_select, aten.equal, aten.is_nonzero}

    class Waiting(TorchDispatchMode):
        """Appends and computes."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in waiting:
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    return Waiting()


# ---- models ----


def random_model(shape: str, dtype: Any, options: Options) -> Any:
    """A model of a known shape (`0.5B`) with random weights on the device; a tiny one in its place if asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.sizing import config_of
    from podium.testing import tiny_model

    if options.tiny:
        return tiny_model("qwen2").to(options.device, dtype)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype).eval()


def autocast_for(dtype: Any, device: str) -> Callable[[], Any]:
    """bfloat16 autocast around float32 weights; nothing around others."""
    import torch

    if dtype != torch.float32:
        return contextlib.nullcontext
    return lambda: torch.autocast(device, dtype=torch.bfloat16)

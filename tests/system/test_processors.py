"""`bf16=True` on processors of other kinds: with fewer instructions, and emulated.

`ATEN_CPU_CAPABILITY` limits torch's own kernels and `ONEDNN_MAX_CPU_ISA` those of oneDNN. Under the latter's `AVX2` the
operators for packed weights raise just as they do on a processor without AVX-512.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("processors.py")

CAPABILITIES = {
    "all": {},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "sse41 products": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2 products": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx2 throughout": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""What is asked for; a processor that has less takes the most that it has."""


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.mark.slow
def test_asked_for_twice_bfloat16_is_used_without_packed_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), "tiny", "insist"]
    assert "rounded True packed False" in run(command, tmp_path, CAPABILITIES["avx2 throughout"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_quickstart_takes_bf16(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "podium", "train", "quickstart", "--bf16", "true"]
    said = run([*command, "--max_steps", "2", "--no-eval"], tmp_path, CAPABILITIES[name])
    assert "step 2/2" in said
    assert (tmp_path / "runs" / "quickstart" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["built-in", "built-in insist"])
@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_script_takes_bf16(name: str, size: str, tmp_path: Path) -> None:
    said = run([sys.executable, str(SCRIPT), str(tmp_path / "run"), *size.split()], tmp_path, CAPABILITIES[name])
    chosen = "rounded True" in said
    assert chosen or "insist" not in size
    assert chosen != ("bf16: true, but bfloat16 does not pay on this processor" in said)


EMULATOR = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")


@pytest.mark.slow
@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-user")
@pytest.mark.parametrize("processor", ["Haswell", "Nehalem"])
def test_an_emulated_older_processor(processor: str, tmp_path: Path) -> None:
    """Haswell has AVX2 and no AVX-512; Nehalem has SSE 4.2 alone. Minutes: every instruction is translated."""
    assert EMULATOR is not None
    emulated = [EMULATOR, "-cpu", processor, str(Path(sys.executable).resolve())]
    program = [str(SCRIPT), str(tmp_path / "run"), "tiny", "insist"]
    said = run([*emulated, *program], tmp_path, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert "rounded True packed False" in said

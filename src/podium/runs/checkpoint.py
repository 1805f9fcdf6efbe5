"""Checkpoints that are either complete and verified, or absent.

A checkpoint is written into a staging folder beside its place; every file is flushed to the disk; a manifest with sizes
and sha256 goes last; then the folder is renamed into place. So a crash at any moment leaves the checkpoints before it
untouched. Resuming takes the newest that verifies, and logs which it skipped and why.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from podium.errors import CheckpointError, PodiumError
from podium.runs.run import STAGES, json_object

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".tmp-checkpoint-"
MODEL_STEP = "model_step.json"
"""Beside the final model of a run: the step of its weights, and the step at which training ended."""
NO_CHECKPOINT = (
    "No checkpoint was written, so this run cannot go on. One that can: the same command with "
    "--save_strategy steps --save_steps 20"
)


@contextmanager
def atomic_folder(final: Path, *, is_main: bool = True, barrier: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A folder to write into; on leaving it becomes `final` in one rename, after an error nothing is left behind.

    `barrier` waits for all ranks; only the main rank renames.
    """
    staging = final.parent / f"{STAGING}{final.name.removeprefix(PREFIX)}"
    try:
        with storing(final):
            if is_main:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            barrier()
            yield staging
            barrier()
            if is_main:
                write_manifest(staging)
                if final.is_symlink() or final.is_file():
                    os.replace(final, final.with_name(f"{final.name}.aside"))
                    logger.warning("%s was no folder; it is now %s.aside.", final, final.name)
                shutil.rmtree(final, ignore_errors=True)  # a damaged one that resuming skipped
                os.rename(staging, final)
                _sync(final.parent)
    except BaseException:
        if is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    barrier()


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an error of writing a file or folder of a run into one message.

    Raises:
        CheckpointError: the disk is full, the folder is gone, or may not be written.
    """
    try:
        yield
    except PodiumError:
        raise
    except Exception as error:
        if (why := _cause(path.parent, error)) is None:
            raise
        saved = next((one for folder in path.parents[:2] for one in checkpoints(folder)), None)
        go_on = f"the same command with --resume_from_checkpoint true goes on from {saved}" if saved else "start again"
        what = f"{path} cannot be written: {why}."
        fix = f"{_REMEDY[why]}; then {go_on}"
        raise CheckpointError(what, code="K003", fix=fix) from error


_FULL = "the disk is full"
_GONE = "its folder is gone, removed or renamed while the run was writing there"
_DENIED = "the folder may not be written, or not any more"
_REMEDY = {
    _FULL: "free space on the disk, or keep fewer checkpoints: `save_total_limit: 2`",
    _GONE: "leave the folder where it is while a run is writing, and give a second run another `output_dir`",
    _DENIED: "give back the right to write there, or another `output_dir`",
}
_LITTLE = 1_000_000
"""Bytes: with less left, a disk counts as full."""


def _cause(folder: Path, error: Exception) -> str | None:
    """A key of `_REMEDY`; None: not an error of the disk. Libraries hide the system's error in texts of their own."""
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "os error 28" in text:
        return _FULL
    hidden = any(words in text for words in ("inline_container", "SerializationError", "I/O error"))
    if not isinstance(error, OSError) and not hidden:
        return None
    if not folder.is_dir():
        return _GONE
    if shutil.disk_usage(folder).free < _LITTLE:
        return _FULL
    return _DENIED if number in (errno.EACCES, errno.EPERM, errno.EROFS) else None


def write_manifest(folder: Path) -> None:
    """Flush every file of the folder to the disk, then record their sizes and digests."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(2) as pool:
        entries = dict(pool.map(lambda path: (path.relative_to(folder).as_posix(), _flush(path)), files))
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=1))
    _sync(manifest)
    copy_permissions(manifest, folder)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _sync(path)


def copy_permissions(file: Path, folder: Path) -> None:
    """Give weights the permissions of `file`, which follow the umask: safetensors lets only the user read them."""
    for weights in folder.rglob("*.safetensors"):
        shutil.copymode(file, weights)


def _flush(path: Path) -> dict[str, int | str]:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: Path) -> str | None:
    """Description of a checkpoint's damage, or None if every file is as it was written."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}, so it was not finished"
    try:
        files = json.loads(manifest.read_text())["files"]
        expected = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    return next(_damaged(folder, expected), None)


def _damaged(folder: Path, expected: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Differences of a folder from its manifest, which gives size and sha256 by name."""
    if unnamed := _unnamed(folder, expected):
        yield f"its {MANIFEST} does not name {unnamed}"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes where {size:,} were written"
        elif _sha256(path) != digest:
            yield f"{name} has other contents than were written (sha256)"


_RESUMED = ("optimizer", "scheduler", "rng_state")
"""Beginnings of the files that a checkpoint has together, or, with `save_only_model`, not at all."""


def _unnamed(folder: Path, names: Collection[str]) -> str | None:
    """A file that every folder of this kind holds and its manifest does not name; None: all are named."""
    if not names:
        return "any file"
    if not folder.name.startswith(PREFIX) or any(name.startswith("global_step") for name in names):  # DeepSpeed's own
        return None
    if "trainer_state.json" not in names:
        return "trainer_state.json"
    missing = [part for part in _RESUMED if not any(name.startswith(part) for name in names)]
    own = {"podium_state.json", "sft_state.json"} & {*names}
    missing += [] if own else ["podium_state.json"]
    return missing[0] if 0 < len(missing) <= len(_RESUMED) else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = [p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of, reverse=True)


def going_on(folders: Sequence[Path], otherwise: str = NO_CHECKPOINT) -> str:
    """Instructions to resume from the newest checkpoint in `folders`; `otherwise`: where there is none."""
    if (newest := next((path for folder in reversed(folders) for path in checkpoints(folder)), None)) is None:
        return otherwise
    return f"To go on from {newest}: the same command with --resume_from_checkpoint true"


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def record_model_step(folder: Path, *, weights: int, training: int) -> None:
    """Write beside the final model of a run which step its weights are of, and at which step training was."""
    (folder / MODEL_STEP).write_text(json.dumps({"weights": weights, "training": training}), encoding="utf-8")


def model_step(folder: Path) -> tuple[int, int] | None:
    """Read the step of the final model's weights and the step at which training ended; None where no file tells."""
    try:
        found = json.loads((folder / MODEL_STEP).read_text(encoding="utf-8"))
        return int(found["weights"]), int(found["training"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest(folder: Path, *, until: int | None = None) -> Path | None:
    """The newest checkpoint that verifies, of those of at most step `until`; None where there is none at all.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    skipped: list[str] = []
    for checkpoint in checkpoints(folder):
        if until is not None and step_of(checkpoint) > until:
            continue
        if (wrong := damage(checkpoint) or _no_step(checkpoint / "trainer_state.json")) is None:
            for line in skipped:
                logger.warning("Skipped %s; resuming from %s.", line, checkpoint.name)
            return checkpoint
        skipped.append(f"{checkpoint.name}: {wrong}")
    if skipped:
        listed = "\n".join(f"  {line}" for line in skipped)
        raise CheckpointError(
            f"No checkpoint in {folder} can be resumed from:\n{listed}",
            fix="start again without resume_from_checkpoint",
            folder=folder,
            listed=listed,
        )
    return None


def resolve_auto(folder: Path, *, asked: str | bool | None) -> str | bool | None:
    """The value of `resume_from_checkpoint`; for `auto` True where a run in `folder` has a checkpoint, else None."""
    if asked != "auto":
        return asked
    record = folder / STAGES
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    stages = [folder / str(stage["folder"]) for stage in json_object(text).get("stages", ())]
    return True if any(checkpoints(path) for path in (folder, *stages)) else None


def to_resume_from(folder: Path, *, asked: str | bool | None) -> str | None:
    """The checkpoint for `resume_from_checkpoint`: True is the newest in `folder` that verifies, a path is itself.

    Raises:
        CheckpointError: there is none, it is none, or it does not verify.
    """
    if not asked:
        return None
    if (found := newest(folder) if asked is True else verified(Path(asked))) is None:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.", fix="Start without resume_from_checkpoint.", folder=folder
        )
    return str(found)


def verified(checkpoint: Path) -> Path:
    """The checkpoint, if it is one and verifies; else `CheckpointError`. One of another trainer has no manifest."""
    state = checkpoint / "trainer_state.json"
    if not state.is_file():
        near = checkpoints(checkpoint.parent)
        listed = f" In {checkpoint.parent} there are {', '.join(p.name for p in reversed(near))}." if near else ""
        what = "has no trainer_state.json" if checkpoint.exists() else "is not there"
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint: it {what}.{listed}",
            fix=f"resume_from_checkpoint: {(near[0] if near else 'true, which takes the newest in output_dir')}",
            checkpoint=checkpoint,
            what=what,
            listed=listed,
        )
    wrong = damage(checkpoint) if (checkpoint / MANIFEST).exists() else None
    wrong = wrong or _no_step(state)
    if wrong is not None:
        raise CheckpointError(
            f"{checkpoint} is damaged: {wrong}.",
            fix="resume_from_checkpoint: true, which takes the newest that is whole",
            checkpoint=checkpoint,
            wrong=wrong,
        )
    return checkpoint


def _no_step(state: Path) -> str | None:
    """Why a `trainer_state.json` gives no step to go on from; None: it does."""
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{state.name} cannot be read"
    return None if isinstance(step, int) else f"{state.name} has the step {step!r}"


def sweep(folder: Path) -> None:
    """Remove half-written checkpoints that a crash has left."""
    for leftover in folder.glob(f"{STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Keep `limit` checkpoints: the newest, the best, and those before them; at least these two."""
    if limit is None or limit <= 0:
        return
    newest = checkpoints(folder)
    order = sorted(newest, key=lambda one: one != newest[0] and not _is(one, best))
    least = len([one for one in newest if one == newest[0] or _is(one, best)])
    for old in order[max(limit, least) :]:
        shutil.rmtree(old, ignore_errors=True)


def _is(folder: Path, best: str | None) -> bool:
    return best is not None and folder.resolve() == Path(best).resolve()

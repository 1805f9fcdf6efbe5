"""What a checkpoint of Podium holds beyond the Trainer's: the round that is being trained on, the reference that has
moved, the entropy controller. Plain numpy arrays, safetensors and JSON: nothing here is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.torch import load_model, save_model

from podium.losses import EntropyControl
from podium.models.loading import Reference
from podium.rounds import Round, from_arrays, to_arrays


def save_state(
    folder: Path, rank: int, round_: Round | None, reference: Reference | None, entropy: EntropyControl
) -> None:
    """Write this rank's part; the first rank also what all share."""
    if round_ is not None:
        np.savez(folder / f"round-{rank}.npz", **to_arrays(round_))
    if rank == 0:
        (folder / "podium_state.json").write_text(json.dumps({"entropy": _finite(asdict(entropy))}))
        if reference is not None and reference.moved:
            save_model(reference.copy, str(folder / "reference.safetensors"))


def load_state(
    folder: Path, rank: int, reference: Reference | None, entropy: EntropyControl
) -> tuple[Round | None, EntropyControl]:
    """What `save_state` wrote; a checkpoint of another trainer has none of it and changes nothing."""
    if reference is not None and (folder / "reference.safetensors").is_file():
        load_model(reference.copy, str(folder / "reference.safetensors"))
        reference.moved = True
    if (folder / "podium_state.json").is_file():
        saved = json.loads((folder / "podium_state.json").read_text())["entropy"]
        entropy = EntropyControl(**{k: float("inf") if v is None else v for k, v in saved.items()})
    path = folder / f"round-{rank}.npz"
    if not path.is_file():
        return None, entropy
    with np.load(path, allow_pickle=False) as arrays:
        return from_arrays(dict(arrays)), entropy


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {k: None if v == float("inf") else v for k, v in values.items()}

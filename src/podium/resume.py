"""What a checkpoint of Podium holds beyond the Trainer's: the round that is being trained on, with `async_rollouts` the
one after it, the reference that has moved, the entropy controller, the weights that adapt, the precision that was
chosen. Plain numpy arrays, safetensors and JSON: nothing here is unpickled.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_model, save_model

from podium import ahead
from podium.ahead import Sampled
from podium.losses import EntropyControl
from podium.models.loading import Reference
from podium.precision import ProductPrecision
from podium.rewards.adaptive import AdaptiveWeights
from podium.rounds import Plan, Round, from_arrays, to_arrays

logger = logging.getLogger(__name__)

STATE = "podium_state.json"
REFERENCE = "reference.safetensors"


class State(NamedTuple):
    """What is saved and restored."""

    round: Round | None
    entropy: EntropyControl
    weights: AdaptiveWeights
    reference: Reference | None
    precision: Any
    plan: Plan
    sharded: bool = False
    """Whether every process writes its part of a reference by itself: see `Processes.save_parts`."""
    ahead: Sampled | None = None
    """The round that is trained on next."""


class Loaded(NamedTuple):
    """What is not restored in place."""

    round: Round | None
    entropy: EntropyControl
    weights: AdaptiveWeights
    ahead: Mapping[str, np.ndarray] | None = None
    """For `ahead.from_arrays`."""


def save(folder: Path, rank: int, state: State) -> None:
    """Write this rank's part; the first rank also what all share."""
    if state.round is not None:
        np.savez(folder / f"round-{rank}.npz", **to_arrays(state.round))
    if state.ahead is not None:
        np.savez(folder / f"ahead-{rank}.npz", **ahead.to_arrays(state.ahead))
    if rank:
        return
    entropy = {name: value if math.isfinite(value) else None for name, value in asdict(state.entropy).items()}
    precision = state.precision.enabled if isinstance(state.precision, ProductPrecision) else None
    contents = {
        "entropy": entropy,
        "reward_weights": state.weights.to_json(),
        "bfloat16_products": precision,
        "plan": _arithmetic(state.plan),
    }
    (folder / STATE).write_text(json.dumps(contents))
    if state.reference is not None and state.reference.moved and not state.sharded:
        assert state.reference.copy is not None
        save_model(state.reference.copy, str(folder / REFERENCE))


def load(folder: Path, rank: int, state: State) -> Loaded:
    """What `save` wrote; a checkpoint of another trainer has none of it and changes nothing.

    The reference and the precision are restored in place: a resumed run must compute as it did, whatever the machine
    would measure now.
    """
    if not (folder / STATE).is_file():
        return Loaded(None, state.entropy, state.weights)
    saved = json.loads((folder / STATE).read_text())
    if saved["bfloat16_products"] is not None and isinstance(state.precision, ProductPrecision):
        state.precision.enabled = saved["bfloat16_products"]
    if state.reference is not None and (folder / REFERENCE).is_file():
        assert state.reference.copy is not None
        load_model(state.reference.copy, str(folder / REFERENCE))
        state.reference.moved = True
    entropy = EntropyControl(**{k: math.inf if v is None else v for k, v in saved["entropy"].items()})
    weights = state.weights.restored(saved.get("reward_weights", {}))
    found = _arrays(folder / f"round-{rank}.npz")
    if found is None or _replanned(saved["plan"], _arithmetic(state.plan), folder):
        return Loaded(None, entropy, weights)
    return Loaded(from_arrays(found), entropy, weights, _arrays(folder / f"ahead-{rank}.npz"))


def _arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Of a file; None: there is none."""
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _arithmetic(plan: Plan) -> dict[str, int]:
    """What all ranks share of the plan."""
    return {name: value for name, value in asdict(plan).items() if name != "rank"}


def _replanned(saved: dict[str, int], now: dict[str, int], folder: Path) -> bool:
    """Whether rounds are cut differently than when the checkpoint was written, so that its round cannot be used."""
    changed = [f"{name} {saved.get(name)} -> {value}" for name, value in now.items() if saved.get(name) != value]
    if changed:
        logger.warning(
            "%s was written with other batch settings (%s): its generation round is drawn anew, so the run will not "
            "be bit-equal to one that was never stopped.",
            folder.name,
            ", ".join(changed),
        )
    return bool(changed)

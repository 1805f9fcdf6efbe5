"""The part of a checkpoint that is GRPO's own: rounds, reference and controllers, written and read back.

Numpy arrays, safetensors and JSON, of which nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from transformers import TrainerState

from podium.algorithm.losses import EntropyControl
from podium.data.images import opened
from podium.errors import CheckpointError, way_on
from podium.models.precision import ProductPrecision
from podium.records import Call, Completion, GivenImages, Group, Prompt, Sample, ScoredGroup, Turn, data_url, is_picture
from podium.rewards.adaptive import AdaptiveWeights
from podium.trainer import resume
from podium.trainer.health import Health
from podium.trainer.resume import OF_OPTIMIZER, REFERENCE, STATE
from podium.trainer.rollouts import Rollouts, make_prompt, round_prompts
from podium.trainer.rounds import Measurements, MicroBatch, Plan, Round, RoundKey, SampledRound

logger = logging.getLogger(__name__)

FORMAT = 6
"""Version of `round-*.npz` and `ahead*-*.npz`."""


class Continued(NamedTuple):
    """What a run goes on from, besides weights and optimizer."""

    entropy: EntropyControl
    weights: AdaptiveWeights
    """Of the reward functions."""
    round: Round | None
    """None: it is drawn again."""


class RunCheckpoint:
    """Writes and reads what a checkpoint has of a run besides the Trainer's files."""

    def __init__(self, rollouts: Rollouts, health: Health) -> None:
        self.rollouts = rollouts
        self.health = health
        self.changed: frozenset[str] = frozenset()
        """Settings that differ from the checkpoint's, and whose states in it are not loaded."""

    @property
    def keeps_optimizer(self) -> bool:
        """Whether the states of optimizer and schedule in the checkpoint are of the kind of this run's."""
        return not self.changed & {*OF_OPTIMIZER}

    def write(
        self,
        staging: Path,
        drawn: Round | None,
        entropy: EntropyControl,
        weights: AdaptiveWeights,
        *,
        is_first: bool,
    ) -> None:
        """Write this process's rounds; where it is the first that writes into the folder, also what all share."""
        run = self.rollouts.run
        rank = run.plan.rank
        reference = run.objective.reference
        precision = run.policy.forward.precision
        rounds: list[tuple[str, Round | SampledRound | None]] = [("round", drawn)]
        rounds += zip(_names_ahead(), self.rollouts.ahead.wait(), strict=False)
        for name, record in rounds:
            if record is not None:
                arrays: dict[str, Any] = to_arrays(record)
                np.savez(staging / f"{name}-{rank}.npz", **arrays)
        if not is_first:
            return
        contents = {
            "entropy": {k: x if math.isfinite(x) else None for k, x in dataclasses.asdict(entropy).items()},
            "reward_weights": weights.to_json(),
            "bfloat16_products": precision.enabled if isinstance(precision, ProductPrecision) else None,
            "plan": _arithmetic(run.plan),
            "made_of": self.health.made_of,
        }
        (staging / STATE).write_text(json.dumps(contents))
        if reference is not None and reference.moved and not run.step.processes.sharded:
            assert reference.copy is not None
            save_model(reference.copy, str(staging / REFERENCE))

    def refuse_others(self, found: Path) -> None:
        """Raise `CheckpointError` where this run cannot continue from a checkpoint; log the changes since it."""
        run = self.rollouts.run
        run.step.processes.check_parts(found)
        with resume.readable(str(found), "trainer_state.json"):
            TrainerState.load_from_json(str(found / "trainer_state.json"))
        with resume.readable(str(found), STATE):
            differences = list(resume.differences(found, self.health.made_of))
        for finding in differences:
            if self.health.overrules(finding):
                self.changed |= finding.changes.keys()
            elif finding.severity == "error":
                raise CheckpointError(
                    f"{finding.what}.", code=finding.code, fix=way_on(finding), findings=[finding], what=finding.what
                )
            elif not run.plan.rank:
                logger.warning("%s; %s.", finding.what, finding.why)

    def read(self, folder: Path, entropy: EntropyControl, weights: AdaptiveWeights) -> Continued:
        """Read what `write` wrote; a checkpoint of another trainer has none of it and changes nothing.

        The precision is restored as well: a resumed run must compute as it did, whatever would be measured now.
        """
        run = self.rollouts.run
        reference = run.objective.reference
        precision = run.policy.forward.precision
        if not (folder / STATE).is_file():
            return Continued(entropy, weights, None)
        saved = json.loads((folder / STATE).read_text())
        if saved["bfloat16_products"] is not None and isinstance(precision, ProductPrecision):
            precision.enabled = saved["bfloat16_products"]
        if reference is not None and (folder / REFERENCE).is_file():
            assert reference.copy is not None
            load_model(reference.copy, str(folder / REFERENCE))
            reference.moved = True
        return Continued(
            EntropyControl(**{k: math.inf if v is None else v for k, v in saved["entropy"].items()}),
            weights.restored(saved.get("reward_weights", {})),
            self._saved_round(folder, saved["plan"]),
        )

    def _saved_round(self, folder: Path, plan: dict[str, int]) -> Round | None:
        """The round that was trained on, and those ahead of it for the rollouts; None where batches are cut
        otherwise now."""
        run = self.rollouts.run
        saved = folder / f"round-{run.plan.rank}.npz"
        if not saved.is_file() or _replanned(plan, _arithmetic(run.plan), folder):
            return None
        drawn: Round = self._read(saved)
        ahead = (folder / f"{name}-{run.plan.rank}.npz" for name in _names_ahead())
        for file in itertools.takewhile(Path.is_file, itertools.islice(ahead, run.args.async_rollouts)):
            self.rollouts.ahead.restore(self._read(file))
        return drawn

    def _read(self, file: Path) -> Any:
        with np.load(file, allow_pickle=False) as arrays:
            return from_arrays(dict(arrays), self._prompt)

    def _prompt(self, key: RoundKey, id: int, index: int) -> Prompt:
        """A prompt that was drawn before; rows of a stream (index -1) are found by their place in the round."""
        run = self.rollouts.run
        if index < 0:
            return round_prompts(run, key, [id])[0]
        return make_prompt(run, run.rows.order.dataset[index], id, index)


def _names_ahead() -> Iterator[str]:
    """Names of the files of the rounds ahead: `ahead`, `ahead2` and so on."""
    yield "ahead"
    for place in itertools.count(2):
        yield f"ahead{place}"


def _arithmetic(plan: Plan) -> dict[str, int]:
    """The part of the plan that all ranks share."""
    return {**{name: value for name, value in dataclasses.asdict(plan).items() if name != "rank"}, "format": FORMAT}


def _replanned(saved: dict[str, int], now: dict[str, int], folder: Path) -> bool:
    """Whether rounds are cut differently than when the checkpoint was written, so that its round cannot be used."""
    changed = [f"{name} {saved.get(name)} -> {value}" for name, value in now.items() if saved.get(name) != value]
    if changed:
        logger.warning(
            "%s was written with other batch settings (%s): its generation round is drawn again, so the run will not "
            "be bit-equal to one that was never stopped.",
            folder.name,
            ", ".join(changed),
        )
    return bool(changed)


# ---- rounds as arrays ----

_SAVED = (Round, RoundKey, MicroBatch, Sample, SampledRound, Measurements, ScoredGroup, Group, Completion)
_RECORDS: Mapping[str, type] = {record.__name__: record for record in _SAVED}


_IMAGE = "podium.image"
"""The key of an image in JSON: its data URL."""

Plain = Callable[[Any], Any]
"""Makes JSON of a record, with its arrays beside it."""


def _of_prompt(prompt: Prompt, plain: Plain) -> dict[str, Any]:
    """A prompt; the images of a row, and with them its conversation, are too large to be saved and made again."""
    of_row = bool(prompt.images) and prompt.images[0].prompt is not None
    own = (None, None) if of_row else (prompt.content, plain(prompt.images))
    return {"prompt": [prompt.id, prompt.row, prompt.token_ids, prompt.text, *own]}


def _of_images(images: GivenImages, plain: Plain) -> dict[str, Any]:
    """Images, for `_given` where they are not those of a row."""
    if images.prompt is not None:
        return {"images": images.prompt}
    described = (images.fields, images.token_fields)
    arrays = [[[name, x.numpy()] for name, x in tensors.items()] for tensors in described]
    return {"given": plain([images.digest.hex(), images.placeholder, images.start, images.placeholders, *arrays])}


def _given(digest: str, placeholder: int, start: int, placeholders: np.ndarray, *arrays: Any) -> GivenImages:
    """The inverse of `_of_images`."""
    fields, token_fields = ({name: torch.from_numpy(x) for name, x in named} for named in arrays)
    return GivenImages(
        digest=bytes.fromhex(digest),
        placeholder=placeholder,
        placeholders=placeholders,
        fields=fields,
        token_fields=token_fields,
        start=start,
    )


def _of_turn(turn: Turn, _: Plain) -> dict[str, Any]:
    return {"turn": dataclasses.asdict(turn)}


_PLAIN: Mapping[type, Callable[[Any, Plain], dict[str, Any]]] = {
    Prompt: _of_prompt,
    GivenImages: _of_images,
    Turn: _of_turn,
}
"""Records that have a form of their own."""


def _in_json(value: Any) -> Any:
    """A value that JSON lacks: an image as a data URL, anything else as its text."""
    return {_IMAGE: data_url(value)} if is_picture(value) else str(value)


def _of_json(value: dict[str, Any]) -> Any:
    """The inverse of `_in_json` for images."""
    return opened(value[_IMAGE], "an image of the checkpoint") if value.keys() == {_IMAGE} else value


def _turn(fields: Mapping[str, Any]) -> Turn:
    calls = tuple(Call(**call) for call in fields["calls"])
    return Turn(**{**fields, "calls": calls, "replies": tuple(fields["replies"])})


def saved_fields(record: Any) -> list[str]:
    """Names of the fields of a record that a checkpoint has."""
    return [field.name for field in dataclasses.fields(record) if field.metadata.get("saved", True)]


def to_arrays(record: Round | SampledRound) -> dict[str, np.ndarray]:
    """A round as JSON with the numbers of its arrays beside it. Prompts are saved by id and row, and made again."""
    flat: dict[str, list[np.ndarray]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            flat.setdefault(value.dtype.name, []).append(value.ravel())
            return {"array": [value.dtype.name, *value.shape]}
        if type(value) in _PLAIN:
            return _PLAIN[type(value)](value, plain)
        if type(value).__name__ in _RECORDS:
            names = getattr(value, "_fields", None) or saved_fields(value)
            return {type(value).__name__: {name: plain(getattr(value, name)) for name in names}}
        if isinstance(value, Mapping):
            return {"columns": dict(value)}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    text = json.dumps(plain(record), default=_in_json)
    joined = {name: np.concatenate(arrays) for name, arrays in flat.items()}
    return {"json": np.frombuffer(text.encode(), np.uint8), **joined}


def from_arrays(arrays: Mapping[str, np.ndarray], prompt: Callable[[RoundKey, int, int], Prompt]) -> Any:
    """The inverse of `to_arrays`. `prompt` makes a prompt of a round from its id and row."""
    read = dict.fromkeys(arrays, 0)
    contents = json.loads(arrays["json"].tobytes(), object_hook=_of_json)
    [fields] = contents.values()
    key = RoundKey(**fields["key"]["RoundKey"])

    def prompt_as_it_was(inside: Sequence[Any]) -> Prompt:
        """A prompt of the row, with all that an environment may have added to it."""
        id, row, token_ids, text, content, images = inside
        again = dataclasses.replace(prompt(key, id, row), token_ids=tuple(token_ids), text=text)
        return again if images is None else dataclasses.replace(again, content=content, images=record(images))

    made: Mapping[str, Callable[[Any], Any]] = {
        "prompt": prompt_as_it_was,
        "images": lambda inside: prompt(key, *inside).images[0],
        "given": lambda inside: _given(*map(record, inside)),
        "turn": _turn,
        "columns": lambda inside: {name: tuple(values) for name, values in inside.items()},
    }

    def record(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(record, value))
        if not isinstance(value, dict):
            return value
        [(kind, inside)] = value.items()
        if kind == "array":
            name, *shape = inside
            start = read[name]
            read[name] = read[name] + math.prod(shape)
            return arrays[name][start : read[name]].reshape(shape)
        if kind in made:
            return made[kind](inside)
        return _RECORDS[kind](**{name: record(item) for name, item in inside.items()})

    return record(contents)

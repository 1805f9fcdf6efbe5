"""The formats of Tinker's client: protobuf for data and their results, JSON for everything else.

Shape letters: L positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from podium.errors import ConfigError, DataError, PodiumError
from podium.errors.texts import named_list
from podium.lazy import LazyModule
from podium.records import Group, Sample
from podium.trainer.loop_arguments import datum

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb
else:  # the client is no requirement of Podium
    pb = LazyModule("tinker.proto.tinker_public_pb2")

_DTYPES = {"DTYPE_FLOAT32": np.float32, "DTYPE_INT64": np.int64, "DTYPE_INT32": np.int32}


def not_offered(kind: type[PodiumError], what: str) -> PodiumError:
    """The error about what a client asks for and this server does not have."""
    return kind(
        f"This server does not offer {what}.", fix="docs/guide.md#tinkers-client lists what it offers", what=what
    )


class Sequenced(NamedTuple):
    """A datum of the client as the loop takes it."""

    sample: Sample
    length: int
    """Positions that it has at the client, the first of them before those of the datum."""


def read_data(content: bytes) -> pb.ForwardBackwardRequest:
    """The message of a request. Raises `DataError` for other bytes."""
    from google.protobuf.message import DecodeError

    try:
        return pb.ForwardBackwardRequest.FromString(content)
    except DecodeError as error:
        raise not_offered(DataError, f"what is no request of this client ({error})") from None


def sequences(message: pb.ForwardBackwardRequest) -> list[Sequenced]:
    """The data of a request.

    Raises:
        ConfigError: settings of the loss.
        DataError: what is no sequence of tokens with a weight for each.
    """
    if message.loss_fn_config_v2:
        raise not_offered(ConfigError, "`loss_fn_config`")
    return [_sequenced(datum, message, place) for place, datum in enumerate(message.data)]


def _sequenced(message: pb.Datum, request: pb.ForwardBackwardRequest, place: int) -> Sequenced:
    """A datum, from its first position with a weight or a log-probability; from the first of all without gradients."""
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in message.model_input):
        raise not_offered(DataError, "an input that is no text")
    inputs_L = np.frombuffer(b"".join(chunk.encoded_text.tokens for chunk in message.model_input), np.int32)
    given = {name: _array(tensor, name, place, len(inputs_L)) for name, tensor in message.loss_fn_inputs.items()}
    ones_L = np.ones(len(inputs_L), np.float32)
    likely = request.loss_fn == "cross_entropy"
    given = {"weights": ones_L, **given} if likely else given
    needed = ("target_tokens", "weights") if likely else ("target_tokens", "advantages", "logprobs")
    if missing := [name for name in needed if name not in given]:
        raise DataError(
            f"Sequence {place} has no {named_list(missing)}, which {request.loss_fn} needs.",
            place=place,
            missing=missing,
            loss=request.loss_fn,
        )
    targets_L, weights_L, *logps = (given[name] for name in needed)
    wrong_L = (targets_L[:-1] != inputs_L[1:]) & (weights_L[:-1] != 0)
    if wrong_L.any():
        raise DataError(
            f"Sequence {place}: the target of position {int(wrong_L.argmax())} is not the next token of the input.",
            fix="a weight of 0 there, or targets that are the input moved by one",
            place=place,
            at=int(wrong_L.argmax()),
        )
    used = np.flatnonzero(ones_L if request.forward_only else np.any([weights_L, *logps], axis=0))
    first = int(used[0]) if len(used) else len(inputs_L) - 1
    ids = [*inputs_L.tolist(), int(targets_L[-1])]
    logps_L = logps[0][first:] if logps else None
    return Sequenced(datum(ids[: first + 1], ids[first + 1 :], weights_L[first:], logps_L), len(inputs_L))


def _array(message: pb.Tensor, name: str, place: int, length: int) -> np.ndarray:
    """A tensor of one number for each position."""
    dtype = _DTYPES.get(pb.DType.Name(message.dtype))
    if message.WhichOneof("encoding") != "dense" or dtype is None:
        raise not_offered(DataError, f"a sparse tensor, or one of another type ({name})")
    array = np.frombuffer(message.dense, dtype)
    if array.shape != (length,) or not length:
        raise DataError(
            f"Sequence {place}: `{name}` has {len(array)} numbers, and the input {length} tokens.",
            fix="one number for each token of model_input",
            place=place,
            name=name,
            given=len(array),
            length=length,
        )
    return array


def write_output(given: Sequence[Sequenced], logps: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput`: log-probabilities for each position, 0 before those of the datum."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    padded = [np.pad(x, (datum.length - len(x), 0)).astype(np.float32) for datum, x in zip(given, logps, strict=True)]
    field = message.loss_fn_outputs.add(num_datums=len(padded)).fields["logprobs"]
    field.dtype = pb.DTYPE_FLOAT32
    field.data = b"".join(array.tobytes() for array in padded)
    field.offsets = np.cumsum([0, *(array.nbytes for array in padded)]).astype(np.int64).tobytes()
    return message.SerializeToString()


def write_sample(
    group: Group, stops: Sequence[str], decode: Callable[[list[int]], str], prompt_logps: np.ndarray | None
) -> bytes:
    """A `SampleResponse` with the completions of a prompt, each cut behind the first of `stops` in its text."""
    message = pb.SampleResponse()
    for completion in group.completions:
        ids = np.asarray(completion.token_ids, np.int32)
        ends = (end for end in range(1, len(ids) + 1) if any(x in decode(ids[:end].tolist()) for x in stops))
        end = next(ends, None) if stops else None
        message.sequences.add(
            stop_reason="STOP_REASON_STOP" if end or completion.finish == "stop" else "STOP_REASON_LENGTH",
            tokens=ids[:end].tobytes(),
            logprobs=np.asarray(completion.logps[:end], np.float32).tobytes(),
        )
    if prompt_logps is not None:
        message.prompt_logprobs = np.concatenate([[np.nan], prompt_logps]).astype(np.float32).tobytes()
    return message.SerializeToString()

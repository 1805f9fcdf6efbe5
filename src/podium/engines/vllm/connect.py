"""Everything that is checked of a server before weights load; each mistake with the line to type."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from packaging.version import InvalidVersion, Version
from transformers import AutoConfig, PretrainedConfig

from podium.engines.table import OLDEST, EngineInputs, VllmSettings
from podium.engines.vllm.colocate import ColocatedEngine, build, check_installed
from podium.engines.vllm.engine import Member, ServerEngine
from podium.engines.vllm.requests import PROCESSED, call_of, image_parts, read
from podium.engines.vllm.server import NEEDS_TOP_K, ServerGone, ServerRefused, VllmServer, first_up, is_here
from podium.engines.vllm.weights import BACKENDS, AdapterFolder, Broadcast, Folder, Transfer, is_alone, rank_alone
from podium.errors import ConfigError, EngineError, ModelError
from podium.models.builtin import resolve_model
from podium.models.stored import auto_class
from podium.records import Prompt, RolloutRequest, SamplingSettings

logger = logging.getLogger(__name__)

EXTENSION = "podium_worker.FreshHead"
"""For servers on a CPU."""
WORKER = Path(__file__).with_name("worker")
"""The folder in which a server finds it."""
WITH_IMAGES = "--enable-scale-out"
"""The flag of a server that takes images."""
MASKS = f"--return-sampling-mask {WITH_IMAGES}"
"""Flags of a server whose answers have the tokens that filters left."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `--max-lora-rank` that vLLM accepts."""
CPU_CACHE = 2
"""GiB of a CPU server for keys and values; vLLM itself would ask for 92 % of the memory, and a trainer needs some."""
WEIGHTS = "weights-for-vllm"
"""A folder in `output_dir`, while the run lasts."""

misfit = functools.partial(ConfigError, code="C034")
"""The error of a server that a run cannot sample from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that can do what a run needs."""

    server: VllmServer
    model: str
    """The name to ask for."""
    longest: int
    """Tokens of a prompt with its completion."""
    dtype: torch.dtype
    backend: str
    """The backend in its `--weight-transfer-config`; empty if it was started without one."""
    takes_adapters: bool
    """Whether the adapter that is trained can be sent without its base."""
    logprobs_mode: str
    """vLLM's setting that decides which distribution its log-probabilities are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The servers of a run."""

    present: tuple[Served, ...]
    absent: tuple[VllmServer, ...]
    """Servers that did not answer; they may come later."""
    look: Callable[[VllmServer], Served]
    """Checks one that came. Raises `ConfigError` and `ModelError`."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its completion, at every server that is there."""
        return min(served.longest for served in self.present)

    def with_images(self, example: Prompt) -> Pool:
        """See `engines.table.Connection`; servers that come later are tried, too."""

        def look(server: VllmServer) -> Served:
            served = self.look(server)
            _try_images(served, example)
            return served

        for served in self.present:
            _try_images(served, example)
        return replace(self, look=look)


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    """vLLM in this environment, for an engine in this process."""

    model: str
    """The name or folder that it loads."""
    longest: int | None
    """Tokens of a prompt with its completion; None: what the model has positions for."""

    def with_images(self, _: Prompt) -> Colocated:
        """See `engines.table.Connection`: what vLLM takes is known when its engine is there."""
        return self


def connect(
    settings: VllmSettings, model: Any, config: PretrainedConfig, *, adapter: Any = None, waits: bool = True
) -> Pool | Colocated:
    """See `engines.table.connect_vllm`."""
    model = resolve_model(model) if isinstance(model, str) else config._name_or_path
    if settings.mode != "server":
        check_installed(settings)
        return Colocated(model=model, longest=settings.max_model_length)
    rank = rank_alone(adapter)
    images = getattr(config, "image_token_id", None) is not None
    servers = [VllmServer(url, seconds=settings.server_timeout) for url in urls_of(settings)]

    def look(server: VllmServer) -> Served:
        line = serve_line(settings, model, server.url, rank, images=images)
        try:
            return _served(settings, model, config, server, line, rank)
        except (ServerGone, ServerRefused) as error:
            raise misfit(error.what, fix=f"Is it a vLLM server? {line}") from None

    try:
        first_up(servers, settings.server_timeout if waits else 0)
    except ServerGone as error:
        line = serve_line(settings, model, servers[0].url, rank, images=images)
        raise misfit(error.what, fix=f"Start it: {line}") from None
    present = [server for server in servers if server.is_up()]
    absent = [server for server in servers if server not in present]
    for server in absent:
        logger.warning("No vLLM server answers at %s yet; it is asked again before each round.", server.url)
    return Pool(present=tuple(look(server) for server in present), absent=tuple(absent), look=look)


def _served(
    settings: VllmSettings, model: str, config: PretrainedConfig, server: VllmServer, line: str, rank: int | None
) -> Served:
    info = _development(server, line)
    [first, *others] = [card for card in server.call("/v1/models")["data"] if not card.get("parent")]
    _check_model(model, config, str(first["root"]), server, line)
    longest = int(first["max_model_len"])
    mode = str(info["model_config"]["logprobs_mode"])
    on_cpu = (info.get("device_config") or {}).get("device") == "cpu"
    lora = info.get("lora_config") or {}
    takes_adapters = bool(rank and lora and server.takes_adapters())
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
    server.refreshes_head = on_cpu and tied and not takes_adapters
    server.needs_top_k = bool(info["model_config"].get("return_sampling_mask"))
    server.returns_masks = settings.replays and server.needs_top_k
    if settings.replays and not server.needs_top_k:
        logger.warning(
            "The vLLM server at %s does not say which tokens top_p, top_k and min_p left: training normalizes over all "
            "tokens, as with sampling_replay: false. With top_k, and on a GPU, start it with %s.",
            server.url,
            MASKS,
        )
    mistakes = (
        (
            settings.max_completion_length >= longest,
            f"takes {longest} tokens of prompt and completion together, and max_completion_length alone is "
            f"{settings.max_completion_length}.",
            "Start it with a larger --max-model-len",
        ),
        (
            mode != PROCESSED and settings.importance_sampling_correction,
            f"was started with --logprobs-mode {mode}: its log-probabilities are not those of the distribution that it "
            "draws from, so they cannot be corrected by.",
            "Start it again",
        ),
        (
            on_cpu and (info.get("scheduler_config") or {}).get("enable_chunked_prefill"),
            "runs on a CPU and cuts long prefills into chunks: it would die of the first round that does not fit one, "
            "as random numbers are seeded (`CPU Generator does not use offset`).",
            "Start it again",
        ),
        (
            server.refreshes_head and EXTENSION not in str(info["parallel_config"].get("worker_extension_cls")),
            "runs on a CPU, where its head, which this model ties to the embedding, would keep the weights that it "
            "began with.",
            "Start it again, with an extension that comes with Podium",
        ),
        (
            server.needs_top_k and not settings.top_k,
            *NEEDS_TOP_K,
        ),
        (
            takes_adapters and int(lora["max_lora_rank"]) < (rank or 0),
            f"takes adapters of rank {lora.get('max_lora_rank')} at most, and the one that is trained has rank {rank}.",
            "Start it again",
        ),
    )
    for found, what, fix in mistakes:
        if found:
            raise misfit(f"The vLLM server at {server.url} {what}", fix=f"{fix}: {line}")
    if others:
        logger.warning("The vLLM server offers %d models; %s is asked.", 1 + len(others), first["id"])
    return Served(
        server=server,
        model=str(first["id"]),
        longest=longest,
        dtype=getattr(torch, str(info["model_config"]["dtype"]).removeprefix("torch.")),
        backend=str((info.get("weight_transfer_config") or {}).get("backend", "")),
        takes_adapters=takes_adapters,
        logprobs_mode=mode,
    )


def _try_images(served: Served, example: Prompt) -> None:
    """Have a server draw one token behind a prompt with images. Raises `ConfigError` where it does not take them so."""
    server = served.server
    if served.logprobs_mode != PROCESSED:
        raise misfit(
            f"Rows have images, and the vLLM server at {server.url} was started with --logprobs-mode "
            f"{served.logprobs_mode}, which does not tell the share of the tokens that stand for images.",
            fix=f"Start it again with --logprobs-mode {PROCESSED}.",
        )
    request = RolloutRequest(token_ids=example.token_ids, prompt_id=0, max_tokens=1, images=example.images)
    never = tuple({images.placeholder for images in example.images})
    settings = SamplingSettings(num_completions=1, max_tokens=1, top_k=1, never=never)
    parts = [part for images in example.images for part in image_parts(images)]
    try:
        read(server.call(*call_of(served.model, request, settings, parts=parts)), request, settings)
    except ServerRefused as refused:
        if refused.status not in (403, 404):
            raise misfit(refused.what, fix="Its own last lines say more; start it for images.") from None
        raise misfit(
            f"Rows have images, for which the vLLM server at {server.url} lacks the route: it was started without "
            f"{WITH_IMAGES}.",
            fix=f"Start it again with {WITH_IMAGES}.",
        ) from None
    except EngineError as error:
        raise misfit(error.what, fix=error.fix) from None
    server.keeps_images = True


def _development(server: VllmServer, line: str) -> dict[str, Any]:
    """The server's configuration, from a server that has the routes for weights."""
    version = str(server.call("/version")["version"])
    try:
        if Version(version) < OLDEST:
            raise misfit(
                f"The vLLM server at {server.url} is version {version}; Podium needs {OLDEST} or newer, which keeps a "
                "version with its weights.",
                fix=f'In its environment: pip install "vllm>={OLDEST}"',
            )
    except InvalidVersion:  # built from source
        logger.warning("The vLLM server says that its version is %s.", version)
    try:
        info = server.info()
        server.weight_version()
    except ServerRefused as refused:
        if refused.status != 404:
            raise
        raise misfit(
            f"The vLLM server at {server.url} lets nobody change its weights: it was started without "
            "VLLM_SERVER_DEV_MODE=1.",
            fix=f"Start it again: {line}",
        ) from None
    return info


def _check_model(model: str, config: PretrainedConfig, root: str, server: VllmServer, line: str) -> None:
    """Whether the weights of one fit into the other: the same name, or the same tensors."""
    if root == model or (Path(root).is_dir() and Path(model).is_dir() and Path(root).samefile(model)):
        return
    try:
        theirs = AutoConfig.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError):
        logger.warning("The vLLM server serves %s, which cannot be looked at from here; %s is trained.", root, model)
        return
    with torch.device("meta"):  # where no weight takes memory
        models = [auto_class(described).from_config(described) for described in (config, theirs)]
    ours, other = ({name: p.shape for name, p in empty.named_parameters()} for empty in models)
    different = sorted(name for name in ours.keys() | other.keys() if ours.get(name) != other.get(name))
    if different:
        name = different[0]
        shapes = [str(list(x[name])) if name in x else "missing" for x in (ours, other)]
        raise ModelError(
            f"The vLLM server at {server.url} serves {root}, which is another model than {model}: {name} "
            f"is {shapes[0]} in training and {shapes[1]} on the server ({len(different)} tensors differ).",
            code="C034",
            fix=f"Start it with the model that is trained: {line}",
            settings=(name,),
            url=server.url,
            root=root,
            model=model,
            name=name,
            shapes=shapes[0],
            second_said=shapes[1],
            different_count=len(different),
            line=line,
        )


# ---- where it is, and how weights get there ----


def urls_of(settings: VllmSettings) -> list[str]:
    """The servers' addresses, as TRL reads the settings; a list, or one after the other with commas between.

    Without a scheme an address is http, and OpenAI's `/v1` is taken off.

    Raises:
        ConfigError: one is no address, or is given twice.
    """
    name = "vllm_server_base_url" if settings.server_base_url else "vllm_server_host"
    asked = settings.server_base_url or f"{settings.server_host}:{settings.server_port}"
    addresses = asked.split(",") if isinstance(asked, str) else asked
    urls = [_url_of(name, str(address).strip()) for address in addresses]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise misfit(f"{name}: {twice} is given twice.", fix="Name every server once.")
    return urls


def _url_of(name: str, address: str) -> str:
    url = (address if "://" in address else f"http://{address}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlparse(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return url
    except ValueError:  # of the port
        pass
    raise misfit(f"{name}: {address} is no address of a server.", fix="vllm_server_base_url: http://127.0.0.1:8000")


def serve_line(settings: VllmSettings, model: str, url: str, rank: int | None, *, images: bool = False) -> str:
    """The command that starts a server for a run.

    Args:
        settings: the run's.
        model: the name or folder of the model.
        url: the server's address.
        rank: of an adapter that is sent without its base; None: there is none.
        images: whether the model reads images.
    """
    port = urlparse(url).port or 8000
    room = settings.max_prompt_length and settings.max_prompt_length + settings.max_completion_length
    longest = f" --max-model-len {room}" if room else ""
    on_gpu = settings.device.type == "cuda"
    variables = ["VLLM_SERVER_DEV_MODE=1"]
    flags = f"--logprobs-mode {PROCESSED}{longest}"
    if rank:
        variables.append("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        flags += f" --enable-lora --max-lora-rank {next((most for most in LORA_RANKS if most >= rank), rank)}"
    elif not on_gpu:
        variables.insert(0, f"PYTHONPATH={shlex.quote(str(WORKER))}")
        flags += f" --worker-extension-cls {EXTENSION}"
    if on_gpu:
        flags += """ --weight-transfer-config '{"backend": "nccl"}'"""
    if on_gpu and settings.replays and settings.top_k:
        flags += f" {MASKS}"
    elif images:
        flags += f" {WITH_IMAGES}"
    if not on_gpu:
        variables.insert(-1, f"VLLM_CPU_KVCACHE_SPACE={CPU_CACHE}")
        # Compiled, a model of 135 million parameters starts in four minutes on two cores; eager, in 70 s.
        flags += " --no-enable-chunked-prefill --enforce-eager"
    return f"{' '.join(variables)} vllm serve {shlex.quote(model)} --host 127.0.0.1 --port {port} {flags}"


def member_of(pool: Pool, inputs: EngineInputs) -> Callable[[Served], Member]:
    """The function that makes a member of a run's pool, with the way of weights to it.

    An adapter goes alone, through files, where that is all that is trained and every server that is there takes it.
    Else weights go over NCCL from a GPU to a server that was started for it, or through a folder that both see.

    The function raises `ConfigError` where weights have no way to a server.
    """
    settings = inputs.vllm
    assert settings is not None
    folder = settings.weights_folder
    here = settings.process_index == 0
    on_gpu = settings.device.type == "cuda"
    root = Path(folder or settings.output_dir) / WEIGHTS
    see_files = folder is not None or all(is_here(served.server.url) for served in pool.present)
    alone = see_files and is_alone(inputs.policy) and all(served.takes_adapters for served in pool.present)
    kinds = {served.dtype for served in pool.present}
    dtype = torch.float32 if torch.float32 in kinds else pool.present[0].dtype
    files = AdapterFolder(root, dtype, here=here) if alone else Folder(root, dtype, here=here)

    def way(served: Served) -> Transfer:
        server = served.server
        if alone and not served.takes_adapters:
            raise misfit(
                f"The vLLM server at {server.url} takes no adapters, as the others do.",
                fix="Start it as the others: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora.",
            )
        if folder is None and served.backend in BACKENDS and not alone and (on_gpu or served.backend != "nccl"):
            if importlib.util.find_spec("vllm") is None:
                raise misfit(
                    f"Weights go to the vLLM server by its backend {served.backend}, for which vLLM is needed in this "
                    "environment, too.",
                    fix="pip install vllm; or set vllm_weights_folder, and weights go through files.",
                )
            if settings.async_rollouts > 1:
                raise misfit(
                    f"async_rollouts: {settings.async_rollouts} keeps weights until their round begins, and those that "
                    f"go to the vLLM server by its backend {served.backend} are not kept.",
                    fix="Set vllm_weights_folder, and weights go through files; or set async_rollouts: 1.",
                )
            port = settings.group_port + urls_of(settings).index(server.url)
            return Broadcast(server, served.backend, served.dtype, port=port, here=here)
        if folder is None and not is_here(server.url):
            raise misfit(
                f"The vLLM server at {server.url} is on another machine, and weights have no way to it.",
                fix="Set vllm_weights_folder to a folder that both machines see under the same path; or, with a GPU, "
                """start the server with --weight-transfer-config '{"backend": "nccl"}'.""",
            )
        return files

    return lambda served: Member(served.server, served.model, way(served))


def engine_of(inputs: EngineInputs) -> ServerEngine | ColocatedEngine:
    """The engine of a run. Raises `ConfigError` where weights have no way to the server."""
    ready = inputs.served
    settings = inputs.vllm
    assert settings is not None
    if isinstance(ready, Colocated):
        return ColocatedEngine(
            build(settings, ready.model, ready.longest),
            inputs.tokenizer,
            tensor_parallel_size=settings.tensor_parallel_size,
            sleeps=settings.enable_sleep_mode,
        )
    assert isinstance(ready, Pool)
    member = member_of(ready, inputs)
    return ServerEngine(
        [member(served) for served in ready.present],
        inputs.tokenizer,
        absent=ready.absent,
        join=lambda server: member(ready.look(server)),
        is_main=settings.process_index == 0,
        agree=inputs.agree,
        casts_weights=any(served.dtype != torch.float32 for served in ready.present),
        newest_checkpoint=settings.newest_checkpoint,
    )

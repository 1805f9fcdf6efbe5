"""Everything that is checked of a server before weights load; each mistake with the line to type."""

from __future__ import annotations

import functools
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from packaging.version import InvalidVersion, Version
from transformers import AutoConfig, PretrainedConfig
from trl.import_utils import is_vllm_available

from podium.engines.table import OLDEST, EngineInputs, VllmSettings
from podium.engines.vllm.colocate import ColocatedEngine, build, check_installed
from podium.engines.vllm.engine import ServerEngine
from podium.engines.vllm.requests import PROCESSED
from podium.engines.vllm.server import ServerGone, ServerRefused, VllmServer, is_here
from podium.engines.vllm.weights import Folder, Nccl
from podium.errors import ConfigError, EngineError, ModelError
from podium.models.builtin import resolve_model
from podium.models.stored import auto_class

logger = logging.getLogger(__name__)

EXTENSION = "podium_worker.FreshHead"
"""For servers on a CPU."""
WORKER = Path(__file__).with_name("worker")
"""The folder in which a server finds it."""
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
    takes_nccl: bool
    refresh: bool
    """Whether its head has to be told of new weights: see `worker.podium_worker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    """vLLM in this environment, for an engine in this process."""

    model: str
    """The name or folder that it loads."""
    longest: int | None
    """Tokens of a prompt with its completion; None: what the model has positions for."""


def connect(settings: VllmSettings, model: Any, config: PretrainedConfig, *, waits: bool = True) -> Served | Colocated:
    """See `engines.table.connect_vllm`."""
    model = resolve_model(model) if isinstance(model, str) else config._name_or_path
    if settings.mode != "server":
        check_installed(settings)
        return Colocated(model=model, longest=settings.max_model_length)
    line = serve_line(settings, model)
    server = VllmServer(url_of(settings), seconds=settings.server_timeout)
    fix = f"Start it: {line}"
    try:
        server.wait(None if waits else 0)
        fix = f"Is it a vLLM server? {line}"
        return _served(settings, model, config, server, line)
    except (ServerGone, ServerRefused) as error:
        raise misfit(error.what, fix=fix) from None


def _served(settings: VllmSettings, model: str, config: PretrainedConfig, server: VllmServer, line: str) -> Served:
    info = _development(server, line)
    [first, *others] = server.call("/v1/models")["data"]
    _check_model(model, config, str(first["root"]), server, line)
    longest = int(first["max_model_len"])
    mode = str(info["model_config"]["logprobs_mode"])
    on_cpu = (info.get("device_config") or {}).get("device") == "cpu"
    refresh = on_cpu and bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
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
            refresh and EXTENSION not in str(info["parallel_config"].get("worker_extension_cls")),
            "runs on a CPU, where its head, which this model ties to the embedding, would keep the weights that it "
            "began with.",
            "Start it again, with an extension that comes with Podium",
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
        refresh=refresh,
        takes_nccl=(info.get("weight_transfer_config") or {}).get("backend") == "nccl",
    )


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


def url_of(settings: VllmSettings) -> str:
    """The server's address, as TRL reads the settings; without a scheme it is http, and OpenAI's `/v1` is taken off.

    Raises:
        ConfigError: it is no address.
    """
    name = "vllm_server_base_url" if settings.server_base_url else "vllm_server_host"
    asked = settings.server_base_url or f"{settings.server_host}:{settings.server_port}"
    url = (asked if "://" in asked else f"http://{asked}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlparse(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return url
    except ValueError:  # of the port
        pass
    raise misfit(f"{name}: {asked} is no address of a server.", fix="vllm_server_base_url: http://127.0.0.1:8000")


def serve_line(settings: VllmSettings, model: str) -> str:
    """The command that starts a server for a run."""
    port = urlparse(url_of(settings)).port or 8000
    room = settings.max_prompt_length and settings.max_prompt_length + settings.max_completion_length
    longest = f" --max-model-len {room}" if room else ""
    nccl = "" if settings.device.type != "cuda" else """ --weight-transfer-config '{"backend": "nccl"}'"""
    path = ""
    extension = ""
    if not nccl:
        path = f"PYTHONPATH={shlex.quote(str(WORKER))} VLLM_CPU_KVCACHE_SPACE={CPU_CACHE} "
        # Compiled, a model of 135 million parameters starts in four minutes on two cores; eager, in 70 s.
        extension = f" --worker-extension-cls {EXTENSION} --no-enable-chunked-prefill --enforce-eager"
    return (
        f"{path}VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(model)} --host 127.0.0.1 --port {port} "
        f"--logprobs-mode {PROCESSED}{longest}{extension}{nccl}"
    )


def transfer_to(served: Served, settings: VllmSettings) -> Folder | Nccl:
    """NCCL from a GPU to a server that was started for it; else a folder that both see.

    Raises:
        ConfigError: neither is possible.
    """
    server = served.server
    folder = settings.weights_folder
    here = settings.process_index == 0
    if folder is None and settings.device.type == "cuda" and served.takes_nccl:
        if not is_vllm_available():
            raise misfit(
                "Weights go to the vLLM server over NCCL, for which vLLM is needed in this environment, too.",
                fix="pip install vllm; or set vllm_weights_folder, and weights go through files.",
            )
        return Nccl(server, group_port=settings.group_port, device=settings.device, dtype=served.dtype, here=here)
    if folder is None and not is_here(server.url):
        raise misfit(
            f"The vLLM server at {server.url} is on another machine, and weights have no way to it.",
            fix="Set vllm_weights_folder to a folder that both machines see under the same path; or, with a GPU, start "
            """the server with --weight-transfer-config '{"backend": "nccl"}'.""",
        )
    root = Path(folder or settings.output_dir) / WEIGHTS
    return Folder(server, root, served.dtype, here=here, refresh=served.refresh)


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
    assert isinstance(ready, Served)
    try:
        transfer = transfer_to(ready, settings)
    except EngineError as error:
        raise misfit(error.what, fix=error.fix) from None
    return ServerEngine(
        ready.server,
        ready.model,
        inputs.tokenizer,
        transfer,
        is_main=settings.process_index == 0,
        agree=inputs.agree,
        casts_weights=ready.dtype != torch.float32,
        newest_checkpoint=settings.newest_checkpoint,
    )

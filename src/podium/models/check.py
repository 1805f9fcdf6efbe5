"""Checks of a model's name without loading a weight: that it is there, whole, and a language model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import (
    ConfigError,
    ModelError,
    PodiumError,
    hub_errors,
    is_pointer,
    odd_path,
    similar_listed,
    similar_paths,
)
from podium.errors.texts import as_line, listed, quoted
from podium.models.builtin import BUILTIN, PREFIX, builtin_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)
SAFE = "model.safetensors"
INDEX = f"{SAFE}.index.json"
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the class names of models that write text, in a config's `architectures`."""


def check_model_name(
    name: str,
    *,
    needs_tokenizer: bool = True,
    needs_weights: bool = True,
    trust_remote_code: bool = False,
    generates: bool = True,
) -> None:
    """Refuse a name that cannot become a language model to train; load nothing but small JSON files.

    Folders are read; a hub id only has its `config.json` looked at (from the hub's cache when offline). A model that
    need not write text (not `generates`) may be of any kind.

    Raises:
        ModelError: with what is wrong and what to type.
    """
    if name.startswith(PREFIX):
        builtin_model(name)
        return
    path = Path(name).expanduser()
    what, fix = odd_path(name)
    if what:
        raise ModelError(what, code="M001", fix=as_line("model", fix if "://" in name else BUILTIN))
    if path.is_dir():
        config = _check_folder(path, needs_tokenizer=needs_tokenizer, needs_weights=needs_weights)
    elif path.is_file():
        raise _file_error(path)
    elif _looks_like_a_path(name):
        near = similar_paths(path, Path.is_dir)
        as_path = [folder if folder.startswith((".", "/", "~")) else f"./{folder}" for folder in near]
        full = f" ({path})" * name.startswith("~")
        shown_listed = similar_listed(path, near)
        raise ModelError(
            f"There is no folder {name}{full}.{shown_listed}",
            code="M001",
            fix=f"a model that is there, such as model: {(as_path[0] if near else BUILTIN)}",
            settings=(name,),
            name=name,
            full=full,
            listed=shown_listed,
        )
    else:
        config = _hub_config(name, path)
    _check_architecture(name, config, trust_remote_code=trust_remote_code, generates=generates)


def not_loadable(model: str, line: str) -> ModelError:
    """The error of a configuration of which transformers makes no model; `line` is its reason."""
    return ModelError(
        f"{model}: transformers cannot load the model ({line}).",
        code="M016",
        fix="correct its config.json, or copy the folder again from the original model",
        model=model,
        line=line,
    )


def _looks_like_a_path(name: str) -> bool:
    """Hub ids are `name` or `owner/name`; anything else can only be a folder."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def _file_error(path: Path) -> ModelError:
    if path.suffix == ".gguf":
        return ModelError(
            f"{path} is a GGUF file, which is made for inference (its weights are rounded).",
            code="M009",
            fix="Train the model it was made from: give that repository's hub id or folder.",
            path=path,
        )
    what = f"{path} is a file; a model is a folder with config.json and *.safetensors."
    fix = f"the folder: {path.parent}" if (path.parent / "config.json").is_file() else "the folder of a model or a run"
    if path.suffix in (".yaml", ".yml"):
        fix = f"the `output_dir` of {path}, once `podium train {path}` was run"
    return ModelError(what, code="M001", fix=fix)


def read_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in a model's config.json. Raises `ModelError` where transformers cannot read it."""
    from transformers import AutoConfig

    own = {"revision": revision, "trust_remote_code": trust_remote_code}
    with reading(
        lambda line: ModelError(
            f"{name}: transformers cannot take a value in its config.json ({line}).",
            code="M016",
            fix="correct that value, or copy config.json again from the original model",
            model=name,
            line=line,
        )
    ):
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(name, **own)
        except (ValueError, KeyError, OSError) as error:
            raise ModelError(
                f"{name}: transformers does not know how to read its config.json ({_line(error)}).",
                code="M013",
                fix="Take a causal language model that transformers has, or install a newer transformers.",
                model=name,
                line=_line(error),
            ) from error
    return config


@contextlib.contextmanager
def reading(refusal: Callable[[str], ModelError]) -> Iterator[None]:
    """Raise `refusal` of an error in one line for any error of a library over a model's files.

    A value of a wrong type in one of them can end in any exception; a lack of memory or of a package is no such error.
    """
    try:
        yield
    except (PodiumError, ImportError, MemoryError):
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        raise refusal(_line(error)) from error


def _line(error: Exception) -> str:
    """An error's class and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200] or 'no message'}"


def refuse_other_task(task_type: Any) -> None:
    """Raise `ConfigError` for the adapter of anything but a causal language model.

    PEFT gives a model of any other task another head, or another forward.

    >>> refuse_other_task(None), refuse_other_task("CAUSAL_LM")
    (None, None)
    """
    name = getattr(task_type, "value", task_type)
    if name not in (None, "CAUSAL_LM"):
        raise ConfigError(
            f"The adapter's `task_type` is {name}; GRPO trains a causal language model, and that task "
            "would give it another head.",
            code="C003",
            fix='task_type="CAUSAL_LM", or leave it out',
            task=name,
        )


# ---- folders ----


def _check_folder(folder: Path, *, needs_tokenizer: bool, needs_weights: bool) -> dict[str, Any]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and is_pointer(file):
            raise ModelError(
                f"{file} is a pointer of Git LFS, not the file itself.",
                code="M008",
                fix=f"git -C {folder} lfs pull",
                file=file,
                folder=folder,
            )
    if not (folder / "config.json").is_file():
        raise _no_config_error(folder)
    if needs_weights:
        _check_weights_exist(folder)
    _check_safetensors_whole(folder)
    if needs_tokenizer and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        tokenizer_files = ", ".join(_TOKENIZER_FILES[:3])
        raise ModelError(
            f"{folder} has config.json but no tokenizer files ({tokenizer_files}).",
            code="M003",
            fix="Copy them from the original model, or pass `processing_class=` in Python.",
            folder=folder,
            tokenizer_files=tokenizer_files,
        )
    return _read_json(folder / "config.json")


def _no_config_error(folder: Path) -> ModelError:
    if (folder / "adapter_config.json").is_file():
        named = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        base = named if isinstance(named, str) else ""
        if not base or (_looks_like_a_path(base) and not Path(base).expanduser().is_dir()):
            gone = f"it belongs to {base}, which is not there" if base else "it does not say to which"
            return ModelError(
                f"{folder} holds an adapter, not a model; {gone}.",
                code="M012",
                fix=f'write where its model is into {folder}/adapter_config.json: "base_model_name_or_path": "..."',
                folder=folder,
                gone=gone,
            )
        return ModelError(
            f"{folder} holds an adapter, not a model; it belongs to {base}.",
            code="M012",
            fix=f"podium merge {folder} --out {folder}-merged; then model: {folder}-merged. In Python, to "
            f'train on: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}", '
            "is_trainable=True)` is what to pass as `model`.",
            folder=folder,
            base=base,
        )
    if checkpoints := [path.parent for path in folder.glob("checkpoint-*/config.json")]:
        steps = {path.name.removeprefix("checkpoint-"): path for path in sorted(checkpoints)}
        shown_steps = steps[max(steps, key=lambda step: int(step) if step.isdigit() else -1)]
        return ModelError(
            f"{folder} has no config.json, but checkpoints.",
            code="M016",
            fix=f"Give one of them, as {shown_steps}.",
            folder=folder,
            steps=shown_steps,
        )
    if ggufs := sorted(folder.glob("*.gguf")):
        return _file_error(ggufs[0])
    if not any(folder.iterdir()):
        return ModelError(
            f"The folder {folder} is empty.", code="M016", fix="Download or copy the model again.", folder=folder
        )
    return ModelError(
        f"{folder} has no config.json, so it is not a model folder (expected config.json and *.safetensors).",
        code="M016",
        fix=f"copy the whole model there again: hf download NAME --local-dir {folder}",
        folder=folder,
    )


def _check_weights_exist(folder: Path) -> None:
    index = folder / INDEX
    if index.is_file():
        missing = sorted(file for file in _indexed(index) if not (folder / file).is_file())
        if missing:
            raise ModelError(
                f"{folder} lacks {listed(missing)}, named in {index.name}.",
                code="M017",
                fix="Download or copy it again.",
                folder=folder,
                missing=missing,
                index_name=index.name,
            )
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        if ggufs := sorted(folder.glob("*.gguf")):
            raise _file_error(ggufs[0])
        again = f"was the copy or the save cut short? again: hf download NAME --local-dir {folder}"
        raise ModelError(
            f"{folder} has config.json but no weights (no *.safetensors).", code="M017", fix=again, folder=folder
        )
    for kind, whole in (("model-*.safetensors", SAFE), ("pytorch_model-*.bin", "pytorch_model.bin")):
        shards = sorted(path.name for path in folder.glob(kind))
        if shards and not (folder / whole).is_file() and not (folder / f"{whole}.index.json").is_file():
            raise ModelError(
                f"{folder} has parts of its weights ({shards[0]}, ...) and lacks {whole}.index.json, which lists them.",
                code="M017",
                fix=f"Download or copy {whole}.index.json, too.",
                folder=folder,
                shard=shards[0],
                whole=whole,
            )


def _indexed(index: Path) -> set[str]:
    """Names of the files that an index of weights lists. Raises `ModelError` where it is none."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(
            f"{index} has no `weight_map` of names of tensors to names of files.",
            code="M016",
            fix=f"copy {index} again",
            file=index,
        )
    return set(files.values())


def _check_safetensors_whole(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        actual = file.stat().st_size
        header = safetensors_header(file)
        expected = header and header[0] + max((entry["data_offsets"][1] for entry in header[1].values()), default=0)
        if expected != actual:
            size = f"{expected:,} bytes expected" if expected else "its header cannot be read"
            raise ModelError(
                f"{file} is damaged: {actual:,} bytes, {size}.",
                code="M008",
                fix="Download or copy it again.",
                file=file,
                actual=actual,
                size=size,
            )


def safetensors_header(file: Path) -> tuple[int, dict[str, Any]] | None:
    """Offset of the tensors in a safetensors file, and their descriptions by name; None if the header is damaged."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:
            return None
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            return None
    if not isinstance(header, dict):
        return None
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return (8 + length, entries) if all(map(_describes, entries.values())) else None


def _describes(entry: Any) -> bool:
    """Whether an entry of a header has a type, a shape and a place, as the format asks for."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape = entry.get("shape")
    place = entry.get("data_offsets")
    numbers = [*shape, *place] if isinstance(shape, list) and isinstance(place, list) and len(place) == 2 else [-1]
    return all(type(number) is int and number >= 0 for number in numbers)


def stored_entries(folder: Path) -> dict[str, Any]:
    """Descriptions of all tensors by name, from the headers of the safetensors files that transformers would load."""
    index = folder / INDEX
    single = folder / "model.safetensors"
    if single.is_file():
        files = {single}
    elif index.is_file():
        files = {folder / name for name in _indexed(index)}
    else:
        files = set(folder.glob("*.safetensors"))
    headers = [header for file in sorted(files) if file.is_file() and (header := safetensors_header(file))]
    return {name: entry for _, entries in headers for name, entry in entries.items()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"{file} cannot be read as JSON: {quoted(error)}",
            code="M016",
            fix=f"copy {file} again",
            file=file,
            error=error,
        ) from error
    if isinstance(value, dict):
        return value
    raise ModelError(
        f"{file} holds {type(value).__name__}, expected an object.",
        code="M016",
        fix=f"copy {file} again",
        file=file,
        kind=type(value).__name__,
    )


# ---- what kind of model ----


def _check_architecture(name: str, config: Mapping[str, Any], *, trust_remote_code: bool, generates: bool) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list):  # a value of another type is refused where transformers reads it
        architectures = []
    if isinstance(config.get("auto_map"), dict) and not trust_remote_code:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        if config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise own_code(name, sorted(set(map(str, config["auto_map"].values()))))
    encodes = bool(config.get("is_encoder_decoder"))
    if generates and architectures and (encodes or not any(str(a).endswith(_GENERATORS) for a in architectures)):
        raise not_causal(name, architectures, encodes=encodes)


def not_causal(name: str, architectures: Sequence[str], *, encodes: bool = False, fix: str = "") -> ModelError:
    """The refusal of a model that is no causal language model. `encodes`: it is an encoder and a decoder."""
    why = "reads its prompt with an encoder" if encodes else "does not generate text"
    return ModelError(
        f"{name} is a {listed(architectures)}, which {why}; a causal language model is needed (its "
        "`architectures` end with ForCausalLM).",
        code="M013",
        fix=fix or f"{as_line('model', BUILTIN)}, or another whose `architectures` end with ForCausalLM",
        settings=(name,),
        name=name,
        architectures=architectures,
        why=why,
    )


def own_code(name: str, files: Sequence[str] = ()) -> ModelError:
    """The refusal of code that comes with a model."""
    listed = f" ({', '.join(files)})" if files else ""
    return ModelError(
        f"{name} contains custom code{listed}, which is not run by default.",
        code="M011",
        fix="Read that code; if you trust it, set `trust_remote_code: true`.",
        settings=(name,),
        name=name,
        listed=listed,
    )


# ---- the hub ----


def _hub_config(name: str, path: Path) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    near = ""
    beside = _folders_beside(path)
    fetch = f"hf download {name}, where there is a network; or {as_line('model', BUILTIN)}"
    if beside:
        near = similar_listed(path, similar_paths(path, Path.is_dir)) or f" Folders in {path.parent}: {beside}."
        fetch = f"one of these folders; or {fetch}"
    other = f"{as_line('model', BUILTIN)}, or another name than {name} (hf models ls)"
    reasons: dict[type[Exception], tuple[str, str]] = {
        HFValidationError: ("is neither a folder nor a possible hub id (owner/name)", other),
        GatedRepoError: ("is gated", "ask for access on its hub page, then `hf auth login`"),
        RepositoryNotFoundError: (
            "is not on the hub, or private (then: `hf auth login`), and there is no such folder",
            other,
        ),
        LocalEntryNotFoundError: (f"is not a folder here, and the hub cannot be reached. {_cached_models()}", fetch),
        EntryNotFoundError: ("is on the hub but has no config.json, so transformers cannot load it", other),
        HfHubHTTPError: ("cannot be had from the hub", fetch),
    }
    try:
        offline = not _hub_answers(name)
        return _read_json(Path(hf_hub_download(name, "config.json", etag_timeout=5, local_files_only=offline)))
    except tuple(reasons) as error:
        reason, fix = next(texts for kind, texts in reasons.items() if isinstance(error, kind))
        status = getattr(getattr(error, "response", None), "status_code", None)
        http = f" (HTTP {status})" if status else ""
        raise ModelError(
            f"`{name}` {reason}{http}.{near}",
            code="M002",
            fix=fix,
            settings=(name,),
            name=name,
            reason=reason,
            http=http,
            near=near,
        ) from error
    except hub_errors() as error:
        raise ModelError(
            f"`{name}` is not a folder here, and the hub cannot be reached ({quoted(error)}).{near}",
            code="M002",
            fix=fetch,
            settings=(name,),
            name=name,
            error=error,
            near=near,
        ) from error


def _folders_beside(path: Path) -> str:
    """The first folders in the folder in which a missing one was looked for; empty where none was named."""
    if path.parent == Path() or not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _hub_answers(name: str) -> bool:
    """One request: `hf_hub_download` alone would try for half a minute where there is no network.

    What the hub says of the name (not there, gated) is raised.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
    except HfHubHTTPError:
        raise
    except hub_errors():
        return False
    return True


def _cached_models() -> str:
    """Models in the hub's cache, for messages without a network."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = sorted(Path(HF_HUB_CACHE).glob("models--*")) if os.path.isdir(HF_HUB_CACHE) else []
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    built_in = f"Without a hub there is `{BUILTIN}`"
    return f"Cached: {', '.join(names[:8])}. {built_in}" if names else built_in

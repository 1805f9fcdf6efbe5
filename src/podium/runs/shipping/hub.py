"""Sends a model to the Hugging Face hub.

    files = files_to_send(source, address="me/x")       no network
    repository = find_repository("me/x", public=False)  owner, existence, visibility
    send(files, repository)                             one commit

Only the files that a model needs are sent. Rollouts, metrics, optimizer states and other files of a run's folder are
sent only if a pattern names them; a text that seems to contain a token is never sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from podium.errors import ConfigError, HubError, ModelError, hub_errors
from podium.errors.texts import quoted
from podium.runs.find_model import ADAPTER, ModelSource, run_of
from podium.runs.redaction import line_of_secret, without_secrets
from podium.runs.shipping.card import CARD, model_card
from podium.runs.shipping.origin import LOCAL_KEYS, RECORD, Base, base_named, edited

MODEL_FILES = (
    *("config.json", "generation_config.json", ADAPTER, "adapter_model.safetensors"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json", "chat_template.jinja", RECORD),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"),
)
"""Files that a model needs, and the proof of its merge."""

TEXT = (".json", ".jsonl", ".jinja", ".md", ".txt", ".yaml", ".yml", ".html", ".csv", ".log", ".py")
"""Endings of files that are searched for tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFile:
    """One file as it will be on the hub."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def files_to_send(
    source: ModelSource,
    *,
    address: str,
    base: str | None = None,
    include: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> tuple[UploadFile, ...]:
    """A model's files as the hub will have them: with a card, without local paths.

    Args:
        source: from `find_model`, in a local folder.
        address: the repository, for the card.
        base: the hub id to write into the adapter's config, if it was trained on a local folder.
        include: patterns of further files in the run's folder, such as `rollouts/*`.
        ignore: names of files that are sent though a text in them looks like a token.

    Raises:
        ConfigError: the adapter's base is a local folder; a text contains a token; a pattern matches nothing.
        ModelError: the adapter changes nothing.
    """
    from podium.models.adapters import NO_EFFECT

    folder = source.folder
    if folder is None:
        raise ConfigError(
            f"{source.base} is on the hub already.", fix="Give a run's folder or a model's.", base=source.base
        )
    if source.adapter is not None and NO_EFFECT not in (*source.ignored, *ignore) and _is_zero(source.adapter):
        raise ModelError(
            f"The adapter {source.adapter} changes nothing: its second matrices are all zero, as before training.",
            code=NO_EFFECT,
            fix=f"Train it, or name the base itself. To go on as it is: --ignore {NO_EFFECT}",
            adapter=source.adapter,
            no_effect=NO_EFFECT,
        )
    names = sorted({path.name for pattern in MODEL_FILES for path in folder.glob(pattern)})
    files = [_as_sent(folder / name, source, base) for name in names]
    files += [UploadFile(name=name, content=path) for name, path in _asked_for(source, include)]
    files = [UploadFile(name=CARD, content=_card(source, address, base).encode()), *files]
    for sent in files:
        if not sent.name.endswith(TEXT):
            continue
        raw = sent.content if isinstance(sent.content, bytes) else sent.content.read_bytes()
        line = line_of_secret(raw.decode("utf-8", "replace"))
        if line is not None and sent.name not in ignore:
            raise ConfigError(
                f"{sent.name}, line {line}, holds what looks like a token; nothing is sent.",
                fix=f"Take it out; or, if it is none: --ignore {sent.name}",
                sent_name=sent.name,
                line=line,
            )
    return tuple({sent.name: sent for sent in reversed(files)}.values())[::-1]


def _is_zero(adapter: Path) -> bool:
    """Whether a LoRA adapter's second matrices are all zero, as before training, and it has nothing else."""
    from safetensors import safe_open

    from podium.models.adapters import WEIGHTS

    if not (adapter / WEIGHTS).is_file():
        return False
    with safe_open(adapter / WEIGHTS, "pt") as file:
        names = list(file.keys())
        second = [name for name in names if re.search(r"\.lora_(embedding_)?B", name)]
        others = [name for name in names if not re.search(r"\.lora_(embedding_)?[AB]", name)]
        return bool(second) and not others and not any(file.get_tensor(name).any() for name in second)


def left_out(source: ModelSource, files: Sequence[UploadFile]) -> list[str]:
    """Contents of the model's folder that are not sent: names of files, and of folders with a slash."""
    assert source.folder is not None
    sent = {file.name.split("/")[0] for file in files}
    paths = sorted(source.folder.iterdir())
    return [f"{path.name}/" if path.is_dir() else path.name for path in paths if path.name not in sent]


def _as_sent(path: Path, source: ModelSource, base: str | None) -> UploadFile:
    content: Path | bytes = path
    if path.name == ADAPTER:
        content = edited(path, base_model_name_or_path=_public_base(source, base).hub_id)
    elif path.name == "tokenizer_config.json":
        content = edited(path, **dict.fromkeys(LOCAL_KEYS))
    return UploadFile(name=path.name, content=content)


def _public_base(source: ModelSource, asked: str | None) -> Base:
    base = base_named(asked or source.base)
    if base.hub_id is None:
        raise ConfigError(
            f"The adapter belongs to `{base.name}`, a folder of this machine, which nobody else has.",
            fix="Send the whole model with --merged, or name the same weights on the hub: --base OWNER/NAME.",
            base_name=base.name,
        )
    return base


def _card(source: ModelSource, address: str, base: str | None) -> str:
    """The run's card, or the one that `podium merge` has written, with the new address."""
    assert source.folder is not None
    own = source.folder / CARD
    if (source.folder / RECORD).is_file() and own.is_file():
        written = own.read_text(encoding="utf-8")
        return re.sub(
            r'(pipeline\("[a-z-]+", model=)".*?"', lambda found: found[1] + json.dumps(address), written, count=1
        )
    return model_card(source, address=address, base=None if source.adapter is None else _public_base(source, base))


def _asked_for(source: ModelSource, patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Files of the run's folder that match a pattern; links out of it do not count."""
    run = run_of(source)
    root = (run.folder if run is not None else source.folder or Path()).resolve()
    inside = [path for path in sorted(root.rglob("*")) if path.is_file() and path.resolve().is_relative_to(root)]
    for pattern in patterns:
        found = [(name, path) for path in inside if fnmatch(name := path.relative_to(root).as_posix(), pattern)]
        if not found:
            raise ConfigError(
                f"--include {pattern}: no such file in {root.name}.", pattern=pattern, root_name=root.name
            )
        yield from found


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository on the hub."""

    name: str
    exists: bool
    private: bool

    def __str__(self) -> str:
        return f"{self.name} ({'there already' if self.exists else 'new'}, {'private' if self.private else 'public'})"


def find_repository(repo: str, *, public: bool) -> Repository:
    """Look up a repository; without an owner the name is completed by the token's.

    Raises:
        HubError: no token, no network, or the hub refuses.
        ConfigError: the repository exists and is public, which was not asked for.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    with one_message(repo):
        owner = api.whoami()["name"]
        repo = repo if "/" in repo else f"{owner}/{repo}"
        try:
            private = bool(api.model_info(repo).private)
        except RepositoryNotFoundError:
            return Repository(name=repo, exists=False, private=not public)
    if not private and not public:
        raise ConfigError(
            f"{repo} is on the hub already, and public.",
            fix="Type --public if everybody may see this model, or give another --repo.",
            repo=repo,
        )
    return Repository(name=repo, exists=True, private=private)


def send(files: Sequence[UploadFile], repository: Repository, *, title: str) -> str:
    """Create the repository if it is new, and send the files in one commit; the commit's address.

    Raises `HubError` as `find_repository` does.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    operations = [CommitOperationAdd(path_in_repo=f.name, path_or_fileobj=f.content) for f in files]
    with one_message(repository.name):
        if not repository.exists:
            api.create_repo(repository.name, private=repository.private)
        done = api.create_commit(repository.name, operations, commit_message=f"{title}, sent by Podium")
    return str(done.commit_url)


@contextmanager
def one_message(repo: str) -> Iterator[None]:
    """Turn errors of the hub's client into one message without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise HubError("There is no token for the hub.", fix="Type: hf auth login (or set HF_TOKEN).") from error
    except HFValidationError as error:
        raise HubError(f"`{repo}` is not a possible name on the hub; expected OWNER/NAME.", repo=repo) from error
    except HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except ValueError as error:  # the hub has read the card's metadata
        raise HubError(f"The hub refuses {repo}: {quoted(error)}", repo=repo, error=error) from error
    except hub_errors() as error:
        raise HubError(
            f"The hub cannot be reached ({type(error).__name__}); nothing was sent to {repo}.",
            fix="`podium push RUN --dry-run` shows what would be sent without it.",
            kind=type(error).__name__,
            repo=repo,
        ) from error


_REASONS = {
    401: ("the token is not valid", "Type: hf auth login"),
    403: ("this token may not write there", "Take a token with write access, or a --repo of your own."),
}


def _refused(repo: str, error: Any) -> HubError:
    status = error.response.status_code if error.response is not None else 0
    why, fix = _REASONS.get(status, (str(error.server_message or "it gave no reason"), "Try again later."))
    return HubError(
        f"The hub refuses {repo} (HTTP {status}): {without_secrets(why)}.",
        fix=fix,
        repo=repo,
        status=status,
        without_secrets=without_secrets(why),
    )

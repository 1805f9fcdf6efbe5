"""A model on the Hugging Face hub: first what would be sent, then the sending.

    files = files_to_send(source, address="me/x")      no network
    place = find_place("me/x", public=False)           who am I, is it there, who may see it
    send(files, place)                                 one commit

What is sent is a list of what a model needs. Rollouts, metrics, optimizer states and whatever else lies in a run's
folder goes along only where a pattern asks for it, and no text that looks like it holds a token goes at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, HubError, hub_errors
from podium.runs.find_model import ADAPTER, ModelSource, run_of
from podium.runs.redaction import without_secrets
from podium.runs.shipping.card import CARD, card
from podium.runs.shipping.export import OF_THIS_MACHINE, describe
from podium.runs.shipping.origin import Base, base_named
from podium.runs.shipping.prompt_prefix import RECORD

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    ADAPTER,
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    RECORD,
)
"""What a model needs, and the proof of its merge."""

TEXT = (".json", ".jsonl", ".jinja", ".md", ".txt", ".yaml", ".yml", ".html", ".csv", ".log", ".py")
"""Endings of files that are looked through for tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One file as it will be on the hub."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


# ---- what ----


def files_to_send(
    source: ModelSource, *, address: str, base: str | None = None, include: Sequence[str] = ()
) -> tuple[Sent, ...]:
    """A model's files as the hub will have them: with a card, without folders of this machine.

    Args:
        source: from `find_model`, in a local folder.
        address: the repository, for the card.
        base: the hub id that the adapter's config shall name, where it was trained on a local folder.
        include: patterns of further files in the run's folder, such as `rollouts/*`.

    Raises:
        ConfigError: the adapter's base is a folder of this machine; a text holds a token; a pattern matches nothing.
    """
    folder = source.folder
    if folder is None:
        raise ConfigError(f"{source.base} is on the hub already.", fix="Give a run's folder or a model's.")
    names = sorted({path.name for each in MODEL_FILES for path in folder.glob(each)})
    files = [_as_sent(folder / name, source, base) for name in names]
    files += [Sent(name=name, content=path) for name, path in _asked_for(source, include)]
    files = [Sent(name=CARD, content=_card(source, address, base).encode()), *files]
    for sent in files:
        _check_no_secret(sent)
    return tuple({sent.name: sent for sent in reversed(files)}.values())[::-1]


def left_out(source: ModelSource, files: Sequence[Sent]) -> list[str]:
    """What lies in the model's folder and is not sent: names of files, and of folders with a slash."""
    assert source.folder is not None
    sent = {file.name.split("/")[0] for file in files}
    paths = sorted(source.folder.iterdir())
    return [f"{path.name}/" if path.is_dir() else path.name for path in paths if path.name not in sent]


def _as_sent(path: Path, source: ModelSource, base: str | None) -> Sent:
    if path.name == ADAPTER:
        return Sent(name=path.name, content=_edited(path, base_model_name_or_path=_public_base(source, base).hub_id))
    if path.name == "tokenizer_config.json":
        return Sent(name=path.name, content=_edited(path, **dict.fromkeys(OF_THIS_MACHINE)))
    return Sent(name=path.name, content=path)


def _edited(path: Path, **changes: Any) -> bytes:
    """A JSON file with some values replaced; None takes them out."""
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    kept = {name: value for name, value in values.items() if not (name in changes and value is None)}
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def _public_base(source: ModelSource, given: str | None) -> Base:
    base = base_named(given or source.base)
    if base.hub_id is None:
        raise ConfigError(
            f"The adapter belongs to `{base.name}`, a folder of this machine, which nobody else has.",
            fix="Send the whole model with --merged, or name the same weights on the hub: --base OWNER/NAME.",
        )
    return base


def _card(source: ModelSource, address: str, base: str | None) -> str:
    """The run's card; a model that `podium merge` has saved has its own, which gets the new address."""
    assert source.folder is not None
    own = source.folder / CARD
    if (source.folder / RECORD).is_file() and own.is_file():
        written = own.read_text(encoding="utf-8")
        return re.sub(r'(?<=pipeline\("text-generation", model=)".*?"', lambda _: json.dumps(address), written, count=1)
    described = describe(source, address=address, base=None if source.adapter is None else _public_base(source, base))
    return card(described, run_of(source))


def _asked_for(source: ModelSource, patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Files of the run's folder that patterns name, never one outside of it."""
    run = run_of(source)
    root = (run.folder if run is not None else source.folder or Path()).resolve()
    inside = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    inside = {name: path for name, path in inside.items() if path.resolve().is_relative_to(root)}
    for pattern in patterns:
        found = [(name, path) for name, path in sorted(inside.items()) if fnmatch(name, pattern)]
        if not found:
            raise ConfigError(f"--include {pattern}: no such file in {root.name}.")
        yield from found


def _check_no_secret(sent: Sent) -> None:
    if not sent.name.endswith(TEXT):
        return
    raw = sent.content if isinstance(sent.content, bytes) else sent.content.read_bytes()
    text = raw.decode("utf-8", "replace")
    if without_secrets(text) != text:
        raise ConfigError(f"{sent.name} holds what looks like a token; nothing is sent. Take it out.")


# ---- where ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A repository on the hub."""

    repo: str
    is_there: bool
    private: bool

    def __str__(self) -> str:
        return f"{self.repo} ({'there already' if self.is_there else 'new'}, {'private' if self.private else 'public'})"


def find_place(repo: str, *, public: bool) -> Place:
    """Look up a repository; a name without an owner is one of the token's owner.

    Raises:
        HubError: no token, no network, or the hub refuses.
        ConfigError: the repository is there and public, which was not asked for.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    with _one_message(repo):
        owner = api.whoami()["name"]
        repo = repo if "/" in repo else f"{owner}/{repo}"
        try:
            private = bool(api.model_info(repo).private)
        except RepositoryNotFoundError:
            return Place(repo=repo, is_there=False, private=not public)
    if not private and not public:
        raise ConfigError(
            f"{repo} is on the hub already, and public.",
            fix="Type --public if everybody may see this model, or give another --repo.",
        )
    return Place(repo=repo, is_there=True, private=private)


def send(files: Sequence[Sent], place: Place, *, title: str) -> str:
    """Make the repository if it is new, and send the files in one commit; its address on the hub.

    Raises:
        HubError: as `find_place`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api: HfApi = HfApi()
    operations = [CommitOperationAdd(path_in_repo=f.name, path_or_fileobj=f.content) for f in files]
    with _one_message(place.repo):
        if not place.is_there:
            api.create_repo(place.repo, private=place.private)
        done = api.create_commit(place.repo, operations, commit_message=f"{title}, sent by Podium")
    return str(done.commit_url)


@contextmanager
def _one_message(repo: str) -> Iterator[None]:
    """What the hub's client raises, as one message without a traceback and without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except LocalTokenNotFoundError as error:
        raise HubError("There is no token for the hub.", fix="Type: hf auth login (or set HF_TOKEN).") from error
    except HFValidationError as error:
        raise HubError(f"`{repo}` is not a possible name on the hub; expected OWNER/NAME.") from error
    except HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except ValueError as error:  # the hub has read the card's metadata
        raise HubError(f"The hub refuses {repo}: {error}") from error
    except hub_errors() as error:
        raise HubError(
            f"The hub cannot be reached ({type(error).__name__}); nothing was sent to {repo}.",
            fix="`--dry-run` shows what would be sent without it.",
        ) from error


_REASONS = {
    401: ("the token is not valid", "Type: hf auth login"),
    403: ("this token may not write there", "Take a token with write access, or a --repo of your own."),
}


def _refused(repo: str, error: Any) -> HubError:
    status = error.response.status_code if error.response is not None else 0
    why, fix = _REASONS.get(status, (str(error.server_message or "it gave no reason"), "Try again later."))
    return HubError(f"The hub refuses {repo} (HTTP {status}): {without_secrets(why)}.", fix=fix)

"""The errors that Podium raises on purpose.

PodiumError
|-- ConfigError      (ValueError)    a setting, a recipe key, an argument
|   `-- ArgumentError  (TypeError)   an argument that there is not
|-- DataError        (ValueError)    a dataset, a row, a prompt
|-- ModelError       (ValueError)    a model, a tokenizer, an adapter
|-- RewardError      (RuntimeError)  a reward function: raised, or returned something unusable
|-- AgentError       (RuntimeError)  a tool or an environment: raised, or returned something unusable
|-- EngineError      (RuntimeError)  a rollout engine
|-- LostProcessError (RuntimeError)  another process of the run has ended, or does not answer
|-- ProofError       (RuntimeError)  the proof on the first batch, or of a merge: what must hold does not
|-- CheckpointError  (RuntimeError)  nothing to resume from, or nothing that verifies
`-- HubError         (RuntimeError)  the hub cannot be reached, or refuses

Each child is also the stdlib error it refines, so `except ValueError` in a user's script keeps working. The command
line prints a `PodiumError` as its message alone, never as a traceback; internal invariants are asserted.
"""

from __future__ import annotations

import errno
import os
import re
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any, Literal

from podium.errors.texts import as_lines, clean, plain, with_fix

Severity = Literal["error", "warning", "note"]

OVERRULED = "overruled: "
"""Begins a finding that would have stopped the run, had `on_finding` not told to ignore it."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Severities of findings, the most severe first."""


class PodiumError(Exception):
    """A mistake that the user can repair.

    Args:
        what: what is wrong, in a sentence.
        where: place that the message begins with, such as "run.yaml:4".
        code: of the broken rule, as in `podium explain CODE`; None: the class's own, else an empty one.
        fix: what to type, the last line of the message; None: the changes as lines.
        findings: all mistakes, where there are several (`podium.errors.Finding`).
        changes: settings that cure it, as `podium.errors.Finding.changes`.
        settings: that the error is about, the first of them its cause.
        facts: names and values in the message. Programs read them, never the words.

    >>> error = ConfigError("beta is -1", where="run.yaml:4", code="C016", changes={"beta": 0.0}, value=-1)
    >>> print(error)
    run.yaml:4: beta is -1
      fix: beta: 0.0
    >>> error.code, error.facts
    ('C016', {'value': -1})
    """

    default_code = ""

    def __init__(
        self,
        what: str = "",
        /,
        *,
        where: str = "",
        code: str | None = None,
        fix: str | None = None,
        findings: Iterable[Any] = (),
        changes: Mapping[str, Any] | None = None,
        settings: Iterable[str] = (),
        **facts: Any,
    ) -> None:
        self.where = where
        self.changes = dict(changes or {})
        self.facts = facts
        self.what = f"{where}: {what}" if where else what
        self.fix = as_lines(self.changes) if fix is None else fix
        self.settings = tuple(settings)
        self.code = self.default_code if code is None else code
        super().__init__(with_fix(self.what, self.fix))
        self.findings = tuple(findings)

    def __str__(self) -> str:
        return clean(with_fix(self.what, self.fix))  # it may quote a completion, or the text of any exception


class ConfigError(PodiumError, ValueError):
    """A setting that cannot work."""


class ArgumentError(ConfigError, TypeError):
    """An argument that there is not."""


class DataError(PodiumError, ValueError):
    """A dataset, or a row of it, that cannot be trained on."""


class ModelError(PodiumError, ValueError):
    """A model, tokenizer or adapter that cannot be used."""


class RewardError(PodiumError, RuntimeError):
    """A reward function that raised, or returned something that is not one number per completion."""

    default_code = "W010"


class AgentError(PodiumError, RuntimeError):
    """A tool or an environment that raised, or returned something that no episode can go on with."""


class EngineError(PodiumError, RuntimeError):
    """A rollout engine that cannot sample."""


class LostProcessError(PodiumError, RuntimeError):
    """A collective operation that failed since another process of the run has ended, or does not answer."""

    is_silent = False
    """Whether the other process was waited for, up to `ddp_timeout`."""


class ProofError(PodiumError, RuntimeError):
    """An invariant of sampling and training is violated: the run was stopped before it could do harm."""


class CheckpointError(PodiumError, RuntimeError):
    """No checkpoint that can be resumed from, or none that can be written."""

    default_code = "K001"


class HubError(PodiumError, RuntimeError):
    """The hub cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem or a remark about a run, before, during or after it."""

    code: str
    severity: Severity
    what: str
    """One sentence with the evidence in numbers."""
    why: str = ""
    fix: str = ""
    """The setting to change or the command to type."""
    step: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the cure changes, in keys and values of a recipe; None takes a key out. Empty: the cure is no
    setting."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Names and values in the words. Programs read them, never the words."""
    where: str = ""
    """Place that `what` begins with: a file and line, a setting, a row."""
    settings: tuple[str, ...] = ()
    """Settings that it is about, the first of them its cause."""

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name, the facts and changes as JSON has them.

        >>> Finding(code="D039", severity="error", what="damaged", facts={"path": Path("a.gz")}).as_dict()["facts"]
        {'path': 'a.gz'}
        """
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    def overruled(self) -> Finding:
        """The same as a warning, where the user goes on against an error."""
        return replace(self, severity="warning", what=f"{OVERRULED}{self.what}")

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code}] {self.what}", f"  why: {self.why}", f"  fix: {self.fix}"]
        return clean("\n".join(line for line, text in zip(lines, (self.what, self.why, self.fix), strict=True) if text))

    def _repr_html_(self) -> str:
        """For notebooks. It may quote a model: everything is escaped."""
        what, *more = (escape(line) for line in str(self).splitlines())
        return f"<b>{what}</b>" + "".join(f"<br>{line}" for line in more)


def not_whole(name: str, value: object, *, fix: str = "") -> ConfigError:
    """The error of an argument that is no whole number of at least 1."""
    return ConfigError(
        f"{name} is {value!r}; it must be a whole number of at least 1.", fix=fix, name=name, value=value
    )


def gravest_first(found: Iterable[Finding]) -> list[Finding]:
    """Findings by severity, errors first; of one severity in the order in which they came."""
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


NOTHING_RUNS = frozenset(
    re.findall(
        r"\w+",
        "C001 C002 C003 C004 C006 C009 C010 C011 C012 C013 C014 C016 C017 C018 C019 C030 C031 C032 C033 C036 C052 "
        "C053 C054 C060 C061 C062 C063 C064 C065 C066 D001 D002 D003 D004 D005 D006 D007 D008 D009 D010 D011 D012 "
        "D013 D014 D015 D020 D021 D022 D023 D024 D025 D026 D027 D029 D030 D031 D033 D034 D035 D036 D038 D039 D052 "
        "D053 D054 D055 D056 D057 D058 D060 D062 D063 K001 K003 M001 M002 M003 M004 M006 M008 M009 M011 M012 M013 "
        "M016 M017 M020 M021 M024 W001 W002 W003 W004 W005 W013 W014 W015 W016 W017 W018",
    )
)
"""Codes whose errors are facts with which no run could begin or go on. All other stops can be overruled."""


def overrule(code: str) -> str:
    """How a user goes on against a finding that stops a run: the key of a recipe, the flag, the argument in Python.

    Empty for a code of `NOTHING_RUNS`.

    >>> print(overrule("P007"))
    on_finding: {P007: ignore}, --on_finding '{P007: ignore}' or GRPOConfig(on_finding={"P007": "ignore"})
    >>> overrule("C019")
    ''
    """
    if code in NOTHING_RUNS:
        return ""
    wish = f"{{{code}: ignore}}"
    return f'on_finding: {wish}, --on_finding \'{wish}\' or GRPOConfig(on_finding={{"{code}": "ignore"}})'


def way_on(finding: Any) -> str:
    """The fix of a `Finding` as the message of a stop has it: with the line that overrules it, where one does."""
    line = overrule(finding.code) if finding.severity == "error" else ""
    return "\n  or go on against it: ".join(filter(None, (finding.fix, line)))


def pip_line(error: BaseException) -> str:
    """The command that installs what an import lacked; empty for any other error.

    >>> pip_line(ModuleNotFoundError("No module named 'sklearn.svm'", name="sklearn.svm"))
    'pip install scikit-learn'
    >>> pip_line(ImportError("Please install the `math_verify` package to use this reward"))
    'pip install math-verify'
    >>> pip_line(ImportError("cannot import name 'a' from 'b'", name="b")), pip_line(ValueError("pip install x"))
    ('pip install -U b', '')
    >>> pip_line(ImportError("The 'deepspeed>=0.9.3' distribution was not found and is required"))
    "pip install 'deepspeed>=0.9.3'"
    """
    if not isinstance(error, ImportError):
        return ""
    if lacking := re.search(r"The ('[\w.-]+[^']*') distribution was not found", str(error)):
        return f"pip install {lacking[1]}"
    command = re.search(r"pip install ((?:-\S+ )*[\w\[\].-]+)|nstall (?:the )?[`'\"]?([\w-]+)", str(error))
    if command and command[1]:
        return f"pip install {command[1]}"
    named = (error.name or "").partition(".")[0] or (command and command[2]) or ""
    newer = "-U " if error.name and not isinstance(error, ModuleNotFoundError) else ""
    return f"pip install {newer}{_PACKAGES.get(named, named.replace('_', '-'))}" if named else ""


_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "cv2": "opencv-python", "yaml": "pyyaml"}
"""Packages whose name is not that of their module."""


def hub_errors() -> tuple[type[Exception], ...]:
    """The errors of the hub's client when the hub cannot be reached or refuses: OSError, and its HTTP library's own.

    >>> from huggingface_hub.errors import HfHubHTTPError
    >>> issubclass(HfHubHTTPError, hub_errors()), issubclass(ConnectionRefusedError, hub_errors())
    (True, True)
    """
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def named_in(message: object, names: Container[str]) -> list[str]:
    """The settings that an error of another library names; those of Podium carry theirs as data.

    >>> named_in(ValueError("fp16 and bf16 are both True"), {"bf16", "fp16"})
    ['fp16', 'bf16']
    """
    return [word for word in re.findall(r"\w+", str(message)) if word in names]


def odd_path(name: str) -> tuple[str, str]:
    """Describe a name that is no file and no folder, and the way to one; two empty texts for a plain path.

    >>> odd_path("https://example.com/q.csv")[1], odd_path("https://huggingface.co/datasets/org/name/tree/main")[1]
    ('curl -LO https://example.com/q.csv; then q.csv', 'org/name')
    >>> odd_path("-")[0], odd_path("q.csv")
    ('- is standard input, which is not read.', ('', ''))
    """
    return next(_odd(name), ("", ""))


def similar_paths(path: Path, is_kind: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Files and folders beside a missing one whose names are near to it; `is_kind` says which may be meant."""
    names = [entry.name for entry in path.parent.iterdir() if is_kind(entry)] if path.parent.is_dir() else []
    return [str(path.parent / name) for name in get_close_matches(path.name, names, n=3, cutoff=0.6)]


def similar_listed(path: Path, near: Sequence[str]) -> str:
    """A sentence to end a message with: that the folder is missing too, or which names in it are similar."""
    if not path.parent.is_dir():
        return f" (Nor is there a folder {path.parent}.)"
    return f" Similar: {', '.join(near)}." if near else ""


def impossible_name(name: str) -> str:
    """The reason why no file can have this name, or an empty text; that none has it is no reason.

    >>> impossible_name("a" * 256), impossible_name("a\\0"), impossible_name("not/there")
    ('File name too long', 'embedded null byte', '')
    """
    try:
        Path(name).expanduser().lstat()
    except ValueError as error:
        return str(error)
    except OSError as error:
        return os.strerror(error.errno) if error.errno == errno.ENAMETOOLONG else ""
    return ""


def _odd(name: str) -> Iterator[tuple[str, str]]:
    if reason := impossible_name(name):
        yield f"{reprlib.repr(name)} cannot be the name of a file ({reason}).", "a shorter name of printable characters"
        return
    path = Path(name).expanduser()
    scheme, is_address, _ = name.partition("://")
    if is_address and scheme.isalnum():
        yield f"{name} is an address, and files are read from this machine.", _from_address(name)
    if name == "-":
        yield "- is standard input, which is not read.", "cat > rows.jsonl; then rows.jsonl"
    if path.is_symlink() and not path.exists():
        yield f"{name} is a link to {os.readlink(path)}, which is not there.", f"ln -sfn THE_FILE {name}"
    if path.exists() and not path.is_file() and not path.is_dir():
        what = f"{name} is no file: what is read from it once is gone."
        yield what, f"cat {name} > {path.name}.jsonl; then {path.name}.jsonl"
    if re.search(r"[*?]|\[.*\]", name) and not path.exists():
        files = sorted(map(str, path.parent.glob(path.name))) if path.name and "**" not in path.name else []
        found = f"{len(files)} match." if files else "nothing matches."
        fix = ", ".join(files[:5]) or "the name of one that is there (`ls`)"
        if len(files) > 1:
            fix = f"one of {fix}"
        yield f"{name} is a pattern, which is not read; {found}", fix
    if "\\" in name and Path(name.replace("\\", "/")).exists():
        yield f"{name} has the separators of Windows.", name.replace("\\", "/")


def _from_address(name: str) -> str:
    """The command that brings what an address names here; of a page of the hub, its id."""
    scheme, _, rest = name.partition("://")
    host, _, path = rest.partition("/")
    parts = (path if scheme != "hf" else rest).split("/")
    kind = " --repo-type dataset" if parts[0] == "datasets" else ""
    owner = "/".join(parts[bool(kind) :][:2])
    files = "/".join(parts[bool(kind) :][2:])
    if host in ("huggingface.co", "hf.co") and "/resolve/" not in path and "/blob/" not in path:
        return owner
    last = rest.rstrip("/").rpartition("/")[2]
    ways = {
        "file": rest,
        "hf": " ".join(filter(None, ["hf download", owner, files])) + f"{kind} --local-dir .; then {files or '.'}",
        "s3": f"aws s3 cp {name} .; then {last}",
        "gs": f"gcloud storage cp {name} .; then {last}",
    }
    return ways.get(scheme, f"curl -LO {name}; then {last}")


def is_pointer(file: Path) -> bool:
    """Whether a file is a pointer of Git LFS in place of what was stored."""
    with file.open("rb") as stream:
        return stream.read(len(LFS)) == LFS


LFS = b"version https://git-lfs"

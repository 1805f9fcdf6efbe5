"""Rewards as a recipe names them, turned into functions.

    rewards:
      - answer_format                          # from podium.rewards.LIBRARY
      - name: answer_correct
        weight: 2
        adaptive: true                         # see rewards.adaptive
      - function: my_rewards.py:brevity        # a file beside the recipe
        args: {limit: 200}
        row_wise: true                         # `reward_workers` may share its rows out
        env: [JUDGE_KEY]                       # variables that its worker process gets to see
      - my_package.rewards:clarity             # or with a dot, as TRL writes it
      - org/reward-model                       # a sequence classifier, by hub id or folder

A name that stands for something that makes reward functions (a class, or a function that takes no completions) is
called with `args`; a reward function gets them as keyword arguments.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.errors import ConfigError, Finding, odd_path
from podium.errors.texts import as_line, did_you_mean
from podium.isolation.reward_calls import apply_args
from podium.isolation.user_files import attribute, find_file, make_importable, module_from_file, run_users_code
from podium.recipe.document import Place, mistake
from podium.rewards.adaptive import adaptive_settings
from podium.rewards.resolve import callable_name

LOADER = f"{__name__}:reward_by_name"
"""Entry point by which the process of a reward test loads a reward."""

ENTRY_KEYS = ("name", "function", "weight", "args", "adaptive", "row_wise", "env")

_TRL_ARGS: Mapping[str, Mapping[str, Any]] = {
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}
}
"""Arguments that `trl grpo` fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a recipe."""

    name: str
    """As written: a library name, `file.py:function`, `package.module:function`, or a reward model."""
    function: Callable[..., Any] | str
    """A function; a reward model stays a name."""
    weight: float | None = None
    """None: not given."""
    adaptive: bool | Mapping[str, Any] = False
    """Whether the weight adapts, or the settings by which it does."""


@dataclass(slots=True)
class RewardReader:
    """Reads the `rewards` list of one recipe and collects what is wrong with it."""

    folder: Path
    """The recipe's; files are searched here, then in the working directory."""
    where: Callable[[Place], str]
    problems: list[Finding] = field(default_factory=list)

    def read(self, entries: Any, key: str) -> tuple[RewardSpec, ...]:
        """The specs of a list (or of one entry alone) that stands under `key`."""
        entries = entries if isinstance(entries, list) else [entries]
        specs = (self._entry(entry, (key, index)) for index, entry in enumerate(entries))
        return tuple(spec for spec in specs if spec is not None)

    def _entry(self, entry: Any, place: Place) -> RewardSpec | None:
        given = _given_function(entry)
        if given is not None or isinstance(entry, str):
            return given or self._resolve(str(entry), {}, place)
        if not isinstance(entry, Mapping):
            what = f"a reward is a name or a mapping with {', '.join(ENTRY_KEYS)}; got `{entry}`"
            self._refuse(ConfigError(what, code="C003", fix="rewards: [my_rewards.py:my_function]"), place)
            return None
        before = len(self.problems)
        for key in entry:
            if key not in ENTRY_KEYS:
                setting = f"args: {{{key}: {entry[key]}}}, if it is a setting of the reward; or take it out"
                fix = did_you_mean(key, ENTRY_KEYS) or setting
                self._refuse(ConfigError(f"unknown key `{key}` of a reward.", code="C003", fix=fix), (*place, key))
        name = entry.get("name") or entry.get("function")
        if not isinstance(name, str) or (entry.get("name") and entry.get("function")):
            what = "a reward needs one of `name: ...` (from the library) and `function: file.py:name`"
            self._refuse(ConfigError(what, code="C003", fix="function: my_rewards.py:my_function"), place)
        for key, (check, example) in _CHECKS.items():
            if entry.get(key) is not None and (problem := check(entry[key])):
                what = f"`{key}` {problem}, got `{entry[key]}`"
                self._refuse(ConfigError(what, code="C003", fix=f"{key}: {example}"), (*place, key))
        if not _is_file(str(name)) and (own := [key for key in _FILE_KEYS if entry.get(key)]):
            what = f"`{own[0]}` is for functions in files, `file.py:name`; `{name}` is none"
            self._refuse(ConfigError(what, code="C003", fix=as_line(own[0], None)), (*place, own[0]))
        if len(self.problems) > before:
            return None
        return self._resolve(str(name), entry, place)

    def _resolve(self, name: str, entry: Mapping[str, Any], place: Place) -> RewardSpec | None:
        options = {key: entry[key] for key in _FILE_KEYS if entry.get(key) is not None}
        try:
            make_importable(str(Path.cwd()), str(self.folder.resolve()))  # the first as `trl grpo` does
            function = find_reward(name, entry.get("args") or {}, self.folder, **options)
        except ConfigError as error:
            self._refuse(error, place)
            return None
        weight = entry.get("weight")
        adaptive = entry.get("adaptive") or False
        return RewardSpec(name=name, function=function, weight=weight, adaptive=adaptive)

    def _refuse(self, error: ConfigError, place: Place) -> None:
        self.problems.append(mistake(self.where(place), error, code="W013"))


def _given_function(entry: Any) -> RewardSpec | None:
    """In Python: a function itself in place of a name, alone or with `weight` and `adaptive`."""
    values = {"function": entry} if callable(entry) else entry
    if not isinstance(values, Mapping) or not callable(values.get("function")):
        return None
    if values.keys() - {"function", "weight", "adaptive"}:
        return None
    function = values["function"]
    weight = values.get("weight")
    adaptive = values.get("adaptive") or False
    return RewardSpec(name=callable_name(function), function=function, weight=weight, adaptive=adaptive)


_FILE_KEYS = ("row_wise", "env")
"""Keys for functions that run in worker processes."""


def _adaptive_problem(value: Any) -> str:
    try:
        adaptive_settings(value)
    except ConfigError as error:
        return f"must be true or a mapping of settings: {error.what} {error.fix}".rstrip()
    return ""


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_CHECKS: Mapping[str, tuple[Callable[[Any], str], str]] = {
    "weight": (lambda x: "" if isinstance(x, (int, float)) and not isinstance(x, bool) else "must be a number", "1"),
    "args": (lambda x: "" if isinstance(x, Mapping) else "must be a mapping", "{limit: 200}"),
    "adaptive": (_adaptive_problem, "true"),
    "row_wise": (lambda x: "" if isinstance(x, bool) else "must be true or false", "true"),
    "env": (lambda x: "" if _is_names(x) else "must be a list of variable names", "[JUDGE_KEY]"),
}
"""Per key: a validator (returns an error message or "") and an example value."""


def _is_file(name: str) -> bool:
    return ".py:" in name and ".py::" not in name and "://" not in name


def find_reward(
    name: str, args: Mapping[str, Any], folder: Path = Path(), *, row_wise: bool | None = None, env: Sequence[str] = ()
) -> Callable[..., Any] | str:
    """The reward function that `name` and `args` stand for; a reward model's name unchanged.

    A function in a file is called in a worker process; `row_wise` and `env` are those of `file_reward`.

    Raises:
        ConfigError: nothing of that name, with near names; or `args` that it does not take.
    """
    from podium.rewards import LIBRARY, PARTS, library_reward
    from podium.rewards.from_file import file_reward

    if name in LIBRARY:
        parts = {key: _part(args[key], folder) for key in PARTS.get(name, ()) if key in args}
        return library_reward(name, **{**_TRL_ARGS.get(name, {}), **args, **parts})
    if _is_file(name):
        return file_reward(name, args=args, row_wise=row_wise, env=env, folder=folder)
    found = _find_own(name, folder)
    return found if isinstance(found, str) else apply_args(found, args, name)


def reward_by_name(name: str, args: Mapping[str, Any], folder: Path) -> Any:
    """The function of a recipe's entry, loaded into this process, which exists for it alone."""
    make_importable(str(folder.resolve()), str(Path.cwd()))
    if ".py:" not in name:
        return find_reward(name, args, folder)
    file, _, function = name.rpartition(":")
    return apply_args(attribute(module_from_file(find_file(file, folder), file), function, file), args, name)


def _part(entry: Any, folder: Path) -> Any:
    """A reward inside another one's `args`, with its function in place of its name; what is none is left as it is."""
    if isinstance(entry, list):
        return [_part(inner, folder) for inner in entry]
    if isinstance(entry, str):
        return find_reward(entry, {}, folder)
    name = (entry.get("name") or entry.get("function")) if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not isinstance(entry.get("args") or {}, Mapping):
        return entry
    row_wise = entry.get("row_wise")
    env = entry.get("env") or ()
    function = find_reward(name, entry.get("args") or {}, folder, row_wise=row_wise, env=env)
    used = ("name", "args", *_FILE_KEYS)
    return {**{key: value for key, value in entry.items() if key not in used}, "function": function}


def _find_own(name: str, folder: Path) -> Callable[..., Any] | str:
    """A function in a module, or the name of a reward model."""
    what, fix = odd_path(name)
    if what:
        raise ConfigError(what, fix=fix)
    if found := _IN_FILE.fullmatch(name):
        own = [found["function"]] if found["function"] else _functions(folder / Path(found["file"]).expanduser())
        fix = f"{found['file']}:{own[0]}" if own else f"def reward(completions, **kwargs): ... in {found['file']}"
        asked = "a function in a file is written FILE.py:FUNCTION." if found["function"] else "which function?"
        raise ConfigError(f"reward `{name}`: {asked}", fix=fix, settings=(name,), name=name, asked=asked)
    if name.partition(":")[0].endswith(".ipynb"):
        raise ConfigError(
            f"reward `{name}` is a notebook; a reward is a function in a .py file.",
            fix=_EXPORT.format(name.partition(":")[0]),
            settings=(name,),
            name=name,
        )
    if ":" in name:
        module, _, function = name.rpartition(":")
        return attribute(_module(module), function, module)
    if "/" in name or (folder / name / "config.json").is_file():
        return name
    if "," in name:
        names = [part.strip() for part in name.split(",")]
        raise ConfigError(
            f"`{name}` are several rewards in one text.", fix=as_line("rewards", names), settings=(name,), name=name
        )
    if "." in name:
        module, _, function = name.rpartition(".")
        return attribute(_module(module), function, module)
    from podium.rewards import LIBRARY

    what = (
        f"no reward `{name}` in the library. There are {', '.join(sorted(LIBRARY))}; your own: "
        "`file.py:function` or `package.module:function`"
    )
    raise ConfigError(what, fix=did_you_mean(name, LIBRARY) or "podium rewards list")


_IN_FILE = re.compile(r"(?P<file>[^\s:]+\.py)(?:(?:\s*(?:::?|#|\s|\.|/)\s*)(?P<function>\w*))?")
"""`r.py`, `r.py::f`, `r.py#f`, `r.py f`."""
_EXPORT = "jupyter nbconvert --to script {}; then FILE.py:FUNCTION"


def _functions(file: Path) -> list[str]:
    """Names of the functions that a file defines, read and not run."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [name for name in found if not name.startswith("_")]


def _module(name: str) -> ModuleType:
    """Import by name. A missing module has another error than one that fails inside."""
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"there is no module `{name}` (looked in the working directory and in what is installed)",
            fix="FILE.py:FUNCTION, or a module that `python -c 'import MODULE'` finds",
            settings=(name,),
            name=name,
        )
    return run_users_code(lambda: importlib.import_module(name), name, Path(found.origin or name))

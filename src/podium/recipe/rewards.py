"""Rewards as a recipe names them, turned into functions.

    rewards:
      - answer_format                          # from podium.rewards.LIBRARY
      - name: answer_correct
        weight: 2
      - function: my_rewards.py:brevity        # a file beside the recipe
        args: {limit: 200}
      - my_package.rewards:clarity             # or with a dot, as TRL writes it
      - org/reward-model                       # a sequence classifier, by hub id or folder

A name that stands for something that makes reward functions (a class, or a function that takes no completions) is
called with `args`; a reward function gets them as keyword arguments.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.errors import ConfigError, did_you_mean
from podium.recipe.document import Place, Problem

ENTRY_KEYS = ("name", "function", "weight", "args")

_TRL_ARGS: Mapping[str, Mapping[str, Any]] = {
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}
}
"""What `trl grpo` fills in for a name that it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a recipe."""

    name: str
    """As written: a library name, `file.py:function`, `package.module:function`, or a reward model."""
    function: Callable[..., Any] | str
    """What `GRPOTrainer` takes; a reward model stays a name."""
    weight: float | None = None
    """None: not given."""


@dataclass(slots=True)
class RewardReader:
    """Reads the `rewards` list of one recipe and collects what is wrong with it."""

    folder: Path
    """Of the recipe; files are looked for here, then in the working directory."""
    where: Callable[[Place], str]
    problems: list[Problem] = field(default_factory=list)

    def read(self, entries: Any, key: str) -> tuple[RewardSpec, ...]:
        """The specs of a list (or of one entry alone) that stands under `key`."""
        entries = entries if isinstance(entries, list) else [entries]
        specs = (self._entry(entry, (key, index)) for index, entry in enumerate(entries))
        return tuple(spec for spec in specs if spec is not None)

    def _entry(self, entry: Any, place: Place) -> RewardSpec | None:
        if isinstance(entry, str):
            return self._resolve(entry, {}, None, place)
        if not isinstance(entry, Mapping):
            self._say(place, f"a reward is a name or a mapping with {', '.join(ENTRY_KEYS)}; got `{entry}`")
            return None
        before = len(self.problems)
        for key in entry:
            if key not in ENTRY_KEYS:
                self._say((*place, key), f"unknown key `{key}` of a reward.{did_you_mean(key, ENTRY_KEYS)}")
        name, weight, args = entry.get("name") or entry.get("function"), entry.get("weight"), entry.get("args") or {}
        if not isinstance(name, str) or (entry.get("name") and entry.get("function")):
            self._say(place, "a reward needs one of `name: ...` (from the library) and `function: file.py:name`")
        if isinstance(weight, bool) or not isinstance(weight, (int, float, type(None))):
            self._say((*place, "weight"), f"`weight` must be a number, got `{weight}`")
        if not isinstance(args, Mapping):
            self._say((*place, "args"), f"`args` must be a mapping, got `{args}`")
        if len(self.problems) > before:
            return None
        return self._resolve(str(name), args, weight, place)

    def _resolve(self, name: str, args: Mapping[str, Any], weight: float | None, place: Place) -> RewardSpec | None:
        try:
            _make_importable(self.folder)
            function = find_reward(name, args, self.folder)
        except ConfigError as error:
            self._say(place, str(error), code=error.code or "W013")
            return None
        return RewardSpec(name=name, function=function, weight=weight)

    def _say(self, place: Place, what: str, *, code: str = "C003") -> None:
        self.problems.append(Problem(where=self.where(place), what=what, code=code))


def find_reward(name: str, args: Mapping[str, Any], folder: Path = Path()) -> Callable[..., Any] | str:
    """The reward function that `name` and `args` stand for; a reward model's name unchanged.

    Raises:
        ConfigError: nothing of that name, with near names; or `args` that it does not take.
    """
    from podium.rewards import LIBRARY, library_reward

    if name in LIBRARY:
        return library_reward(name, **{**_TRL_ARGS.get(name, {}), **args})
    found = _find_own(name, folder)
    return found if isinstance(found, str) else apply_args(found, args, name)


def _find_own(name: str, folder: Path) -> Callable[..., Any] | str:
    """What the user's own name stands for."""
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        return _attribute(_module_from_file(file, folder), attribute, file)
    if ":" in name:
        module, _, attribute = name.rpartition(":")
        return _attribute(_module(module), attribute, module)
    if "/" in name or (folder / name / "config.json").is_file():
        return name
    if name.endswith(".py"):
        raise ConfigError(f"reward `{name}`: which function? Write `{name}:function`")
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return _attribute(_module(module), attribute, module)
    from podium.rewards import LIBRARY

    raise ConfigError(
        f"no reward `{name}` in the library.{did_you_mean(name, LIBRARY)} There are {', '.join(sorted(LIBRARY))}; your "
        "own: `file.py:function` or `package.module:function`"
    )


def apply_args(found: Callable[..., Any], args: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """A reward function with `args` filled in; whatever makes reward functions is called with them.

    Raises:
        ConfigError: an argument that it does not take, or one that it needs and that is missing.
    """
    parameters = _parameters(found)
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [arg for arg in args if arg not in parameters and not takes_any]
    if unknown:
        takes = ", ".join(p for p in parameters if p not in ("prompts", "completions", "completion_ids"))
        hint = did_you_mean(unknown[0], parameters)
        raise ConfigError(f"reward `{name}` takes no argument `{unknown[0]}`.{hint} It takes: {takes or 'none'}")
    if not _makes_rewards(found, parameters):
        return functools.partial(found, **args) if args else found
    try:
        return found(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward `{name}` cannot be made with these `args`: {error}") from error


def _parameters(found: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Nothing where Python does not know (some functions written in C)."""
    try:
        return inspect.signature(found).parameters
    except (ValueError, TypeError):
        return {}


def _makes_rewards(found: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> bool:
    """A class, or a function that asks for nothing that every reward is given."""
    if inspect.isclass(found):
        return True
    given = {"prompts", "completions", "completion_ids"} & set(parameters)
    catches_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    return inspect.isfunction(found) and not given and not catches_all and not inspect.iscoroutinefunction(found)


# ---- modules ----


def _make_importable(folder: Path) -> None:
    """The working directory (as `trl grpo` does) and the recipe's folder on the import path, in front."""
    for entry in (str(folder.resolve()), str(Path.cwd())):
        if entry not in sys.path:
            sys.path.insert(0, entry)


def _module_from_file(file: str, folder: Path) -> ModuleType:
    candidates = [base / Path(file).expanduser() for base in (folder, Path.cwd())]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise ConfigError(
            f"there is no file {file} (looked in {folder.resolve()} and {Path.cwd()}).{_near_files(candidates)}"
        )
    module_name = f"podium_rewards_{abs(hash(path.resolve()))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        _run_users_code(lambda: spec.loader.exec_module(module), file, path)  # type: ignore[union-attr]
    except ConfigError:
        del sys.modules[module_name]
        raise
    return module


def _near_files(candidates: list[Path]) -> str:
    stems = {entry.stem for path in candidates if path.parent.is_dir() for entry in path.parent.glob("*.py")}
    near = get_close_matches(candidates[0].stem, sorted(stems), n=3, cutoff=0.6)
    return f" Similar: {', '.join(f'{stem}.py' for stem in near)}." if near else ""


def _module(name: str) -> ModuleType:
    """Import by name; what is missing is told apart from what fails inside."""
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise ConfigError(f"there is no module `{name}` (looked in the working directory and in what is installed)")
    return _run_users_code(lambda: importlib.import_module(name), name, Path(found.origin or name))


def _run_users_code(run: Callable[[], Any], name: str, path: Path) -> Any:
    """Import a user's file; whatever it raises becomes one message with the file's own line."""
    try:
        return run()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # a user's module can raise anything
        tail = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in tail if Path(frame.filename).resolve() == path.resolve()]
        line = f":{frames[-1].lineno}" if frames else ""
        raise ConfigError(f"importing {name} failed at {path}{line}: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, name: str, shown: str) -> Callable[..., Any]:
    value = getattr(module, name, None)
    if callable(value):
        return value
    own = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
    if value is not None:
        raise ConfigError(f"`{name}` in {shown} is {type(value).__name__}; a reward is a function")
    listed = f" It has {', '.join(own[:10])}." if own else " It has no functions."
    raise ConfigError(f"{shown} has no function `{name}`.{did_you_mean(name, own)}{listed}")

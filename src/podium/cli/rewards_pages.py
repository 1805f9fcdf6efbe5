"""The pages of `podium rewards list` and `show`: all of it read from the functions themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from podium.errors import ConfigError, did_you_mean

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def catalogue() -> str:
    """Names by family (the file they are in) with the first sentence of each."""
    from podium.rewards import LIBRARY

    families: dict[str, list[str]] = {}
    for name, function in LIBRARY.items():
        families.setdefault(_family(function), []).append(f"  {name:<30} {first_line(function)}")
    blocks = [f"{family}\n" + "\n".join(lines) for family, lines in families.items()]
    return "\n\n".join(blocks) + "\n\nMore of one: podium rewards show NAME\n"


def entry(name: str) -> dict[str, Any]:
    """One reward as plain values. Raises `ConfigError` for a name the library lacks."""
    function = _known(name)
    columns, settings = _columns_and_settings(name)
    return {
        "name": name,
        "family": _family(function),
        "about": first_line(function),
        "columns": columns,
        "settings": {
            key: {"needed": each.default is inspect.Parameter.empty, "default": _plain_default(each)}
            for key, each in settings.items()
        },
    }


def _family(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2].replace("_", " ")


def _plain_default(parameter: inspect.Parameter) -> Any:
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    return (
        default if default is None or isinstance(default, (bool, int, float, str, tuple, list, dict)) else repr(default)
    )


def first_line(function: Callable[..., Any]) -> str:
    """The docstring's first paragraph on one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def page(name: str) -> str:
    """Docstring, columns, settings and examples of one reward. Raises `ConfigError` for a name the library lacks."""
    from podium.rewards import FACTORIES

    function = _known(name)
    columns, settings = _columns_and_settings(name)
    parts = [
        name,
        inspect.getdoc(function) or "",
        f"Columns: {', '.join(columns) or 'none'}" if name not in FACTORIES else "",
        _settings_text(settings),
        f"In a recipe:\n\n{_yaml(name, settings)}",
        f"In Python:\n\n{_python(name, settings)}",
        f"Try it: podium rewards test {name} --data train.jsonl{_flags(settings)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _known(name: str) -> Callable[..., Any]:
    from podium.rewards import LIBRARY

    if name not in LIBRARY:
        fix = did_you_mean(name, LIBRARY) or "podium rewards list"
        raise ConfigError(f"no reward `{name}` in the library.", fix=fix)
    return LIBRARY[name]


def _columns_and_settings(name: str) -> tuple[list[str], dict[str, inspect.Parameter]]:
    from podium.rewards import FACTORIES, LIBRARY

    parameters = inspect.signature(LIBRARY[name]).parameters
    settings = _settings(parameters, is_factory=name in FACTORIES)
    return [key for key in parameters if key not in settings and key not in GIVEN], settings


def _settings(parameters: Mapping[str, inspect.Parameter], *, is_factory: bool) -> dict[str, inspect.Parameter]:
    return {key: each for key, each in parameters.items() if is_factory or each.kind is inspect.Parameter.KEYWORD_ONLY}


def _settings_text(settings: Mapping[str, inspect.Parameter]) -> str:
    if not settings:
        return ""
    lines = [f"  {key:<24} {_default(each)}" for key, each in settings.items()]
    return "Settings:\n" + "\n".join(lines)


def _default(parameter: inspect.Parameter) -> str:
    kind = "" if parameter.annotation is inspect.Parameter.empty else str(parameter.annotation)
    given = "needed" if parameter.default is inspect.Parameter.empty else f"default {parameter.default!r}"
    return f"{kind:<32} {given}"


def _needed(settings: Mapping[str, inspect.Parameter]) -> list[str]:
    return [key for key, each in settings.items() if each.default is inspect.Parameter.empty]


def _yaml(name: str, settings: Mapping[str, inspect.Parameter]) -> str:
    needed = _needed(settings)
    if not needed:
        return f"  rewards:\n    - {name}"
    return f"  rewards:\n    - name: {name}\n      args: {{{', '.join(f'{key}: ...' for key in needed)}}}"


def _python(name: str, settings: Mapping[str, inspect.Parameter]) -> str:
    arguments = "".join(f", {key}=..." for key in _needed(settings))
    return (
        "  from podium.rewards import library_reward\n\n"
        f'  GRPOTrainer(..., reward_funcs=[library_reward("{name}"{arguments})])'
    )


def _flags(settings: Mapping[str, inspect.Parameter]) -> str:
    return "".join(f" --args {key}=..." for key in _needed(settings))

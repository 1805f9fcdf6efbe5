"""The words of a command line that is a recipe with any of its keys as flags."""

from __future__ import annotations

from collections.abc import Sequence

from podium.errors import ConfigError
from podium.recipe.flags import Overrides, parse_flags


def recipe_and_flags(words: Sequence[str], verb: str) -> tuple[str, Overrides]:
    """`run.yaml --beta 0.1` or, as for `trl grpo`, `--config run.yaml --beta 0.1`.

    Raises:
        ConfigError: no recipe, or more than one.
    """
    paths, flags = parse_flags(words)
    if "config" in flags:
        paths.append(str(flags.pop("config")))
    if len(paths) != 1:
        got = f"got {len(paths)}: {', '.join(paths)}" if paths else "none given"
        raise ConfigError(f"`podium {verb}` takes one recipe, before any flag ({got}). Type: podium {verb} run.yaml")
    return paths[0], flags


def models_and_flags(words: Sequence[str], verb: str, *, most: int) -> tuple[list[str], Overrides]:
    """`runs/a runs/b --max_completion_length 64`: one model or run, or up to `most`.

    Raises:
        ConfigError: none, or too many.
    """
    names, flags = parse_flags(words)
    if not 1 <= len(names) <= most:
        got = f"got {len(names)}: {', '.join(names)}" if names else "none given"
        wanted = "one model or run" if most == 1 else "one model or run, or two"
        raise ConfigError(
            f"`podium {verb}` takes {wanted}, before any flag ({got}). Type: podium {verb} runs/quickstart"
        )
    return names, flags

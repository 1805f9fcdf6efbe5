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

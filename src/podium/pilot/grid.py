"""Candidates of a pilot: settings that vary on a new task, by default around those of the recipe.

A grid that is given is a product: `temperature=0.8,1.2` and `learning_rate=1e-5,3e-5` are four candidates. The default
is smaller: each setting is varied alone, with and without worked examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import as_line, nearest
from podium.recipe.document import scalar
from podium.recipe.schema import check_key

AXES = ("examples", "temperature", "learning_rate", "max_completion_length", "num_generations")
"""Settings that a pilot varies."""
SAMPLING = ("examples", "temperature", "max_completion_length")
"""Settings that change the completions before training. A larger group is more completions of the same distribution."""
WITH, WITHOUT = "with", "without"
"""Values of the axis `examples`."""
TEMPERATURES = (0.8, 1.2)
FASTER = 2.0
"""Factor of the other learning rate."""
LONGER = 2
"""Factor of the other completion limit."""
LARGER = 2
"""Factor of the other group size."""
MOST = 64
"""Candidates of one pilot."""

Axes = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the grid."""

    number: int
    name: str
    """Its settings on the axes that vary: `with examples, temperature 0.8`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its settings by axis; `examples` is `with` or `without`."""

    @property
    def sampling(self) -> tuple[tuple[str, Any], ...]:
        """The settings by which its completions before training differ from those of other candidates."""
        return tuple((axis, self.values[axis]) for axis in SAMPLING if axis in self.values)


def read_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Axes as they are typed: `temperature=0.8,1.0`.

    Raises `ConfigError` for an unknown axis, one that is given twice or has no value, or a value that a recipe refuses.

    >>> read_grid(["temperature=0.8,1.0", "examples=with,without"])
    {'temperature': (0.8, 1.0), 'examples': ('with', 'without')}
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        written, equals, values = text.partition("=")
        axis = written.strip().replace("-", "_")
        if not equals or not values.strip():
            raise ConfigError("pilot.grid_no_values", text=text)
        if axis not in AXES:
            raise ConfigError("pilot.grid_pilot_varies", text=text, axes=AXES, axis=axis, near=nearest(axis, AXES))
        if axis in axes:
            raise ConfigError("pilot.grid_given_twice", axis=axis, values=values)
        axes[axis] = tuple(dict.fromkeys(_value(axis, value.strip()) for value in values.split(",")))
    return axes


def _value(axis: str, text: str) -> Any:
    if axis == "examples":
        if text not in (WITH, WITHOUT):
            raise ConfigError("pilot.grid_examples", text=text, wanted=WITH, unwanted=WITHOUT)
        return text
    value, error = check_key(axis, scalar(text))
    if error is None and value is None:
        error = ConfigError("pilot.needs_number", fix=as_line(axis, 8), axis=axis)
    if error is not None:
        raise ConfigError("pilot.grid", fix=error.fix, code=error.code, axis=axis, text=text, what=error.what)
    return value


def product(axes: Axes) -> list[Candidate]:
    """Every combination of the axes' values. Raises `ConfigError` for more than `MOST`.

    >>> [candidate.name for candidate in product({"examples": ("with",), "temperature": (0.8, 1.0)})]
    ['temperature 0.8', 'temperature 1.0']
    """
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(points) > MOST:
        raise ConfigError("pilot.grid_candidates_pilot", points_count=len(points), most=MOST)
    return numbered(points)


def around(base: Mapping[str, Any], *, examples: Sequence[str], completions: int) -> list[Candidate]:
    """The default grid: the recipe's settings, and each of them varied alone, for every value of `examples`.

    Args:
        base: the recipe's values of all axes but `examples`.
        examples: `with`, `without`, or both.
        completions: of an optimizer step; groups have to divide them, and at least two are kept.

    >>> base = {"temperature": 1.0, "learning_rate": 3e-5, "max_completion_length": 16, "num_generations": 8}
    >>> for candidate in around(base, examples=["with"], completions=64):
    ...     print(list(candidate.values.values()))
    ['with', 1.0, 3e-05, 16, 8]
    ['with', 0.8, 3e-05, 16, 8]
    ['with', 1.2, 3e-05, 16, 8]
    ['with', 1.0, 6e-05, 16, 8]
    ['with', 1.0, 3e-05, 32, 8]
    ['with', 1.0, 3e-05, 16, 16]
    """
    varied: list[dict[str, Any]] = [{}, *({"temperature": value} for value in TEMPERATURES)]
    varied.append({"learning_rate": float(f"{FASTER * base['learning_rate']:.3g}")})
    varied.append({"max_completion_length": LONGER * base["max_completion_length"]})
    group = LARGER * base["num_generations"]
    if completions % group == 0 and completions // group >= 2:
        varied.append({"num_generations": group})
    points = [{"examples": each, **base, **one} for each in examples for one in varied]
    return numbered([point for i, point in enumerate(points) if point not in points[:i]])


def numbered(points: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """Candidates in the order of their points, named by the axes that vary."""
    varied = [axis for axis in points[0] if any(point[axis] != points[0][axis] for point in points)]

    def name(point: Mapping[str, Any]) -> str:
        words = (f"{point[axis]} examples" if axis == "examples" else f"{axis} {point[axis]}" for axis in varied)
        return ", ".join(words) or "the only candidate"

    return [Candidate(number=n, name=name(point), values=point) for n, point in enumerate(points, start=1)]

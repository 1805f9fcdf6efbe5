"""Output of `--json`: one object on stdout, findings under `findings`, NaN and infinity as null.

Everything outside ASCII is escaped: text that a model wrote may hold control sequences.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from podium.records import Finding


def print_json(value: Mapping[str, Any]) -> None:
    """One object, indented."""
    typer.echo(json.dumps(without_nan(value), indent=2, allow_nan=False))


def findings(found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Each as `code`, `severity`, `what`, `why`, `fix`, `step`, in the order given."""
    return [dataclasses.asdict(finding) for finding in found]


def without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity, and no numbers of numpy.

    >>> without_nan({"mean": float("nan"), "values": (1.0, float("inf"))})
    {'mean': None, 'values': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    return None if isinstance(value, float) and value - value != 0 else value

"""TRL's public tests of its trainer, and what shows the same here: `python -m tests.parity.trl_tests`."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import yaml

TABLE = Path(__file__).with_suffix(".yaml")
ROOT = Path(__file__).parents[2]


def rows() -> list[tuple[str, str, str, str]]:
    """Class and name of TRL's test, `holds` or the reason why not, and our own test."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [
        (group, name, each.get("because", "holds"), each.get("holds") or each.get("but") or "")
        for group, tests in table.items()
        for name, each in tests.items()
    ]


@cache
def functions(file: str) -> set[str]:
    """Names of the functions in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_there(test: str) -> bool:
    """Whether a test of ours, as pytest names it, is in its file."""
    file, _, name = test.partition("::")
    return name in functions(file)


def main() -> None:
    """Print the table, and how many hold."""
    lines = [f"| {group}.{name} | {says} | {test} |" for group, name, says, test in rows()]
    held = f"{sum(says == 'holds' for _, _, says, _ in rows())} of {len(rows())} hold."
    sys.stdout.write("\n".join(["| TRL's test | here | shown by |", "|---|---|---|", *lines, "", held, ""]))


if __name__ == "__main__":
    main()

"""The layout of the package, computed from its imports: entries, levels, circles, sizes of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import podium

PACKAGE = Path(podium.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "architecture.md"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file of the package."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


@cache
def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports: at the top, in functions, and for type checkers."""
    modules = {module_name(path): tree for path, tree in trees().items()}
    return {name: set(imported(tree, modules)) - {name} for name, tree in modules.items()}


def imported(tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "podium":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "podium")


def between_entries() -> dict[str, set[str]]:
    """Which entries of the top level each entry imports from. Public names of `podium` itself are not looked into."""
    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        entry = name.split(".")[1] if "." in name else "__init__"
        graph.setdefault(entry, set()).update(other.split(".")[1] for other in others if "." in other)
        graph[entry].discard(entry)
    return graph


def order_in_docs() -> list[str]:
    block = PAGE.read_text(encoding="utf-8").split("## Packages")[1].split("```")[1]
    return [re.split(r"[ /.]", line)[0] for line in block.strip().splitlines()]


def test_all_entries_of_the_top_level_are_documented() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("__") and path.name != "py.typed"}
    assert set(order_in_docs()) == entries


def test_packages_import_only_from_packages_above_them() -> None:
    order = [*order_in_docs(), "__init__", "__main__"]
    wrong = [
        f"{entry} imports {other}"
        for entry, others in between_entries().items()
        for other in others
        if order.index(other) >= order.index(entry)
    ]
    assert not wrong


def test_there_are_at_most_eleven_levels() -> None:
    graph, level = between_entries(), dict[str, int]()
    for entry in TopologicalSorter(graph).static_order():
        level[entry] = 1 + max((level[other] for other in graph.get(entry, ())), default=0)
    assert max(level[entry] for entry in graph if not entry.startswith("__")) <= 11


def test_no_module_is_in_a_circle() -> None:
    graph = {name: {other for other in others if other != "podium"} for name, others in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


LEAVES = {
    "engines.vllm": "engines/table.py",
    "agents.adapters": "agents/table.py",
    "agents.library": "agents/table.py",
    "agents.programs": "agents/table.py",
    "tinker": "cli/tinker.py",
}
"""Optional packages: nothing imports them. By package, the file that has the names of its modules as texts."""

TESTERS = re.compile(r"podium\.tester\.|podium\.cli\.tested$")
"""They try programs, and so belong to them."""


@pytest.mark.parametrize("leaf", LEAVES)
def test_nothing_imports_an_optional_package(leaf: str) -> None:
    inside = {name for name in imports() if re.match(rf"podium\.{leaf}(\.|$)", name)}
    assert len(inside) > 1
    importers = {name for name, others in imports().items() if name not in inside and others & inside}
    assert not {name for name in importers if leaf != "agents.programs" or not TESTERS.match(name)}


@cache
def texts() -> list[tuple[Path, str]]:
    """The texts in each file of the package, but for docstrings."""
    found = []
    for path, tree in trees().items():
        nodes = [*ast.walk(tree)]
        documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documented]
        found += [(path, node.value) for node in constants if isinstance(node.value, str)]
    return found


@pytest.mark.parametrize(("leaf", "table"), LEAVES.items())
def test_modules_of_an_optional_package_are_named_in_its_table_alone(leaf: str, table: str) -> None:
    """Rewards and rows of reasoning-gym have tables of their own."""
    others = {"rewards/__init__.py", "data/sources.py"} if leaf == "agents.adapters" else set()
    folder = PACKAGE / leaf.replace(".", "/")
    pattern = re.compile(rf"(?<![\w/])(podium)?\.{leaf}\.")
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path, text in texts()
        if pattern.search(text) and not path.is_relative_to(folder)
    }
    assert table in naming
    assert naming <= {table, *others}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function with its place, and whether it is a method."""
    for path, tree in trees().items():
        for parent in ast.walk(tree):
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{path.relative_to(PACKAGE)}:{node.name}", node, isinstance(parent, ast.ClassDef)


TRL = ("trainer/trainer.py:__init__", "checks/__init__.py:check")
"""Functions with TRL's own signature: `GRPOTrainer`, and `podium.check`, which takes the same arguments."""
OPTIONS = ("cli/init.py:init", "cli/push.py:push")
"""Verbs whose arguments are their options, each with a line of `--help`."""


def test_functions_take_at_most_eight_arguments() -> None:
    def count(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> int:
        of = node.args
        return len(of.posonlyargs) + len(of.args) + len(of.kwonlyargs) - method

    assert not [
        place for place, node, method in functions() if count(node, method=method) > 8 and place not in (*TRL, *OPTIONS)
    ]


def test_every_name_of_the_table_of_places_is_defined_there() -> None:
    rows = re.findall(
        r"(?m)^\|[^|]+\| (`.+) \|$", PAGE.read_text(encoding="utf-8").split("## Where to look")[1].split("\n## ")[0]
    )
    places = [part.split(":") for row in rows for part in row.split(";")]
    assert len(places) >= 15
    for file, *names in places:
        text = (PACKAGE / re.findall(r"`(.+?)`", file)[0]).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", "".join(names)):
            assert re.search(rf"(?m)^ *(?:async )?(?:def|class) {name}\b|^{name}\b.* = ", text), f"{file} has no {name}"

"""The JSON lines of this folder's scripts as the Markdown tables of benchmarks/RESULTS.md.

python -m benchmarks.gpu.tables DIR

Of a case that was run several times the last line counts. What failed or was not begun is named under its table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "decode": {
        "ms a step": ("ms_a_step", ".1f"),
        "tokens/s": ("tokens_a_second", ",.0f"),
        "peak GiB": ("peak_gib", ".1f"),
    },
    "step": {
        "seconds a step": ("seconds_a_step", ".2f"),
        "sampling": ("generate", ".2f"),
        "training": ("train", ".2f"),
        "peak GiB": ("peak_gib", ".1f"),
    },
    "train_pack": {
        "ms": ("ms", ",.0f"),
        "input tokens": ("input_tokens", ",d"),
        "peak GiB": ("peak_gib", ".1f"),
        "waits": ("waits", "d"),
        "largest difference to float32": ("largest_difference", ".3f"),
    },
    "memory": {
        "measured GiB": ("measured_gib", ".1f"),
        "estimated GiB": ("estimated_gib", ".1f"),
        "estimated / measured": ("ratio", ".2f"),
        "within 15 %": ("within_target", ""),
    },
    "two_ranks": {"difference to one process": ("relative_difference", ".1e")},
}
"""Of the scripts whose tables have one row a case: heading, field and format of each column."""

TITLES: Mapping[str, str] = {
    "matrix": "Training is right",
    "decode": "Decoding",
    "step": "A whole step, beside TRL",
    "train_pack": "Forward and backward of one pack",
    "memory": "Peak memory against the estimate",
    "two_ranks": "Two processes on one device, two steps",
}


def read(file: Path) -> list[Line]:
    """The last line of every case, in the order in which cases first came."""
    found = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        found[line["group"], line["case"]] = line
    return list(found.values())


def section(name: str, lines: Sequence[Line]) -> str:
    """One script's table, under where it ran."""
    table = matrix(lines) if name == "matrix" else cases(name, lines)
    devices = {line["device"] for line in lines}
    device = ", ".join(sorted(devices - {"cuda"} or devices))  # "cuda": written for a process that said nothing
    tiny = " Tiny shapes: a rehearsal, whose figures say nothing." if any(line["tiny"] for line in lines) else ""
    return "\n".join([f"### {TITLES[name]}", "", f"On {device}.{tiny}", "", *table, *not_ok(lines)])


def matrix(lines: Sequence[Line]) -> list[str]:
    """One row a group: how many cases are right, and the largest gap between sampling and training."""
    rows = []
    for group in dict.fromkeys(line["group"] for line in lines):
        mine = [line for line in lines if line["group"] == group]
        waits = next((line for line in mine if "waits_a_pack" in line), {})
        right = f"{sum(bool(line['ok']) for line in mine)} of {len(mine)}"
        gap = max((line["logp_gap"] for line in mine if line.get("logp_gap") is not None), default=None)
        step, a_pack = waits.get("waits_a_decode_step"), waits.get("waits_a_pack")
        rows.append([group, right, cell(gap, ".4f"), cell(step, ".2f"), cell(a_pack, "d")])
    return markdown(["", "right", "mean gap of log-probabilities", "waits a decode step", "waits a pack"], rows)


def cases(name: str, lines: Iterable[Line]) -> list[str]:
    """One row a case that ran."""
    columns = COLUMNS[name]
    rows = [
        [line["group"], line["case"], *(cell(line.get(field), form) for field, form in columns.values())]
        for line in lines
        if any(field in line for field, _ in columns.values())
    ]
    return markdown(["", "case", *columns], rows)


def cell(value: Any, form: str) -> str:
    """
    >>> cell(0.5, ".1f"), cell(True, ""), cell(None, "d")
    ('0.5', 'yes', '')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def not_ok(lines: Iterable[Line]) -> list[str]:
    """A list of what failed or was not begun, each with the last line of its error."""
    bad = [line for line in lines if not line["ok"]]
    texts = [(line.get("error") or "not within its tolerance").strip().splitlines()[-1] for line in bad]
    named = [f"- {line['group']}, {line['case']}: {text}" for line, text in zip(bad, texts, strict=True)]
    return ["", "Not right, or not begun:", "", *named] if named else []


def main() -> int:
    """Print all tables for which there are lines."""
    folder = Path(sys.argv[1])
    files = {name: folder / f"{name}.jsonl" for name in TITLES}
    print("\n\n".join(section(name, read(file)) for name, file in files.items() if file.is_file()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests of every defect that was found by use, and print what happens now: `python -m tests.defects`.

Arguments are passed on to pytest, as in `python -m tests.defects -n 2`; `results.xml`, which `pytest --junitxml`
wrote, is read instead of running them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import yaml

LINES = Path(__file__).with_name("lines.yaml")


def run(arguments: list[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Defect -> (case, outcome, what happens now) of each of its tests."""
    if arguments and arguments[0].endswith(".xml"):
        return read(Path(arguments[0]))
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "defect", "--junitxml", str(xml), *arguments]
        subprocess.run(command, stdout=sys.stderr, check=False)
        return read(xml)


def read(xml: Path) -> dict[str, list[tuple[str, str, str]]]:
    """What `run` gives, from the results of pytest."""
    cases = defaultdict(list)
    for test in ET.parse(xml).iter("testcase"):
        values = [(item.get("name"), str(item.get("value"))) for item in test.iter("property")]
        now = " / ".join(" ".join(value.split()) for name, value in values if name == "now")
        bad = {child.tag for child in test} & {"failure", "error", "skipped"}
        for name, value in values:
            if name == "defect":
                line, _, case = value.partition(": ")
                cases[line].append((case, "".join(sorted(bad)) or "ok", now or str(test.get("name"))))
    return cases


def main() -> int:
    """Print one row a case; 1 where a test failed or a line has none."""
    lines = yaml.safe_load(LINES.read_text(encoding="utf-8"))
    cases = run(sys.argv[1:])
    bad = 0
    print("| defect | what was done | case | now | test |\n|---|---|---|---|---|")
    for line, about in lines.items():
        rows = sorted(set(cases.get(line, []))) or [
            ("", (about.get("left") and "not here") or "MISSING", about.get("left", ""))
        ]
        for case, outcome, now in rows:
            bad += outcome not in ("ok", "skipped", "not here")
            cells = (line, about["done"], case, now, outcome)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

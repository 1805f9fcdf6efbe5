"""The picture in the README: what `podium train quickstart` prints, as docs/demo.svg.

python -m benchmarks.demo
python -m benchmarks.demo --max_steps 2 --out /tmp/demo.svg    # other flags go to `podium train`
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112
PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"


def main() -> None:
    """Run, show, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options, flags = parser.parse_known_args()
    command = [sys.executable, "-m", "podium", "train", "quickstart", *flags]
    console = Console(width=WIDTH, record=True)
    console.print(Text("$ make demo", style="bold"))
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        for line in running.stdout or ():
            console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=False)
    if running.returncode:
        raise SystemExit(running.returncode)
    options.out.write_text(console.export_svg(title="make demo"))


if __name__ == "__main__":
    main()

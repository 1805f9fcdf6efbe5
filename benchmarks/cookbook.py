"""The arithmetic of tinker-cookbook, against `podium tinker` with the built-in model: `make bench-cookbook`.

python -m benchmarks.cookbook FOLDER [max_steps=100 ...]

The settings are those of the recipe's README; what follows FOLDER goes to the recipe behind them. A run that was ended
goes on from the recipe's last checkpoint. Run with the Python that has the cookbook (`make test-tinker` makes it).
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bench import hardware, save
from podium.models.builtin import resolve_model

MODEL = "builtin:smollm2-135m-instruct"
KEY = "tml-a-key-of-this-run"
SETTINGS = ("renderer_name=qwen3_instruct", "loss_fn=importance_sampling", "learning_rate=1e-4")
BATCH = ("group_size=4", "groups_per_batch=100", "max_steps=100")
WINDOW = 10
KEYS = ("env/all/correct", "env/all/format", "time/total")


def train(folder: Path, flags: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of each step, after a server and the recipe have run in `folder`."""
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    serve = [sys.executable, "-m", "podium", "tinker", MODEL, "-o", str(folder / "saved"), "--port", "0"]
    recipe = [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={resolve_model(MODEL)}"]
    log = folder / "log"
    recipe += [*SETTINGS, *BATCH, f"log_path={log}", "behavior_if_log_dir_exists=resume", *flags]
    with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if "TINKER_BASE_URL" in line), None)
            if line is None:
                raise SystemExit("The server has ended; what it said stands above.")
            environment["TINKER_BASE_URL"] = re.findall(r"http://\S+", line)[0]
            subprocess.run(recipe, env=environment, check=True)
        finally:
            server.terminate()
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if "env/all/correct" in row}  # a step done again counts once
    return [steps[step] for step in sorted(steps)]


def main() -> None:
    """Train, print shares by ten steps, write the JSON."""
    folder, *flags = sys.argv[1:] or ["runs/cookbook"]
    rows = train(Path(folder).resolve(), flags)
    table = Table("steps", "right", "in time", "seconds a step", title=f"tinker-cookbook's arithmetic, {hardware()}")
    for start in range(0, len(rows), WINDOW):
        part = rows[start : start + WINDOW]
        right, ended, seconds = ([row[key] for row in part] for key in KEYS)
        shares = (f"{statistics.fmean(values):.3f}" for values in (right, ended))
        table.add_row(f"{start + 1}-{start + len(part)}", *shares, f"{statistics.median(seconds):.1f}")
    Console(width=110).print(table)
    saved = [{name: row[key] for name, key in zip(("right", "ended", "seconds"), KEYS, strict=True)} for row in rows]
    print(save("cookbook", {"settings": [*SETTINGS, *BATCH, *flags], "steps": saved}))


if __name__ == "__main__":
    main()

"""`podium check` on large files: seconds of the processor for 10,000 rows, constant memory for gigabytes.

pytest -m slow tests/system/test_check_scale.py -s        # PODIUM_CHECK_GB=5 for the large one
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from podium.testing import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RECIPE = """\
model: {model}
dataset: rows.jsonl
rewards: [answer_correct]
per_device_train_batch_size: 32
num_generations: 8
max_completion_length: 16
max_steps: 1
"""

PROGRAM = """\
import json, resource, time
import datasets, podium.checks.setup, podium.checks.table  # what is imported is not what is measured
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start, cpu = peak(), time.perf_counter(), time.process_time()
found = podium.check("run.yaml")
seconds = time.perf_counter() - start
cpu = time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "added_mb": peak() - before, "peak_mb": peak(),
                  "what": {finding.code: finding.what for finding in found}}))
"""


def measured(folder: Path, model: str) -> dict[str, object]:
    (folder / "run.yaml").write_text(RECIPE.format(model=model))
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True)
    sys.stdout.write(done.stdout)
    return json.loads(done.stdout)


def row(number: int, padding: str) -> str:
    return json.dumps({"prompt": f"{number} + 1 = ", "answer": str(number + 1), "source": padding}) + "\n"


QUESTION = "Weng earns $12 an hour for babysitting. Yesterday she did {} minutes of it. How much did she earn?"


def chat_row(number: int) -> str:
    """A conversation of some fifty tokens with the template around it."""
    message = {"role": "user", "content": QUESTION.format(number)}
    return json.dumps({"prompt": [message], "answer": str(number / 5)}) + "\n"


@pytest.mark.parametrize("kind", ["tiny", "builtin"])
def test_ten_thousand_rows_in_two_seconds(tmp_path: Path, kind: str) -> None:
    """The built-in model's tokenizer on conversations, template rendered; the tiny one on plain text."""
    real = kind == "builtin"
    lines = (chat_row(number) if real else row(number, "x" * 100) for number in range(10_000))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    model = "builtin:smollm2-135m-instruct" if real else save_tiny_model(tmp_path / "model")
    result = measured(tmp_path, model)
    assert result["what"]["D040"].startswith("rows.jsonl: 10,000 rows")  # type: ignore[index]
    assert result["cpu_seconds"] < 2  # type: ignore[operator]


def test_gigabytes_in_constant_memory(tmp_path: Path) -> None:
    """The last row is bad, so that nobody can have stopped before; memory does not grow with the file."""
    size = int(float(os.environ.get("PODIUM_CHECK_GB", "1")) * 1e9)
    file, padding, number = tmp_path / "rows.jsonl", "x" * 1900, 0
    model = save_tiny_model(tmp_path / "model")
    try:
        with file.open("w") as stream:
            while stream.tell() < size:
                stream.write("".join(row(number + i, padding) for i in range(1000)))
                number += 1000
            stream.write('{"prompt": null}\n')
        result = measured(tmp_path, model)
    finally:
        file.unlink()
    assert f"rows.jsonl:{number + 1}, row {number}: prompt is null" in result["what"]["D005"]  # type: ignore[index]
    assert result["added_mb"] < 200  # type: ignore[operator]

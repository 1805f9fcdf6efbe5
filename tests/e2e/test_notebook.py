"""examples/quickstart.ipynb: it holds its outputs, runs from top to bottom, learns, and displays what it should.

`jupyter execute --inplace examples/quickstart.ipynb` writes new outputs into it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def outputs(notebook: Any) -> str:
    """Everything that its cells have printed and displayed."""
    return json.dumps([cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"])


def check_outputs(shown: str) -> None:
    assert '"output_type": "error"' not in shown
    assert "proof on the first batch: " in shown, "notes are shown in Python as on the command line"
    assert "error[D005] " in shown, "a finding displays itself"
    assert shown.count("<polyline ") >= 2, "the reward curve of the trainer, and of the run"
    before, after = map(float, re.search(r"accuracy (\d\.\d+) before, (\d\.\d+) after", shown).groups())  # type: ignore[union-attr]
    assert after > before + 0.1


def test_the_notebook_has_its_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    check_outputs(outputs(notebook))
    assert [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == [
        *range(1, sum(cell["cell_type"] == "code" for cell in notebook["cells"]) + 1)
    ]
    assert str(Path.home()) not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="notebooks run in a kernel: pip install ipykernel")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1500, kernel_name="python3", resources=resources).execute()
    check_outputs(outputs(notebook))

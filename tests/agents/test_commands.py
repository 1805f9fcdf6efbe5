"""Commands as programs: what they are given, and where their reward is read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium.agents.programs.program import CommandProgram, Ending, EpisodeTask, read_reward


def ended(folder: Path, code: str, **row: Any) -> Ending:
    program = CommandProgram([sys.executable, "-c", code], folder)
    return program.begin().result(EpisodeTask("http://127.0.0.1:9/v1", "key", "id", row, 1))


@pytest.mark.parametrize("last", ["print('bye', file=sys.stderr)", "os.write(2, b'bye')"])
def test_the_reward_is_the_last_line_of_standard_output_whatever_the_other_one_says(tmp_path: Path, last: str) -> None:
    ending = ended(tmp_path, f"import os, sys; print('text'); print(0.75, flush=True); {last}")
    assert (ending.reward, ending.problem, ending.unread) == (0.75, "", "")
    assert ending.log.strip() == "text\n0.75\nbye"


def test_a_last_line_that_is_no_reward_is_named(tmp_path: Path) -> None:
    ending = ended(tmp_path, "print(0.5); print('score: 0.5')")
    assert (ending.reward, ending.unread) == (None, "score: 0.5")


def test_numbers_of_numpy_and_torch_are_rewards() -> None:
    numbers = (torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array(0.5), np.array([0.5]))
    assert [read_reward(each).reward for each in numbers] == [0.5] * 5
    assert read_reward({"a": torch.tensor(1), "b": np.int64(2)}).reward == 3.0
    for several in (torch.ones(2), np.ones(2)):
        assert "a reward is a finite number" in read_reward(several).problem


def test_the_row_of_a_command_is_valid_json(tmp_path: Path) -> None:
    nan, infinite = float("nan"), float("inf")
    code = "import os, pathlib; print(pathlib.Path(os.environ['PODIUM_ROW']).read_text())"
    ending = ended(tmp_path, code, a=nan, b=[1.5, -infinite], c={"d": infinite, "e": "NaN"})
    assert ending.log.strip() == '{"a": null, "b": [1.5, null], "c": {"d": null, "e": "NaN"}}'

"""What `podium sample` says of groups in numbers, and its page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podium.algorithm.advantages import AdvantageSettings
from podium.cli.sample import page
from podium.cli.sampled import check_accuracy, numbers, print_numbers, save_rates
from podium.errors import ConfigError
from podium.records import Completion, Group, Prompt, ScoredGroup


def group(
    rewards: list[Any],
    *,
    lengths: list[int] | None = None,
    finish: str = "stop",
    texts: list[str] | None = None,
    row: int = 0,
    names: tuple[str, ...] = ("answer_correct", "brevity"),
) -> ScoredGroup:
    lengths = lengths or [2] * len(rewards)
    completions = tuple(
        Completion(
            token_ids=(row, g, *[7] * (n - 2)),
            logps=(-0.5,) * n,
            finish=finish,  # type: ignore[arg-type]
            text=f"{row} {g}" if texts is None else texts[g],
            policy_step=0,
        )
        for g, n in enumerate(lengths)
    )
    prompt = Prompt(id=row, row=row, token_ids=(1,), text=f"{row}+2=", content=f"{row}+2=")
    values = np.array(rewards, np.float64).reshape(len(rewards), -1)
    return ScoredGroup(
        group=Group(prompt=prompt, completions=completions), names_K=names[: values.shape[1]], rewards_GK=values
    )


def found(*groups: ScoredGroup, accuracy: str | None = None) -> dict[str, Any]:
    names = groups[0].names_K
    seconds = {"time/generate_seconds": 2.0, **{f"time/reward/{name}_seconds": 0.1 for name in names}}
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(scoring=SimpleNamespace(advantage=SimpleNamespace(weights_K=np.ones(len(names))))),
        args=SimpleNamespace(max_completion_length=8),
    )
    said = numbers(groups, seconds, trainer, accuracy)
    json.dumps(said, allow_nan=False)
    return said


def test_every_number_is_of_how_many() -> None:
    said = found(
        group([[1, 0], [1, 1]], row=0, lengths=[2, 4]),
        group([[0, 1], [0, 1]], row=1, lengths=[8, 8], finish="length"),
        group([[1, 0], [0, 1]], row=2),
        group([[1, math.nan], [math.nan, math.nan]], row=3),
    )
    assert (said["prompts"], said["completions"]) == (4, 8)
    assert said["groups_with_spread"] == 1, "of the third the sum is equal, of the fourth one value is known"
    assert said["accuracy"] == "answer_correct"
    assert (said["judged_prompts"], said["always_solved"], said["never_solved"]) == (4, 2, 1)
    assert said["tokens"] == [2, 2, 8]
    assert (said["cut_off"], said["max_completion_length"]) == (2, 8)
    assert (said["sampling_seconds"], said["sampled_tokens"]) == (2.0, 30)
    assert said["rewards"] == [
        {
            "name": "answer_correct",
            "mean": pytest.approx(4 / 7),
            "low": 0.0,
            "high": 1.0,
            "groups_with_spread": 1,
            "none": 1,
            "seconds": 0.1,
        },
        {
            "name": "brevity",
            "mean": pytest.approx(4 / 6),
            "low": 0.0,
            "high": 1.0,
            "groups_with_spread": 2,
            "none": 2,
            "seconds": 0.1,
        },
    ]


@pytest.mark.defect("D1", "one reward called f")
@pytest.mark.parametrize("name", ["f", "my_reward", "sentiment", "score"])
def test_a_reward_that_is_not_known_to_say_right_or_wrong(name: str, capsys: Any, now: Any) -> None:
    groups = [group([1, 0, 0, 1], row=row, names=(name,)) for row in range(8)]
    said = found(*groups)
    assert [said[key] for key in ("accuracy", "judged_prompts", "always_solved", "never_solved")] == [None] * 4
    print_numbers(said)
    out = capsys.readouterr().out
    assert "not known: no reward says right or wrong (accuracy: NAME)" in " ".join(out.split())
    now(out)
    with pytest.raises(ConfigError) as refused:
        check_accuracy([name], None)
    assert refused.value.fix == "accuracy: NAME"
    assert found(*groups, accuracy=name)["never_solved"] == 0


def test_the_numbers_as_tables(capsys: Any) -> None:
    print_numbers(found(group([1, 0], row=0), group([[None]] * 2, row=1)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "answer_correct 0.50 0.00 1.00 1 of 2 2 of 4 0.10" in lines
    assert "groups with spread 1 of 2" in lines
    assert "solved prompts 0 of 1 always, 0 of 1 never (by answer_correct)" in lines
    assert "tokens of a completion 2 / 2 / 2 (5, 50 and 95 % of 4)" in lines
    assert "cut off at the limit 0 of 4 (max_completion_length: 8)" in lines
    assert "sampling 2.0 s, 4 tokens a second" in lines


def test_pass_rates_are_of_judged_completions(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    groups = [group([1, 0, None, 1], row=0), group([None] * 4, row=1)]
    save_rates(file, [(n, {"prompt": each.group.prompt.content}) for n, each in enumerate(groups)], groups, None)
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    assert {key: value for key, value in row.items() if key != "fingerprint"} == {
        "pass_rate": 0.666667,
        "right": 2,
        "completions": 3,
        "reward": "answer_correct",
        "prompt": "0+2=",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["rates.jsonl"]


def test_the_page_shows_model_text_as_text() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m{{ 7 * 7 }}"
    settings = AdvantageSettings(weights_K=np.ones(1), scale_rewards="group")
    html = page([group([1, 0], texts=[hostile, "fine"])], settings, "run.yaml")
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;{{ 7 * 7 }}" in html
    assert "\x1b" not in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert "http://" not in html
    assert "https://" not in html

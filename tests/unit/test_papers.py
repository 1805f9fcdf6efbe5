"""docs/algorithm.md: what a paper's settings come to is what the paper says (numbers: by section in the page)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from podium.algorithm.losses import OBJECTIVES
from podium.checks.settings import UNUSUAL
from podium.checks.setup import Setup
from podium.errors.rule import findings
from podium.recipe import load
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.setting_rules import UNLIKE_PAPER
from podium.trainer.settings import loss_settings

PAGE = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n.*?^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
BASE = {"model": "builtin:smollm2-135m-instruct", "dataset": "builtin:additions", "output_dir": "out"}


class Paper(NamedTuple):
    """What a paper says; None: it does not."""

    loss: str
    beta: float
    clip: tuple[float, float] | None
    """Lower and upper bound of the ratio."""
    step: int | None = None
    """Completions of an optimizer step."""
    steps_of_a_round: int | None = None
    group: int | None = None
    length: int | None = None
    learning_rate: float | None = None


PAPERS = {
    "GRPO (DeepSeekMath)": Paper("grpo", 0.04, None, 1024, 1, 64, 1024, 1e-6),
    "DeepSeek-R1-Zero and DeepSeek-R1": Paper("grpo", 0.001, (0.0, 11.0), 512, 16, 16, 32768, 3e-6),
    "Dr. GRPO": Paper("dr_grpo", 0.0, None, 128, 8, 8, 3000, 1e-6),
    "DAPO": Paper("dapo", 0.0, (0.8, 1.28), 512, 16, 16, 20480, 1e-6),
    "GSPO": Paper("grpo", 0.0, (1 - 3e-4, 1 + 4e-4), None, 4),
    "CISPO (MiniMax-M1)": Paper("cispo", 0.0, None, None, 16, 16),
    "SAPO": Paper("sapo", 0.0, None),
    "LUSPO": Paper("luspo", 0.0, (1 - 2e-3, 1 + 2.5e-3)),
    "VESPO": Paper("vespo", 0.0, None),
    "GMPO": Paper("gmpo", 0.0, (0.6, 1.4), None, 2),
    "DPPO": Paper("dppo", 0.0, (0.8, 1.2), None, 2),
    "BNPO": Paper("bnpo", 0.0, None),
}


def arguments(title: str, folder: Path) -> GRPOConfig:
    settings = yaml.safe_load(SECTIONS[title])
    settings.setdefault("rewards", ["answer_format"])
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE | settings))
    return load(folder / "run.yaml").arguments()


@pytest.mark.parametrize("title", PAPERS)
def test_settings_come_to_what_the_paper_says(title: str, tmp_path: Path) -> None:
    paper, args = PAPERS[title], arguments(title, tmp_path)
    loss, plan = loss_settings(args), plan_of(args)
    assert (loss.loss_type, loss.beta) == (paper.loss, paper.beta)
    found = {
        "step": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "steps_of_a_round": plan.micro_steps_per_round / plan.accumulation,
        "group": args.num_generations,
        "length": args.max_completion_length,
        "learning_rate": args.learning_rate,
    }
    said = {name: getattr(paper, name) for name in found if getattr(paper, name) is not None}
    assert {name: found[name] for name in said} == pytest.approx(said)
    if paper.clip is not None:
        assert (1 - loss.epsilon_low, 1 + loss.epsilon_high) == pytest.approx(paper.clip)


@pytest.mark.parametrize("title", PAPERS)
def test_settings_of_a_paper_are_not_called_unusual(title: str, tmp_path: Path) -> None:
    setup = Setup(settings=arguments(title, tmp_path))
    assert not list(findings((*UNUSUAL, *UNLIKE_PAPER), setup))


def test_every_loss_has_a_section() -> None:
    assert set(PAPERS) == set(SECTIONS)
    named = {yaml.safe_load(settings)["loss_type"] for settings in SECTIONS.values()}
    assert named == set(OBJECTIVES)


@pytest.mark.parametrize("title", ["GSPO", "LUSPO"])
def test_ratios_are_of_whole_rollouts(title: str, tmp_path: Path) -> None:
    assert loss_settings(arguments(title, tmp_path)).one_ratio_per_rollout


def test_a_clip_ratio_of_ten_has_no_lower_bound(tmp_path: Path) -> None:
    loss = loss_settings(arguments("DeepSeek-R1-Zero and DeepSeek-R1", tmp_path))
    assert 1 - loss.epsilon_low == 0  # 1 - 10 is below every ratio, and so is 0
    assert not loss.use_bias_correction_kl

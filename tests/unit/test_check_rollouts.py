"""What sampled groups say: numbers from groups made by hand, and a verdict that names the cure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from podium import GRPOConfig
from podium.algorithm.advantages import AdvantageSettings
from podium.checks.rollouts import Sampled, diagnose
from podium.cli.sample import page
from podium.records import Completion, Group, Prompt, ScoredGroup
from tests.cures import assert_agree

ARGS = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "report_to": "none"}


def group(
    rewards: list[Any],
    *,
    lengths: list[int] | None = None,
    finish: str = "stop",
    texts: Any = None,
    row: int = 0,
    logp: float = -0.5,
    names: tuple[str, ...] = ("answer_correct", "brevity"),
):
    lengths = lengths or [2] * len(rewards)
    completions = tuple(
        Completion(
            token_ids=(row, g, *[7] * (n - 2)) if texts is None else (5,) * n,
            logps=(logp,) * n,
            finish=finish,  # type: ignore[arg-type]
            text=f"{row} {g}" if texts is None else texts[g],
            policy_step=0,
        )
        for g, n in enumerate(lengths)
    )
    prompt = Prompt(id=row, row=row, token_ids=(1,), text="2+2=", content="2+2=")
    values = np.array(rewards, np.float64).reshape(len(rewards), -1)
    names = names[: values.shape[1]]
    return ScoredGroup(group=Group(prompt=prompt, completions=completions), names_K=names, rewards_GK=values)


def sampled(*groups: ScoredGroup, **more: Any) -> Sampled:
    names = groups[0].names_K
    settings = {"generate_seconds": 1.0, "reward_seconds": dict.fromkeys(names, 0.1), **more}
    return Sampled(groups=groups, weights_K=np.ones(len(names)), **settings)


def codes(made: Sampled, **args: Any) -> dict[str, Any]:
    found = diagnose(made, GRPOConfig("out", **{**ARGS, **args})).findings
    for finding in found:
        assert_agree(finding)
    return {finding.code: finding for finding in found}


def test_a_healthy_run_is_ready() -> None:
    seen = diagnose(sampled(*(group([1, 0, 0, 1], row=row) for row in range(8))), GRPOConfig("out", **ARGS))
    assert seen.spread_share == 1
    assert seen.pass_rates == (0.5,) * 8
    assert seen.entropy == pytest.approx(0.5)
    assert seen.tokens_per_second == 64
    assert [f.code for f in seen.findings] == ["R009"]
    assert seen.findings[0].what.endswith("ready")
    assert "not ready" not in seen.findings[0].what
    json.dumps(seen.as_dict())


@pytest.mark.defect("D4", "88 % of groups equal, word salad")
@pytest.mark.parametrize(("value", "cure"), [(0, "worked examples in the prompt"), (1, "harder prompts")])
@pytest.mark.parametrize(("logp", "hotter"), [(-0.1, True), (-0.5, False), (-4.8, False)])
def test_equal_groups(value: int, cure: str, logp: float, hotter: bool, now: Any) -> None:
    found = codes(sampled(*(group([value] * 4, row=row, logp=logp) for row in range(8))))
    assert found["R001"].severity == "warning"
    assert found["R001"].fix.startswith(cure)
    assert ("temperature: 1.3" in found["R001"].fix) is hotter
    now(found["R001"].fix)
    assert "100%" in found["R001"].what
    assert "R001" in found["R009"].what
    assert found["R004"].severity == "warning"


@pytest.mark.defect("D4", "temperature 1.45, as the cure said: 7.27 nats a token")
def test_noise_is_not_ready_whatever_its_spread(now: Any) -> None:
    found = codes(sampled(*(group([1, 0, 0, 1], row=row, logp=-7.27) for row in range(8))), temperature=1.45)
    assert "not ready: R010" in found["R009"].what
    assert "temperature: 1.0 (it is 1.45)" in found["R010"].fix
    now(f"{found['R010'].what}; {found['R009'].what}")


@pytest.mark.defect("N", "check --rollouts 1 says ready")
def test_one_group_shows_little(now: Any) -> None:
    [verdict] = diagnose(sampled(group([1, 0, 0, 1])), GRPOConfig("out", **ARGS)).findings
    assert verdict.what.endswith("ready; 1 groups are few to judge by: --rollouts 32")
    now(verdict.what)


@pytest.mark.defect("D1", "one reward called f")
@pytest.mark.parametrize("name", ["f", "my_reward", "sentiment", "score"])
def test_a_reward_that_is_not_known_to_say_right_or_wrong(name: str, now: Any) -> None:
    from podium.cli.rollouts import tables

    seen = diagnose(sampled(*(group([1, 0, 0, 1], row=r, names=(name,)) for r in range(8))), GRPOConfig("out", **ARGS))
    assert seen.pass_rates == ()
    assert len(tables(seen, [])) == 2
    verdict = seen.findings[-1].what
    assert "ready; of the reward alone: none is known to say right or wrong (accuracy: NAME)" in verdict
    now(verdict)


def test_cut_off_and_how_long_it_would_have_been() -> None:
    groups = [group([1, 0, 0, 1], lengths=[8] * 4, finish="length", row=row) for row in range(3)]
    found = codes(sampled(*groups, longer_lengths=tuple(range(10, 22))))
    assert found["R002"].fix == "max_completion_length: 20"
    never = codes(sampled(*groups, longer_lengths=(32,) * 8))
    assert "100% still do not end" in never["R002"].what
    assert "M018" in never["R002"].fix


def half_cut(ended: float, cut: float, *, row: int = 0) -> ScoredGroup:
    """Two completions that ended and two that were cut off, with these rewards (and one of each a little more)."""
    made = group([ended, ended + 0.1, cut, cut + 0.1], lengths=[4, 5, 8, 8], row=row)
    cut_off = [dataclasses.replace(c, finish="length") if g > 1 else c for g, c in enumerate(made.group.completions)]
    return dataclasses.replace(made, group=dataclasses.replace(made.group, completions=tuple(cut_off)))


def test_cut_off_completions_that_will_learn_to_end() -> None:
    """As the quickstart begins: half are cut off, an end is rewarded, and nearly all groups have spread."""
    found = codes(sampled(*(half_cut(1.0, 0.0, row=row) for row in range(8)), longer_lengths=(32,) * 8))
    assert found["R002"].severity == "warning"
    assert "2.0 standard deviations more" in found["R002"].why
    assert "nothing yet" in found["R002"].fix
    assert found["R009"].what.endswith("100% have spread; ready, but see R002")


@pytest.mark.parametrize(("ended", "cut"), [(0.0, 0.0), (0.0, 1.0)], ids=["an end is worth nothing", "it costs"])
def test_cut_off_completions_that_will_not(ended: float, cut: float) -> None:
    found = codes(sampled(*(half_cut(ended, cut, row=row) for row in range(8)), longer_lengths=(32,) * 8))
    assert "M018" in found["R002"].fix
    assert found["R009"].what.endswith("not ready: R002 first")
    every = codes(sampled(*(group([1, 0, 0, 1], finish="length", row=row) for row in range(8))))
    assert every["R009"].what.endswith("not ready: R002 first"), "none ended"


def test_signal_in_few_groups_and_in_nearly_none() -> None:
    flat = [group([0] * 4, row=row) for row in range(9)]
    some = codes(sampled(*flat[:6], *(group([1, 0, 0, 0], row=row) for row in range(9, 12))))
    assert some["R001"].severity == "warning"
    assert some["R009"].what.endswith("33% have spread; ready, but see R001")
    none = codes(sampled(*flat, group([1, 0, 0, 0], row=9)))
    assert none["R009"].what.endswith("10% have spread; not ready: R001 first")


def test_the_same_again_and_again() -> None:
    found = codes(sampled(group([1, 0, 0, 1], texts=["x"] * 4)))
    assert "75% of the completions are the same" in found["R003"].what
    assert "empty" in codes(sampled(group([1, 0, 0, 1], texts=[""] * 4)))["R003"].what


def test_length_slowness_and_twins() -> None:
    rewards = [[1, 1], [2, 2], [3, 3], [4, 4]]
    slow = sampled(group(rewards, lengths=[2, 3, 4, 5]), reward_seconds={"answer_correct": 0.1, "brevity": 9.0})
    found = codes(slow)
    assert "longer completions" in found["R005"].what
    assert "`brevity` took 9.0 s of 10.1 s" in found["R007"].what
    assert "say the same" in found["R006"].what


def test_no_opinion() -> None:
    found = codes(sampled(group([1, 0, None, 1]), group([1, 0, 0, 1], row=1)))
    assert "12%" in found["R008"].what
    assert found["R008"].severity == "note"


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


def test_prompts_with_examples_are_not_told_to_take_examples() -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for content, examples in (([*turns, turns[0]], False), (turns[:1], True), ("2+2=", True)):
        groups = [group([0] * 4, row=row, logp=-7.0) for row in range(8)]
        groups = [
            dataclasses.replace(
                each,
                group=dataclasses.replace(each.group, prompt=dataclasses.replace(each.group.prompt, content=content)),
            )
            for each in groups
        ]
        found = codes(sampled(*groups))
        assert {code for code in ("R001", "R010") if "examples" in found[code].changes} == (
            {"R001", "R010"} if examples else set()
        )
        assert ("`examples: 2`" in found["R001"].fix) is examples


def test_a_limit_is_named_only_where_longer_completions_were_sampled() -> None:
    cut = [group([0, 1, 0, 1], row=row, finish="length") for row in range(8)]
    unknown = codes(sampled(*cut))["R002"]
    assert unknown.changes == {}
    assert "podium check --rollouts 8" in unknown.fix
    assert "allowed" not in unknown.what
    known = codes(sampled(*cut, longer_lengths=(20, 21)))["R002"]
    assert known.changes == {"max_completion_length": 20}

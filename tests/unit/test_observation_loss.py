"""Cross-entropy of given tokens (ECHO) against a few lines of float64, in value and in gradient; runs with it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from podium import TextEnvironment
from podium.algorithm.losses import OBJECTIVES, LossInputs, LossSettings, policy_loss, skips_zero_advantage
from podium.errors import ConfigError
from podium.models.forward import Forward
from podium.models.head import LogitScaling
from podium.models.packing import given_places, pack
from podium.records import Sample
from podium.testing import tiny_model
from podium.trainer.rounds import MicroBatch, loss_inputs, micro_batches
from tests.unit.agents_setup import make, multiply

COEF = 0.25
TURNS = {
    "generation_kwargs": {"eos_token_id": [2, *range(10, 60)]},
    "max_completion_length": 120,
    "max_turns": 3,
    "learning_rate": 1e-2,
}


def sample(advantage: float, token_ids: tuple[int, ...], actions: Sequence[int]) -> Sample:
    return Sample(
        prompt_ids=(5, 6, 7),
        token_ids=token_ids,
        actions=np.array(actions, bool),
        advantage=advantage,
        advantages_A=np.full(sum(actions), advantage, np.float32),
        sampled_logps_A=np.full(sum(actions), -4.0, np.float32),
    )


GROUP = (
    sample(1.0, (8, 20, 21, 9, 22), [1, 0, 0, 1, 1]),
    sample(0.0, (8, 20, 30, 31, 9, 3, 3), [1, 0, 0, 0, 1, 0, 0]),
    sample(-0.5, (11, 12), [1, 1]),
)
OTHER = (
    sample(1.0, (13, 40), [1, 1]),
    sample(0.0, (14,), [1]),
    sample(-0.5, (15, 16), [1, 1]),
)
pytestmark = pytest.mark.filterwarnings("ignore:You are using")
needs_parser = pytest.mark.skipif(
    not hasattr(PreTrainedTokenizerFast, "get_response_parser"), reason="needs transformers 5.13"
)


class Guess(TextEnvironment):
    def reset(self, **row: Any) -> str:
        return " Guess."

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        return "again", 0.0, False, {}


def environment(**config: Any) -> Any:
    given = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": None}
    return make(config={**TURNS, "observation_coef": COEF, **config}, **given)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_the_policy_term_is_as_without(loss_type: str) -> None:
    """Beside it the gradient of a given token is -coef / count, whatever the loss."""
    logps, given = (torch.linspace(-3, -1, n, dtype=torch.float64).requires_grad_() for n in (6, 4))
    x = LossInputs(
        logps_N=logps,
        entropy_N=torch.zeros(6),
        advantages_R=torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64),
        rollout_N=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_rollouts=3,
        num_tokens=6,
        old_logps_N=logps.detach() - 0.1,
        observed_logps_M=given,
        num_observed=10,
    )
    plain, both = (policy_loss(x, LossSettings(loss_type=loss_type, observation_coef=c)).loss for c in (0.0, COEF))
    assert float((both - plain).detach()) == pytest.approx(COEF * float(-given.detach().sum()) / 10, abs=1e-12)
    [alone] = torch.autograd.grad(plain, logps)
    with_it, of_given = torch.autograd.grad(both, (logps, given))
    assert torch.equal(alone, with_it)
    torch.testing.assert_close(of_given, torch.full((4,), -COEF / 10, dtype=torch.float64))
    idle: Any = {"entropy_coef_possible": False, "top_entropy_quantile": 1.0, "moe": False}
    assert not skips_zero_advantage(LossSettings(loss_type=loss_type, observation_coef=COEF), **idle)


def by_hand(model: Any, temperature: float) -> tuple[float, float, torch.Tensor]:
    """Loss, cross-entropy and gradients of both groups, row by row in float64: DAPO on the policy, and the mean."""
    exact, policy, nats = copy.deepcopy(model).double(), [], []
    for each in (*GROUP, *OTHER):
        start = len(each.prompt_ids)
        row = torch.tensor([[*each.prompt_ids, *each.token_ids]])
        logp = (exact(input_ids=row).logits[0] / temperature).log_softmax(-1)
        of = logp[start - 1 : -1].gather(1, row[0, start:, None])[:, 0]
        drawn = each.actions.tolist()
        last = max(t for t, is_drawn in enumerate(drawn) if is_drawn)
        ratio = (of - of.detach()).exp()
        policy += [-each.advantage * ratio[t] for t, is_drawn in enumerate(drawn) if is_drawn]
        nats += [-of[t] for t, is_drawn in enumerate(drawn) if not is_drawn and t < last]
    assert (len(policy), len(nats)) == (12, 5)
    cross_entropy = sum(nats) / len(nats)
    total = sum(policy) / len(policy) + COEF * cross_entropy
    total.backward()
    return (
        float(total.detach()),
        float(cross_entropy.detach()),
        torch.cat([p.grad.flatten() for p in exact.parameters()]),
    )


@pytest.mark.parametrize("path", ["shared", "padded"])
@pytest.mark.parametrize("tokens_per_pack", [1000, 12])
def test_value_and_gradient_are_the_sums_by_hand(path: Any, tokens_per_pack: int) -> None:
    model, temperature = tiny_model(), 0.8
    loss, cross_entropy, wanted = by_hand(model, temperature)
    assert [len(given_places(each.actions)) for each in GROUP] == [2, 3, 0]
    cut = [
        MicroBatch(samples=x, num_rollouts=3, num_tokens=n, num_observed=m)
        for x, n, m in ((GROUP, 7, 5), (OTHER, 5, 0))
    ]
    settings = LossSettings(loss_type="dapo", observation_coef=COEF)
    forward = Forward(path=path, head=LogitScaling(), temperature=temperature, precision=contextlib.nullcontext)
    total = observed = nats = 0.0
    with forward.context(model):
        for batch in micro_batches(cut, per_micro_batch=False, ranks=1):
            packs = pack(batch.samples, tokens_per_pack=tokens_per_pack, observed=True)
            bare = pack(batch.samples, tokens_per_pack=tokens_per_pack)
            assert [len(x.input_ids_T) for x in packs] == [len(x.input_ids_T) for x in bare], (
                "nothing is computed twice"
            )
            for packed in packs:
                out = forward.token_logps(model, packed)
                result = policy_loss(loss_inputs(out, packed, batch, other_sampler=False), settings)
                result.loss.backward()
                total += float(result.loss.detach())
                observed, nats = observed + float(result.sums.observed), nats + float(result.sums.observed_nats)
    assert total == pytest.approx(loss, abs=1e-5)
    assert nats / observed == pytest.approx(cross_entropy, abs=1e-5)
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-4)


def test_without_it_a_pack_holds_the_same() -> None:
    [bare] = pack(OTHER, tokens_per_pack=99)
    [asked] = pack(OTHER, tokens_per_pack=99, observed=True)
    assert bare.num_observed == asked.num_observed == 0
    assert torch.equal(bare.predict_P, asked.predict_P)
    [bare] = pack(GROUP, tokens_per_pack=99)
    [asked] = pack(GROUP, tokens_per_pack=99, observed=True)
    assert (bare.num_observed, asked.num_observed) == (0, 5)
    assert asked.observed_M.tolist() == [20, 21, 20, 30, 31]
    for name in ("input_ids_T", "target_N", "predict_N", "rollout_N"):
        assert torch.equal(getattr(bare, name), getattr(asked, name))
    assert bare.predict_P.tolist() == sorted(set(bare.predict_N.tolist()))


@needs_parser
def test_a_run_without_signal_learns_what_it_is_given() -> None:
    """All rewards are 0, so that only this loss moves the policy; the metric is the mean over what was given."""
    trainer = environment(max_steps=5, prove_first_batch=True)
    start = copy.deepcopy(trainer.model).eval()
    first: list[Any] = []
    trainer.log = (lambda log: lambda logs, *rest: (first.append(trainer.scored), log(logs, *rest))[1])(trainer.log)
    trainer.train()
    nats: list[float] = []
    for scored in first[0]:
        for each in scored.group.completions:
            prompt = (each.prompt or scored.group.prompt).token_ids
            with torch.no_grad():
                logp = start(input_ids=torch.tensor([[*prompt, *each.token_ids]])).logits[0].log_softmax(-1)
            last = each.turns[-1].stop - 1
            given = [t for t in range(last) if not any(turn.start <= t < turn.stop for turn in each.turns)]
            nats += [-float(logp[len(prompt) + t - 1, each.token_ids[t]]) for t in given]
    rows = [row for row in trainer.state.log_history if "observation_cross_entropy" in row]
    log = [row["observation_cross_entropy"] for row in rows]
    assert len(log) == 5
    assert [row["loss"] for row in rows] == pytest.approx([COEF * x for x in log], abs=1e-4)
    assert log[0] == pytest.approx(np.mean(nats), abs=1e-4)
    assert log[-1] < 0.8 * log[0]


@pytest.mark.slow
@needs_parser
def test_a_killed_run_continues_bit_equal(tmp_path: Path) -> None:
    """From the middle of a round, whose counts are in the checkpoint."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole, resumed = (environment(**settings, output_dir=str(tmp_path)) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for one_, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one_, other)


@needs_parser
def test_held_out_rows_have_the_metric_too() -> None:
    trainer = environment(max_steps=1, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(trainer.train_dataset)
    logged = {**metrics, **trainer.state.log_history[-1]}
    assert logged["eval_observation_cross_entropy"] > 0
    assert logged["eval_loss"] == pytest.approx(COEF * logged["eval_observation_cross_entropy"], abs=1e-4)


@needs_parser
def test_it_is_refused_where_nothing_is_given() -> None:
    with pytest.raises(
        ConfigError, match=r"observation_coef is 0\.25, and here nothing but the policy writes"
    ) as raised:
        make(config={"observation_coef": COEF})
    assert raised.value.code == "C030"
    make(config={"observation_coef": COEF}, tools=[multiply])
    with pytest.raises(ConfigError, match="it must be at least 0"):
        make(config={"observation_coef": -1.0}, tools=[multiply])

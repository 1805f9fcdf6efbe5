"""The four primitives: bit-equal to the trainer's steps, losses against sums written down, states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

import podium
from podium import GRPOConfig, GRPOTrainer, Loop, Sample
from podium.algorithm.advantages import AdvantageSettings, advantages
from podium.algorithm.losses import CORRECTIONS, LossSettings
from podium.errors import CheckpointError, ConfigError, DataError
from podium.records import Prompt
from podium.testing import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n}+1="} for n in range(8)]


def spread(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def config(folder: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(
        str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        product_precision="float32",
        **settings,
    )


def made(folder: Path, **settings: Any) -> Loop:
    peft_config = settings.pop("peft_config", None)
    return Loop(tiny_model(), config(folder, **settings), processing_class=tiny_tokenizer(), peft_config=peft_config)


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return made(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def idle(_shared: Loop) -> Loop:
    """A loop without gradients, for tests that move no weights."""
    _shared.model.zero_grad(set_to_none=True)
    return _shared


def parameters(of: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in of.model.parameters()]


def test_a_loop_of_its_own_takes_the_trainers_steps(tmp_path: Path) -> None:
    """The same prompts, random numbers, advantages and loss: the same weights, bit for bit."""
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "shuffle_dataset": False, "prove_first_batch": False}
    args = config(tmp_path / "a", max_steps=2, **settings)
    trainer = GRPOTrainer(tiny_model(), spread, args, ROWS, processing_class=tiny_tokenizer())
    trainer.train()
    loop = made(tmp_path / "b")
    for step in range(2):
        groups = loop.sample([row["prompt"] for row in ROWS[2 * step : 2 * step + 2]])
        rewards = np.array([[spread([each.text])[0] for each in group.completions] for group in groups])
        found = advantages(rewards[:, :, None], AdvantageSettings(weights_K=np.ones(1))).advantages_PG
        tokens = sum(len(each.token_ids) for group in groups for each in group.completions)
        told = loop.forward_backward(loop.data(groups, found, on_policy=True), "ppo", divide_by=tokens)
        assert loop.optim_step()["grad_norm"] > 0
        assert told["tokens"] > 0
    for mine, theirs in zip(parameters(loop), parameters(trainer), strict=True):
        assert torch.equal(mine, theirs)


def gradient_of(loop: Loop) -> list[torch.Tensor]:
    return [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]


def by_hand(loss: str, data: list[Sample]) -> tuple[float, list[torch.Tensor]]:
    """Value and gradient with a plain forward of each sequence."""
    model, total = tiny_model().train(), torch.zeros(())
    for each in data:
        ids = torch.tensor([[*each.prompt_ids, *each.token_ids]])
        logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
        start = len(each.prompt_ids)
        logps = logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        weights = torch.tensor(each.advantages_A)
        if loss == "cross_entropy":
            total = total - (weights * logps).sum()
            continue
        ratio = (logps - torch.tensor(each.old_logps_A)).exp()
        surrogate = ratio * weights
        if loss == "ppo":
            surrogate = torch.minimum(surrogate, ratio.clamp(0.8, 1.2) * weights)
        if loss == "cispo":
            surrogate = ratio.detach().clamp(max=5.0) * weights * logps
        total = total - surrogate.sum()
    total.backward()
    return float(total), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_losses_are_sums_over_tokens(loss: str, idle: Loop) -> None:
    prompt = tuple(tiny_tokenizer()("2+1=")["input_ids"])
    rng = np.random.default_rng(0)
    data = [
        Loop.datum(
            prompt_ids=prompt,
            token_ids=tuple(rng.integers(4, 200, length).tolist()),
            weights=rng.normal(size=length).tolist() if length > 3 else 0.7,
            logps=(rng.normal(size=length) * 0.3 - 5.5).tolist(),
        )
        for length in (2, 5, 4)
    ]
    told = idle.forward_backward(data[:2], loss)["loss"] + idle.forward_backward(data[2:], loss)["loss"]
    expected, gradient = by_hand(loss, data)
    assert told == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(gradient_of(idle), gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(wrong: float, tmp_path: Path) -> None:
    loop = made(tmp_path)
    before = parameters(loop)
    for parameter in loop.model.parameters():
        parameter.grad = torch.full_like(parameter, wrong)
    assert not math.isfinite(loop.optim_step(1e-2)["grad_norm"])
    assert not gradient_of(loop), "the next step begins without it"
    for now, then in zip(parameters(loop), before, strict=True):
        assert torch.equal(now, then)


def test_forward_gives_the_log_probabilities_that_sampling_gave(idle: Loop) -> None:
    [group] = idle.sample(["3+1="], num_completions=3, temperature=1.0)
    assert len(group.completions) == 3
    found = idle.forward(idle.data([group], [[0.0, 0.0, 0.0]]))
    for mine, completion in zip(found, group.completions, strict=True):
        np.testing.assert_allclose(mine, completion.logps, atol=1e-5)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_state_goes_on_as_if_never_stopped(adapter: bool, tmp_path: Path) -> None:
    peft_config = lora() if adapter else None

    def step(loop: Loop) -> None:
        groups = loop.sample(["1+1=", "2+1="])
        scores = [[spread([each.text])[0] - 0.5 for each in group.completions] for group in groups]
        loop.forward_backward(loop.data(groups, scores))
        loop.optim_step(learning_rate=1e-3)

    whole = made(tmp_path / "a", peft_config=peft_config)
    step(whole)
    whole.save_state(tmp_path / "state")
    whole.save_state(tmp_path / "state")  # over what is there
    step(whole)
    again = made(tmp_path / "b", peft_config=peft_config)
    step(again)
    step(again)  # somewhere else
    again.load_state(tmp_path / "state")
    assert (again.steps, again.rounds) == (1, 1)
    step(again)
    for mine, theirs in zip(parameters(again), parameters(whole), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("adapter", [False, True])
def test_saved_weights_are_sampled_from_and_training_goes_on(adapter: bool, tmp_path: Path) -> None:
    """In `weights_of` the policy is what was saved; behind it weights and gradients are as before."""
    peft_config = lora() if adapter else None
    loop = made(tmp_path / "a", peft_config=peft_config)
    data = [Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)]
    loop.save_weights(tmp_path / "saved")
    [before] = loop.forward(data)
    for _ in range(2):  # an adapter begins at zero, and one step moves half of it
        loop.forward_backward(data, "cross_entropy")
        loop.optim_step(learning_rate=1e-2)
    loop.forward_backward(data, "cross_entropy")
    [after], gradients = loop.forward(data), gradient_of(loop)
    with loop.weights_of(tmp_path / "saved"):
        [found] = loop.forward(data)
    np.testing.assert_array_equal(found, before)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(loop.forward(data)[0], after)
    for mine, theirs in zip(gradient_of(loop), gradients, strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError, match="is not one of this model"), loop.weights_of(tmp_path / "nowhere"):
        pass
    np.testing.assert_array_equal(loop.forward(data)[0], after)


def test_a_step_has_settings_of_its_own(tmp_path: Path) -> None:
    """AdamW's first step moves each weight by the rate, whatever the gradient; its sign and `eps` decide the rest."""
    loop = made(tmp_path)
    before = parameters(loop)
    loop.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
    gradients = gradient_of(loop)
    norm = loop.optim_step(1e-3, max_grad_norm=0, betas=(0.0, 0.0), eps=1e-2, weight_decay=0.1)["grad_norm"]
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-4)
    for old, new, gradient in zip(before, parameters(loop), gradients, strict=True):
        decay = 0.1 if old.ndim > 1 else 0.0  # not of norms and biases
        expected = old * (1 - 1e-3 * decay) - 1e-3 * gradient / (gradient.abs() + 1e-2)
        torch.testing.assert_close(new, expected, rtol=1e-4, atol=1e-6)


def test_weights_without_their_optimizer(tmp_path: Path) -> None:
    loop = made(tmp_path / "a")
    loop.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
    loop.optim_step(1e-2)
    loop.save_state(tmp_path / "state")
    again = made(tmp_path / "b")
    again.load_state(tmp_path / "state", optimizer=False)
    assert again.steps == 0
    for mine, theirs in zip(parameters(again), parameters(loop), strict=True):
        assert torch.equal(mine, theirs)


def test_tokens_are_continued_as_they_are(idle: Loop) -> None:
    ids = (5, 250, 7)
    [group] = idle.sample([Prompt(id=9, row=-1, token_ids=ids, text="", content="")], 2)
    assert (group.prompt.token_ids, group.prompt.id, len(group.completions)) == (ids, 0, 2)


def test_mistakes_are_named(tmp_path: Path) -> None:
    loop = made(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean `ppo`"):
        loop.forward_backward([], "pp0")
    with pytest.raises(CheckpointError, match=r"it has no loop\.json"):
        loop.load_state(tmp_path / "nowhere")
    with pytest.raises(DataError, match="1 of 2 sequences have no log-probabilities"):
        loop.forward_backward([Loop.datum(prompt_ids=[5], token_ids=[6], weights=1.0, logps=x) for x in (None, [-1.0])])
    groups = loop.sample(["1+1=", "2+1="])
    for wrong, kind in ((groups, "Group"), ([{"weights": 1.0}], "dict"), (groups[0], "Group")):
        with pytest.raises(DataError, match=rf"(?s)datum 0: an object of type {kind} is no Sample.*loop\.data\(groups"):
            loop.forward_backward(wrong)
    for wrong, told in (([[1.0] * 4], "1 advantages for 2 groups"), ([[1.0]] * 2, "1 advantages for 4 completions")):
        with pytest.raises(DataError, match=told):
            loop.data(groups, wrong)
    with pytest.raises(DataError, match="prompts, row 1: prompt is empty"):
        loop.sample(["1+1=", ""])
    loop.save_state(tmp_path / "state")
    other = Loop(tiny_model(hidden_size=16), config(tmp_path / "c"), processing_class=tiny_tokenizer())
    with pytest.raises(CheckpointError, match="is not one of this model"):
        other.load_state(tmp_path / "state")
    assert loop.optim_step() == {"grad_norm": 0.0}, "without a gradient nothing moves"


def test_it_is_public() -> None:
    assert podium.Loop is Loop
    assert {"Loop", "Sample"} <= set(podium.__all__)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": math.nan}, "`temperature` is nan; it must be between"),
        ({"temperature": -1}, "`temperature` is -1"),
        ({"temperature": "warm"}, "`temperature` must be a number; got 'warm'"),
        ({"top_p": 2.0}, "`top_p` is 2"),
        ({"top_k": -1}, "`top_k` is -1"),
        ({"max_tokens": 2.5}, "`max_tokens` must be a whole number; got 2.5"),
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"seed": -1}, "`seed` is -1"),
        ({"repetition_penalty": 0}, "`repetition_penalty` is 0"),
        ({"num_completions": 0}, "`num_completions` is 0; it must be at least 1"),
        ({"end_ids": 5}, "`end_ids` must be a list of token ids; got 5"),
        ({"stop": ["x"]}, "sample has no setting `stop`; there are .*`max_tokens`.*\n.*Did you mean `end_ids`"),
        ({"max_completion_length": 3}, "Did you mean `max_tokens`"),
        ({"temprature": 1.0}, "Did you mean `temperature`"),
    ],
)
def test_settings_of_sampling_are_checked(settings: dict[str, Any], told: str, idle: Loop) -> None:
    before = idle.rounds
    with pytest.raises(ConfigError, match=told):
        idle.sample(["1+1="], **settings)
    assert idle.rounds == before


def test_a_temperature_of_zero_is_greedy(idle: Loop) -> None:
    [greedy], [group] = idle.sample(["1+1="], 1, greedy=True), idle.sample(["1+1="], 2, temperature=0)
    assert {each.token_ids for each in group.completions} == {greedy.completions[0].token_ids}
    np.testing.assert_allclose(idle.forward(idle.data([group], [[0, 0]]))[0], group.completions[0].logps, atol=1e-5)


def test_a_prompt_by_itself_is_no_list(idle: Loop) -> None:
    with pytest.raises(DataError, match=r"sample\(\[prompt\]\)"):
        idle.sample("abc")


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})


def stepped(folder: Path, **settings: Any) -> Loop:
    """A loop whose weights have moved."""
    loop = made(folder, **settings)
    for _ in range(2):
        loop.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
        loop.optim_step(1e-2)
    return loop


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "broken",
    [
        lambda state: (state / "optimizer.pt").unlink(),
        lambda state: cut(state / "optimizer.pt"),
        lambda state: cut(state / "model/model.safetensors"),
        lambda state: (state / "loop.json").write_text("{}"),
        lambda state: Loop(
            tiny_model(num_hidden_layers=1, seed=7), config(state.parent / "c"), processing_class=tiny_tokenizer()
        ).save_state(state),
    ],
    ids=["no optimizer", "half an optimizer", "half the weights", "no counters", "fewer layers"],
)
def test_a_state_that_cannot_be_loaded_changes_nothing(broken: Any, tmp_path: Path) -> None:
    loop = made(tmp_path / "a")
    before = parameters(loop)
    stepped(tmp_path / "b").save_state(tmp_path / "state")
    broken(tmp_path / "state")
    with pytest.raises(CheckpointError, match="is not one of this model"):
        loop.load_state(tmp_path / "state")
    assert (loop.steps, loop.rounds) == (0, 0)
    for mine, old in zip(parameters(loop), before, strict=True):
        assert torch.equal(mine, old)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("saved", "own", "told"),
    [
        ({"lora_alpha": 64}, {"lora_alpha": 1}, "has lora_alpha=64, and that of this loop 1"),
        ({"r": 8}, {}, "has r=8, and that of this loop 4"),
        ({"use_rslora": True}, {}, "use_rslora=True"),
        ({"target_modules": ["q_proj"]}, {}, r"other modules than that of this loop: it lacks .*lora_A"),
        ({}, {"target_modules": ["q_proj"]}, r"other modules than that of this loop: only it has .*lora_"),
        ({}, None, "holds an adapter, and this loop has none"),
    ],
)
def test_another_adapter_is_refused(saved: Any, own: Any, told: str, tmp_path: Path) -> None:
    stepped(tmp_path / "a", peft_config=lora(**saved)).save_state(tmp_path / "state")
    loop = made(tmp_path / "b", peft_config=None if own is None else lora(**own))
    before = parameters(loop)
    with pytest.raises(CheckpointError, match=told):
        loop.load_state(tmp_path / "state", optimizer=False)
    with pytest.raises(CheckpointError, match=told), loop.weights_of(tmp_path / "state"):
        pass
    for mine, old in zip(parameters(loop), before, strict=True):
        assert torch.equal(mine, old)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"logps": [-1.0]}, "`logps` has 1 number for 2 tokens"),
        ({"logps": [-1.0, NAN]}, "datum 1: `logps` must be finite numbers"),
        ({"weights": [1.0] * 3}, "`weights` has 3 numbers for 2 tokens"),
        ({"weights": [[1.0], [1.0]]}, r"`weights` has the shape \(2, 1\) for 2 tokens"),
        ({"weights": NAN}, "`weights` must be finite"),
        ({"weights": [1.0, INF]}, "`weights` must be finite"),
        ({"weights": 1e300}, "`weights` must be finite"),
        ({"weights": None}, "`weights` must be finite"),
        ({"weights": "a"}, "`weights` must be finite"),
        ({"prompt_ids": []}, "datum 1: prompt_ids is empty"),
        ({"token_ids": [5, 10**6]}, "datum 1: `token_ids` must be a list of whole numbers from 0 to below"),
        ({"token_ids": [5, -1]}, "datum 1: `token_ids`"),
        ({"prompt_ids": [1.5]}, "`prompt_ids` must be a list of whole numbers"),
        ({"prompt_ids": [5] * 600}, "datum 1: prompt_ids and token_ids have 602 tokens together"),
    ],
)
def test_a_datum_that_cannot_be_computed_is_named(wrong: dict[str, Any], told: str, idle: Loop) -> None:
    right = {"prompt_ids": [5], "token_ids": [6, 7], "weights": 1.0, "logps": [-1.0, -1.0]}
    with pytest.raises(DataError, match=told):
        idle.forward_backward([Loop.datum(**right), Loop.datum(**{**right, **wrong})])
    assert not gradient_of(idle)
    if wrong.keys() & {"prompt_ids", "token_ids"}:
        with pytest.raises(DataError, match=told):
            idle.forward([Loop.datum(**right), Loop.datum(**{**right, **wrong})])


def test_data_may_be_arrays_tensors_and_generators(idle: Loop) -> None:
    given = {"prompt_ids": [5, 6], "token_ids": [7, 8], "weights": [1.0, 2.0], "logps": [-1.0, -2.0]}
    plain = [Loop.datum(**given)]
    arrays = [Loop.datum(**{name: np.array(values) for name, values in given.items()})]
    tensors = [Loop.datum(**{name: torch.tensor(values) for name, values in given.items()})]
    halves = [Loop.datum(**{**given, "weights": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)})]
    expected, scores = idle.forward_backward(plain), idle.forward(plain)
    for same in (arrays, tensors, halves, (each for each in plain)):
        assert idle.forward_backward(same) == expected
    np.testing.assert_array_equal(idle.forward(iter(plain)), scores)


@pytest.mark.parametrize(("wrong", "told"), [([0.5, 0.5], "0.5 stands for 4 completions"), (1.0, "1.0 stands for 2")])
def test_advantages_are_rows(wrong: Any, told: str, idle: Loop) -> None:
    groups = idle.sample(["1+1=", "2+1="])
    for given in (wrong, np.array(wrong)):
        with pytest.raises(DataError, match=told):
            idle.data(groups, given)


def test_a_completion_must_have_room(idle: Loop) -> None:
    assert idle.sample(["1+1="], 1, max_tokens=500)
    with pytest.raises(DataError, match=r"Prompt 1 has .* tokens, and with max_tokens=300"):
        idle.sample(["1+1=", "1" * 300], 1, max_tokens=300)
    for ids in ((), (10**6,)):
        with pytest.raises(DataError, match="prompts, row 0: "):
            idle.sample([Prompt(id=0, row=-1, token_ids=ids, text="", content="")])


@pytest.mark.cases(2)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo", "dr_grpo"])
def test_a_loss_is_divided_by_any_number_above_zero(loss_type: str, idle: Loop) -> None:
    loss = LossSettings(loss_type=loss_type)
    data = [Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)]
    whole = idle.forward_backward(data, loss)["loss"]
    assert idle.forward_backward(data, loss, divide_by=0.25)["loss"] == pytest.approx(4 * whole)
    for wrong in (0, -2.0, NAN, INF, "2"):
        with pytest.raises(ConfigError, match="`divide_by`"):
            idle.forward_backward(data, loss, divide_by=wrong)


@pytest.mark.parametrize(("own", "settings"), [(1.0, {"temperature": 0.3}), (0.7, {"temperature": 0})])
def test_samples_at_another_temperature_have_no_ratios(own: float, settings: dict[str, Any], tmp_path: Path) -> None:
    """They are for evaluation, or for cross-entropy; those at the run's temperature have a ratio of 1."""
    loop = made(tmp_path, temperature=own)
    [group], [same] = loop.sample(["1+1="], **settings), loop.sample(["1+1="], temperature=own)
    assert all(np.isfinite(each.logps).all() for each in group.completions)
    data = loop.data([same], [[1.0] * 4])
    tokens = sum(len(each.token_ids) for each in data)
    assert loop.forward_backward(data)["loss"] == pytest.approx(-tokens, rel=1e-4)
    for on_policy in (False, True):
        data = loop.data([group], [[1.0] * 4], on_policy=on_policy)
        with pytest.raises(DataError, match="datum 0: its log-probabilities are not known at the run's temperature"):
            loop.forward_backward(data)
    assert loop.forward_backward(data, "cross_entropy")["tokens"] > 0
    assert len(loop.forward(data)) == 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"learning_rate": NAN}, "`learning_rate` is nan"),
        ({"learning_rate": -1}, "`learning_rate` is -1"),
        ({"max_grad_norm": -1}, "`max_grad_norm` is -1"),
        ({"weight_decay": INF}, "`weight_decay` must be a finite number"),
        ({"betas": (0.9, NAN)}, "`betas` is nan"),
        ({"betas": 0.9}, "`betas` must be 2 numbers; got 0.9"),
        ({"wd": 3}, "optim_step has no setting `wd`; there are .*\n.*Did you mean `weight_decay`"),
        ({"params": []}, "optim_step has no setting `params`"),
    ],
)
def test_settings_of_a_step_are_checked(settings: dict[str, Any], told: str, idle: Loop) -> None:
    """Before anything has changed: the gradients are still there."""
    before = parameters(idle)
    idle.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
    with pytest.raises(ConfigError, match=told):
        idle.optim_step(**settings)
    assert gradient_of(idle)
    for mine, old in zip(parameters(idle), before, strict=True):
        assert torch.equal(mine, old)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (LossSettings(beta=0.1), "`beta` of a LossSettings needs log-probabilities of a reference policy"),
        (LossSettings(correction=CORRECTIONS["token_mask"]), "`correction` of a LossSettings needs"),
        (LossSettings(observation_coef=0.1), "`observation_coef` of a LossSettings needs"),
        (LossSettings(loss_type="dap"), r"`loss_type` must be one of .*; got `dap`"),
        ("dpo", r"a key of podium\.loop\.LOSSES"),
        ("pp0", "Did you mean `ppo`"),
        (None, "There is no loss None"),
    ],
)
def test_losses_that_a_loop_cannot_compute(loss: Any, told: str, idle: Loop) -> None:
    with pytest.raises(ConfigError, match=told):
        idle.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], loss)


def test_losses_of_sequences_see_the_sign_of_their_weights(idle: Loop) -> None:
    """VESPO has other constants above zero than below; the off-policy mask drops sequences of negative weight alone."""
    ids = {"prompt_ids": [5, 6], "token_ids": [7, 8]}
    [logps] = idle.forward([Loop.datum(**ids, weights=0.0)])
    mask, vespo = LossSettings(off_policy_mask_threshold=0.1), LossSettings(loss_type="vespo")
    ratio = math.exp(-1)  # of the whole sequence, half a nat a token
    for weight in (1.0, -1.0):
        data = [Loop.datum(**ids, weights=weight, logps=(logps + 0.5).tolist())]
        kept = -2 * weight * math.exp(-0.5) if weight > 0 else 0.0
        assert idle.forward_backward(data, mask)["loss"] == pytest.approx(kept, rel=1e-3)
        k, scale = (2.0, 3.0) if weight > 0 else (3.0, 2.0)
        expected = -(ratio**k) * math.exp(scale * (1 - ratio)) * weight * float(logps.sum())
        assert idle.forward_backward(data, vespo)["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_dropout_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def step(loop: Loop) -> None:
        loop.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
        loop.optim_step(1e-2)

    dropout = lora(lora_dropout=0.5)
    whole = stepped(tmp_path / "a", peft_config=dropout)
    whole.save_state(tmp_path / "state")
    step(whole)
    again = stepped(tmp_path / "b", peft_config=dropout)
    step(again)  # other random numbers
    again.load_state(tmp_path / "state")
    step(again)
    for mine, theirs in zip(parameters(again), parameters(whole), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_that_a_state_leaves_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = stepped(tmp_path)
    for pending in (False, True):
        if pending:
            loop.forward_backward([Loop.datum(prompt_ids=[5, 6], token_ids=[7, 8, 9], weights=1.0)], "cross_entropy")
        loop.save_state(tmp_path / "state")
        assert ("Gradients are not in the state" in caplog.text) is pending


def test_weights_in_place_of_a_state(tmp_path: Path) -> None:
    loop = made(tmp_path)
    loop.save_weights(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds weights alone, and weights_of computes with them"):
        loop.load_state(tmp_path / "saved")

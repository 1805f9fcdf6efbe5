"""What a script of somebody else's runs into: names of other trainers, arguments, adapters, packages of rewards.

The scripts themselves are in `tests/e2e/published_scripts.yaml`.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from peft import LoraConfig

from podium import GRPOConfig, GRPOTrainer
from podium.errors import ArgumentError, ConfigError, PodiumError, RewardError
from podium.isolation.reward_results import raised
from podium.recipe.schema import key_types
from podium.rewards.resolve import check_rewards, resolve_rewards
from podium.testing import tiny_model
from podium.trainer.names import meant


def case(line: str, done: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.defect(line, done), id=done)


# ---- names ----


@pytest.mark.parametrize(
    ("name", "value", "fix", "settings"),
    [
        case("PS2", "a name of an older release", "warmup_ratio", 0.1, "`warmup_steps`", {"warmup_steps": 0.1}),
        case("N", "a name of PPO trainers", "kl_coef", 0.1, "`beta`", {"beta": 0.1}),
        case("PS2", "a setting that went", "use_agent_loop", True, "leave it out: tools and environments", {}),
        case("PS2", "a name within", "trainer.x.max_grad_norm", 1.0, "Did you mean `max_grad", {"max_grad_norm": 1.0}),
        case("PS2", "a name that is only like another", "kl_estimator", "k2", "Did you mean `advantage_est", None),
        case("PS2", "a slip", "num_generation", 4, "Did you mean `num_generations`?", {"num_generations": 4}),
        case("PS2", "nothing known", "wholly_unknown", 4, "take `wholly_unknown` out", {}),
    ],
)
def test_names_that_are_unknown(
    name: str, value: Any, fix: str, settings: dict[str, Any] | None, now: Callable
) -> None:
    said, changes = meant(name, value, key_types())
    now(f"{said}; {changes}")
    assert fix in said
    assert changes == settings


# ---- arguments ----


@dataclass
class OwnConfig(GRPOConfig):
    my_number: int = 1


class HandsOn(GRPOConfig):
    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(output_dir=folder, **settings)


def block(error: BaseException) -> str:
    """The call in a message."""
    return re.findall(r"^\w+\(\n(?:    .*\n)+\)$", str(error), re.MULTILINE)[-1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        case(
            "PS3",
            "several unknown names",
            lambda: GRPOConfig("out", num_generation=4, warmup_ratio=0.1, learning_rat=1e-5),
            [
                "GRPOConfig has 3 problems",
                "num_generations=4",
                "warmup_steps=0.1",
                "learning_rate=1e-05",
                "output_dir='out'",
            ],
        ),
        case(
            "PS3",
            "several values",
            lambda: GRPOConfig("out", temperature=0, beta=-1, top_p=2, num_generations=1),
            ["has 4 problems", "temperature=1.0,  # was 0", "beta=0.0", "top_p=1.0", "num_generations=8"],
        ),
        case(
            "PS3",
            "names, batches and packages together",
            lambda: GRPOConfig(
                "out", warmup_ratio=0.1, per_device_train_batch_size=1, num_generations=8, optim="adamw_torch_8bit"
            ),
            ["has 3 problems", "warmup_steps=0.1", "per_device_train_batch_size=8", "optim='adamw_torch'", "torchao"],
        ),
        case(
            "PS3",
            "a batch of one has no list of divisors",
            lambda: GRPOConfig("out", per_device_train_batch_size=1, num_generations=8),
            ["make the generation batch 8.\n", "per_device_train_batch_size=8,  # was 1"],
        ),
        case(
            "PS3",
            "a word for an optimizer, as in a recipe",
            lambda: GRPOConfig("out", optim="adam", lr_scheduler_type="cosin"),
            ["it is called `adamw_torch` here", "Did you mean `cosine`?", "optim='adamw_torch'"],
        ),
        case(
            "PS3",
            "a name beside the one it means",
            lambda: GRPOConfig("out", warmup_ratio=0.1, warmup_steps=0.2),
            ["write `warmup_steps`", "warmup_steps=0.2", "# without warmup_ratio"],
        ),
        case(
            "PS3",
            "settings that exclude each other",
            lambda: GRPOConfig("out", sync_ref_model=True, beta=0.0, temperature=-1),
            ["has 2 problems", "# without sync_ref_model"],
        ),
        case(
            "PS3",
            "a class of one's own",
            lambda: OwnConfig("out", my_number=3, warmup_ratio=0.1),
            ["OwnConfig has no argument", "my_number=3", "warmup_steps=0.1"],
        ),
        case(
            "PS3",
            "all fields, as a parser gives them",
            lambda: GRPOConfig(**{**{each.name: each.default for each in fields(GRPOConfig)}, "temperature": 0}),
            ["GRPOConfig(\n    temperature=1.0,  # was 0\n)"],
        ),
    ],
)
def test_one_message_in_python(make: Callable[[], Any], says: list[str], now: Callable) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    now(str(error.value))
    assert not [each for each in says if each not in str(error.value)]
    assert eval(block(error.value), {"GRPOConfig": GRPOConfig, "OwnConfig": OwnConfig})


@pytest.mark.defect("PS3", "unknown arguments are a TypeError, too")
def test_unknown_is_a_type_error() -> None:
    with pytest.raises(TypeError) as error:
        GRPOConfig("out", warmup_ratio=0.1, temperature=0)
    assert isinstance(error.value, ArgumentError)
    assert [each.changes for each in error.value.findings] == [
        {"warmup_ratio": None, "warmup_steps": 0.1},
        {"temperature": 1.0},
    ]


@pytest.mark.defect("PS3", "a token is not repeated")
def test_no_secret_in_the_message(now: Callable) -> None:
    token = "hf_" + "a1" * 12
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", hub_token=token, model_init_kwargs={"token": token}, temperature=0)
    now(block(error.value))
    assert token not in str(error.value)
    assert "hub_token=...," in str(error.value)


@pytest.mark.defect("PS3", "a class that hands on its arguments")
def test_a_class_that_hands_on(now: Callable) -> None:
    args = HandsOn("out", temperature=0.5)
    now(f"temperature {args.temperature}")
    assert (args.output_dir, args.temperature) == ("out", 0.5)
    assert pickle.loads(pickle.dumps(GRPOConfig("out", beta=0.1))).beta == 0.1
    assert copy.deepcopy(args).temperature == 0.5


def test_settings_that_the_installed_config_takes() -> None:
    given = {"output_dir": "out", "learning_rate": 2e-5, "max_prompt_length": 8, "of_another_version": 1}
    taken = inspect.signature(GRPOConfig).parameters
    args = GRPOConfig(**{name: value for name, value in given.items() if name in taken})
    assert (args.output_dir, args.learning_rate, args.max_prompt_length) == ("out", 2e-5, 8)
    assert list(taken) == list(inspect.signature(GRPOConfig.__init__).parameters)[1:]
    assert list(inspect.signature(HandsOn).parameters) == list(inspect.signature(HandsOn.__init__).parameters)[1:]


def test_a_reward_that_fades_over_the_run(make_trainer: Callable) -> None:
    """It divides by the number of steps, also where it is tested, or held-out rows are asked, before training."""
    seen: set[int] = set()

    def fading(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        seen.add(trainer_state.max_steps)
        return [len(text) * (1 - trainer_state.global_step / trainer_state.max_steps) for text in completions]

    trainer = make_trainer(
        fading, eval_rows=[{"prompt": "1+1="}], max_steps=-1, num_train_epochs=0.7, prove_first_batch=True
    )
    trainer.evaluate()
    trainer.train()
    assert seen == {trainer.state.max_steps} == {3}


@pytest.mark.defect("PS3", "packages that are missing, all of them, with the call")
def test_missing_packages_together(make_trainer: Callable, now: Callable) -> None:
    with pytest.raises(PodiumError) as error:
        make_trainer(model="./nowhere", optim="adamw_torch_8bit", report_to=["clearml"], use_vllm=True)
    now(str(error.value))
    assert "GRPOConfig has 3 problems" in str(error.value)
    shown = block(error.value)
    assert "optim='adamw_torch',  # was 'adamw_torch_8bit'" in shown
    assert "report_to='none'" in shown
    assert "# without use_vllm" in shown


# ---- adapters ----

LORA = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.defect("PS4", "the same model and peft_config again, after training")
def test_a_trained_adapter_is_not_replaced(make_trainer: Callable, now: Callable) -> None:
    model = tiny_model()
    first = make_trainer(model=model, peft_config=LORA, max_steps=1)
    first.train()
    with pytest.raises(ConfigError, match=r"lora_B.default.weight is not zero") as error:
        make_trainer(model=model, peft_config=LORA)
    now(str(error.value))
    assert "leave peft_config out" in error.value.fix
    learnt = {name: each.clone() for name, each in first.model.named_parameters() if "lora_B" in name}
    again = make_trainer(model=first.model)  # what the message says
    assert all(torch.equal(each, dict(again.model.named_parameters())[name]) for name, each in learnt.items())
    make_trainer(model=first.model.merge_and_unload(), peft_config=LORA)


@pytest.mark.defect("PS4", "the same again before anything was learnt is let through, and M020 says nothing false")
def test_a_fresh_adapter_may_be_made_again(
    tmp_path: Any, make_trainer: Callable, caplog: pytest.LogCaptureFixture, now: Callable
) -> None:
    model = tiny_model()
    make_trainer(model=model, peft_config=LORA)
    args = GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=8, report_to="none")
    tokenizer = make_trainer(model=tiny_model()).processing_class
    rows = [{"prompt": f"{n}+1="} for n in range(8)]
    GRPOTrainer(model, lambda completions, **_: [1.0] * len(completions), args, rows, None, tokenizer, peft_config=LORA)
    now("; ".join(record.message[:40] for record in caplog.records) or "nothing")
    assert "M020" not in caplog.text


# ---- packages of rewards ----


def _lacks_module() -> None:
    import no_such_math_verify  # noqa: F401


def _says_so() -> None:
    raise ImportError("Please install the `math_verify` package to use this reward")


def _names_the_line() -> None:
    raise ImportError("Needs latex: run `pip install latex2sympy2_extended[antlr4_13_2]`.")


def _is_too_old() -> None:
    from podium import no_such_name  # noqa: F401


@pytest.mark.parametrize(
    ("fails", "fix"),
    [
        case("PS5", "a module that is not there", _lacks_module, "pip install no-such-math-verify"),
        case("PS5", "TRL's accuracy_reward without math_verify", _says_so, "pip install math-verify"),
        case("PS5", "a line in the error", _names_the_line, "pip install latex2sympy2_extended[antlr4_13_2]"),
        case("PS5", "a name that an old release lacks", _is_too_old, "pip install -U podium"),
    ],
)
def test_a_package_that_is_missing(fails: Callable[[], None], fix: str, now: Callable) -> None:
    with pytest.raises(ImportError) as error:
        fails()
    failure = raised(error.value, frozenset(), ["x"])
    now(f"{failure.what}; fix: {failure.fix}")
    assert failure.fix == fix


# ---- rewards ----


class NoAsterisks:
    def __call__(self, args: Any, *kwargs: Any) -> list[float]:
        return [1.0]


@pytest.mark.parametrize(
    "function",
    [
        case("PS6", "def __call__(self, args, *kwargs)", NoAsterisks()),
        case("PS6", "def f(completions, kwargs)", lambda completions, kwargs: [1.0]),
    ],
)
def test_asterisks_that_were_lost(function: Any, now: Callable) -> None:
    with pytest.raises(RewardError) as error:
        check_rewards(resolve_rewards(function), ["answer"])
    now(str(error.value))
    assert "(completions, **kwargs): asterisks are lost in its signature" in error.value.fix


@pytest.mark.slow
@pytest.mark.defect("PS6", "a pattern on chat rows is an error from Python")
def test_a_pattern_on_chat_rows(make_trainer: Callable, now: Callable) -> None:
    def has_digits(completions: Any, **_: Any) -> list[float]:
        return [float(bool(re.search(r"\d", text))) for text in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    trainer = make_trainer(has_digits, rows=rows, prove_first_batch=True)
    with pytest.raises(RewardError, match="it scores strings only, but the prompts are conversations") as error:
        trainer.train()
    now(str(error.value))


@pytest.mark.defect("PS6", "log_metrics of a run in which no step had an entropy")
def test_metrics_of_a_flat_run(make_trainer: Callable, capsys: pytest.CaptureFixture[str], now: Callable) -> None:
    make_trainer().log_metrics("train", {"train_loss": 0.25, "entropy": None})
    said = capsys.readouterr().out
    now(said)
    assert "train_loss" in said
    assert "entropy" not in said

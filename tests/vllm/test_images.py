"""Rows with images against a server that is not vLLM but speaks its routes; a real one: test_images_served.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model

from benchmarks.families import tiny
from podium.engines.live.engine import LiveEngine
from podium.engines.vllm.requests import GENERATE, NEVER, over_all, read, sampling_of, short_ids
from podium.engines.vllm.weights import is_alone
from podium.errors import ConfigError, EngineError
from podium.models import loading
from podium.records import GivenImages, RolloutRequest, SamplingSettings
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from tests.images.test_given_images import Painter
from tests.images.tiny import picture, processor_of
from tests.vllm.served import greedy, lengths
from tests.vllm.stand_in import StandIn

FAMILY = "qwen2_5_vl"
ASKED = [{"role": "user", "content": "What is this?"}]
ROWS = [
    {"prompt": ASKED if seed % 2 else [{"role": "user", "content": f"{seed}+{seed}="}], "image": image, "answer": "2"}
    for seed, image in enumerate([None, picture(1), None, picture(3), None, picture(5)])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tiny(FAMILY).save_pretrained(folder)
    processor_of(FAMILY).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server(folder: str) -> Iterator[Any]:
    with StandIn(folder, processor=processor_of(FAMILY)) as running:
        yield running


@pytest.fixture
def make(make_trainer: Callable, folder: str, server: Any) -> Callable:
    """A trainer of two prompts a step, one of them with an image."""

    def made(**given: Any) -> Any:
        settings = {
            "model": folder,
            "rows": ROWS,
            "processing_class": processor_of(FAMILY),
            "shuffle_dataset": False,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 5.0,
            "per_device_train_batch_size": 8,
            "max_completion_length": 6,
            "train_image_encoder": True,
            "product_precision": "float32",
        }
        rewards = given.pop("rewards", lengths)
        return make_trainer(rewards, **{**settings, **given})

    return made


def posted(server: Any) -> list[Any]:
    """What was asked of the route of images, without the trial before weights load."""
    return [body for route, body in server.requests if route == GENERATE][1:]


def test_log_probabilities_are_those_of_training(make: Callable, server: Any) -> None:
    """Over all tokens, though those that stand for images are not drawn; the tiny model gives them much."""
    trainer = make(max_steps=3, temperature=0.8, prove_first_batch=True)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 3
    assert max(row["sampling/sampling_logp_difference/max"] for row in logged) < 1e-5
    checks = {check.name: check for check in trainer.proof.checks}
    assert checks["rollout and training log-probabilities"].passed


def test_a_prompt_is_rendered_once_for_all_its_completions(make: Callable, server: Any) -> None:
    trainer = make(max_steps=2)
    trainer.train()
    bodies = posted(server)
    assert [len(body.get("content_parts", ())) for body in bodies] == [0, 1, 0, 1]
    assert {body["sampling_params"]["n"] for body in bodies} == {4}
    assert not [route for route, _ in server.requests if route == "/v1/completions"]


def test_what_the_encoder_made_is_forgotten_with_its_weights(make: Callable, server: Any) -> None:
    make(max_steps=2).train()
    sent = [route for route, _ in server.requests if route in ("/collective_rpc", "/reset_encoder_cache")]
    assert sent == ["/collective_rpc", "/reset_encoder_cache"] * 2


def test_greedy_completions_are_those_of_the_live_engine(make: Callable, server: Any) -> None:
    trainer = make()
    prompts = round_prompts(trainer.run, RoundKey(0, 0), range(2))
    served = trainer.step.sample(prompts, greedy(trainer, 6), taken=0)
    live = LiveEngine(trainer.model, trainer.run.policy.tokenizer).generate(prompts, greedy(trainer, 6))
    for mine, other in zip(served, live, strict=True):
        assert mine.completions[0].token_ids == other.completions[0].token_ids
        assert mine.completions[0].logps == pytest.approx(other.completions[0].logps, abs=1e-5)


def test_a_run_of_text_alone_goes_the_usual_way(make: Callable, server: Any) -> None:
    make(max_steps=1, rows=[{**row, "image": None} for row in ROWS]).train()
    routes = {route for route, _ in server.requests}
    assert "/v1/completions" in routes
    assert not routes & {GENERATE, "/reset_encoder_cache"}


@pytest.fixture
def talks(folder: str, tmp_path: Path) -> str:
    """A model whose turns soon end, as many tokens end one."""
    shutil.copytree(folder, tmp_path / "talks")
    config = tmp_path / "talks" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [*range(2, 250, 8)]}))
    return str(tmp_path / "talks")


def test_images_that_an_environment_gives(make: Callable, server: Any, talks: str) -> None:
    """One in the prompt, and one behind a turn; no row has any."""
    trainer = make(
        model=talks,
        rewards=[],
        rows=[{"prompt": [{"role": "user", "content": ""}]}] * 6,
        environment_factory=Painter,
        max_completion_length=200,
    )
    trainer.train()
    counts = [len(body.get("content_parts", ())) for body in posted(server)]
    assert 1 in counts
    assert 2 in counts
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in logged) < 1e-5


def test_images_that_a_server_does_not_take(make: Callable, server: Any, talks: str) -> None:
    """An environment may give none; where it does, the run ends."""
    server.generated = lambda _: {}[None]  # there is no such route
    trainer = make(
        model=talks, rewards=[], rows=[{"prompt": ASKED}] * 6, environment_factory=Painter, max_completion_length=200
    )
    with pytest.raises(ConfigError, match=r"gave images, which the vLLM server at .* does not take") as error:
        trainer.train()
    assert error.value.code == "C034"


# ---- tokens that are not drawn ----


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 3.0])
def test_the_share_of_what_is_never_drawn(temperature: float) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=40) * 4
    logits[7] = logits.max() + 1  # the likeliest
    never = (7, 9)
    settings = SamplingSettings(num_completions=1, max_tokens=1, temperature=temperature, never=never)
    biased = logits.copy()
    for token, bias in sampling_of(RolloutRequest(token_ids=(1,), prompt_id=0, max_tokens=1), settings)[
        "logit_bias"
    ].items():
        biased[token] += bias

    def logps(values: np.ndarray) -> np.ndarray:
        scaled = values / temperature
        return scaled - np.logaddexp.reduce(scaled)

    told = dict(enumerate(np.float32(logps(biased)).tolist()))
    for token in (0, 12, 39):
        expected = logps(logits)[token]
        assert over_all(told[token], told, settings) == pytest.approx(expected, abs=2e-3 if temperature < 1 else 1e-4)
    assert over_all(-1.0, told, replace(settings, top_k=3)) == -1.0


def test_settings_of_the_user_stay() -> None:
    request = RolloutRequest(token_ids=(1,), prompt_id=0, max_tokens=1)
    extra = {"logit_bias": {5: 1.0}, "frequency_penalty": 0.5}
    settings = SamplingSettings(num_completions=1, max_tokens=1, never=(7,), extra=extra)
    asked = sampling_of(request, settings)
    assert asked["logit_bias"] == {5: 1.0, 7: NEVER}
    assert asked["frequency_penalty"] == 0.5
    assert asked["logprobs"] == len(asked["logprob_token_ids"]) == 2


def test_a_placeholder_that_was_drawn_all_the_same(make: Callable, server: Any, monkeypatch: Any) -> None:
    trainer = make(max_steps=1)
    placeholder = trainer.model.config.image_token_id
    server.break_answer = lambda answer: {
        "choices": [{**c, "token_ids": [placeholder, *c["token_ids"][1:]]} for c in answer["choices"]]
    }
    with pytest.raises(EngineError, match=f"drew token {placeholder}, which stands for images"):
        trainer.train()


# ---- what is refused, before weights load ----


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(loading, "load_policy", loaded)


@pytest.mark.usefixtures("unloaded")
def test_a_server_without_the_route(make: Callable, server: Any, folder: str) -> None:
    def disabled(_: Any) -> Any:
        raise KeyError  # vLLM answers 403

    server.generated = disabled
    with pytest.raises(ConfigError, match="it was started without --enable-scale-out") as error:
        make()
    assert error.value.code == "C034"
    assert error.value.fix == "Start it again with --enable-scale-out."


@pytest.mark.usefixtures("unloaded")
def test_a_server_that_refuses_images(make: Callable, server: Any) -> None:
    def refused(_: Any) -> Any:
        raise ValueError("At most 0 image(s) may be provided in one prompt.")

    server.generated = refused
    with pytest.raises(ConfigError, match=r"HTTP 500: .*At most 0 image"):
        make()


@pytest.mark.usefixtures("unloaded")
def test_a_server_whose_processor_makes_other_tokens(make: Callable, server: Any) -> None:
    server.processor = processor_of(FAMILY)
    server.processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 64}
    with pytest.raises(ConfigError, match="makes other tokens of a prompt with images") as error:
        make()
    assert "the first 8 are the same" in error.value.what
    assert "transformers" in error.value.fix


@pytest.mark.usefixtures("unloaded")
def test_log_probabilities_that_are_not_of_what_is_drawn_from(make: Callable, server: Any) -> None:
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="does not tell the share of the tokens that stand for images"):
        make(vllm_importance_sampling_correction=False)


@pytest.mark.usefixtures("unloaded")
def test_a_teacher_at_a_server(make: Callable, server: Any) -> None:
    with pytest.raises(ConfigError, match="the teacher, is shown text alone") as error:
        make(
            use_vllm=False,
            vllm_mode="colocate",
            vllm_server_base_url=None,
            vllm_server_timeout=240.0,
            teacher_model=server.url,
        )
    assert error.value.code == "C063"


def test_the_line_to_start_a_server_with(make: Callable, server: Any) -> None:
    server.stop()
    with pytest.raises(ConfigError, match="No vLLM server answers") as error:
        make(vllm_server_timeout=0.2)
    assert " --enable-scale-out " in error.value.fix


def test_other_tokens_in_a_later_answer() -> None:
    prompt = RolloutRequest(token_ids=(1, 9, 9, 2), prompt_id=0, max_tokens=1, images=(of(start=1, num=2, short=(9,)),))
    settings = SamplingSettings(num_completions=1, max_tokens=1)
    choice = {"index": 0, "token_ids": [3], "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}]}}
    [drawn] = read({"choices": [choice], "prompt_token_ids": [1, 9, 9, 2]}, prompt, settings)
    assert drawn.token_ids == [3]
    with pytest.raises(EngineError, match="3, and here 4, of which the first 2 are the same"):
        read({"choices": [choice], "prompt_token_ids": [1, 9, 2]}, prompt, settings)
    with pytest.raises(EngineError, match="lacks token ids"):
        read({"choices": [choice]}, prompt, settings)


def of(start: int, num: int, short: tuple[int, ...]) -> Any:
    """Images of `num` tokens from `start` on, of which a server is sent others."""
    return GivenImages(
        digest=bytes([start]),
        placeholder=9,
        placeholders=np.arange(num),
        fields={},
        token_fields={},
        start=start,
        num_tokens=num,
        short_ids=short,
    )


def test_images_in_the_middle_of_a_conversation() -> None:
    """Those of a prompt, and those that a tool gave behind a turn."""
    images = (of(start=0, num=4, short=(1, 9)), of(start=6, num=3, short=(5, 9, 6, 7)))
    request = RolloutRequest(token_ids=(1, 9, 9, 9, 20, 21, 5, 9, 9, 22), prompt_id=0, max_tokens=1, images=images)
    assert short_ids(request) == [1, 9, 20, 21, 5, 9, 6, 7, 22]
    assert short_ids(replace(request, images=images[::-1])) == [1, 9, 20, 21, 5, 9, 6, 7, 22]
    assert short_ids(replace(request, images=())) == list(request.token_ids)


# ---- weights ----


@pytest.mark.parametrize(("target", "alone"), [("layers.*q_proj", True), ("blocks.*qkv|layers.*q_proj", False)])
def test_an_adapter_on_the_encoder_is_merged(target: str, alone: bool) -> None:
    """An adapter of vLLM is of the language model alone."""
    policy = get_peft_model(tiny(FAMILY), LoraConfig(r=2, target_modules=f".*({target})"))
    assert any("lora_" in name for name, _ in policy.named_parameters())
    assert is_alone(policy) is alone

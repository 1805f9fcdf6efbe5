"""`podium tinker` against Tinker's own client, and an unmodified recipe of its cookbook: `make test-tinker`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

import podium
from podium import GRPOConfig, Loop
from podium.models.builtin import resolve_model
from podium.testing import tiny_model, tiny_tokenizer
from podium.tinker.policy import UNNAMED, TinkerPolicy
from podium.tinker.server import TinkerServer

tinker = pytest.importorskip("tinker", reason="Tinker's client is not installed: make test-tinker")
from tinker import types  # noqa: E402  behind the skip

KEY = "tml-a-key-of-this-test"
PROMPT, ANSWER = [5, 6, 7, 8], [9, 10, 11]


def fresh(folder: Path, rank: int) -> Loop:
    args = GRPOConfig(str(folder), max_completion_length=8, report_to="none", use_cpu=True, product_precision="float32")
    lora = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")
    return Loop(tiny_model(), args, processing_class=tiny_tokenizer(), peft_config=lora)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> TinkerServer:
    folder = tmp_path_factory.mktemp("server")
    server = TinkerServer(TinkerPolicy(["tiny"], folder / "saved", lambda rank: fresh(folder, rank)), KEY, 0)
    threading.Thread(target=server.run, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def service(server: TinkerServer) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        yield client


@pytest.fixture
def training(service: Any) -> Any:
    return service.create_lora_training_client(base_model="tiny", rank=4).result()


def datum(**inputs: Any) -> Any:
    """The answer behind its prompt, with zeros for the prompt's positions before the lists of `inputs`."""
    whole = [*PROMPT, *ANSWER]
    zeros = [0.0] * (len(PROMPT) - 1)
    tensors = {"target_tokens": torch.tensor(whole[1:])}
    tensors |= {name: torch.tensor([*zeros, *values], dtype=torch.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={name: types.TensorData.from_torch(each) for name, each in tensors.items()},
    )


def logps(output: Any) -> np.ndarray:
    """Those of the answer, and before them none."""
    [record] = output.loss_fn_outputs
    found = np.asarray(record["logprobs"].data)
    assert len(found) == len(PROMPT) + len(ANSWER) - 1
    return found[len(PROMPT) - 1 :]


def greedy(client: Any, **params: Any) -> Any:
    asked = types.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **params})
    answer = client.sample(prompt=types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=asked)
    return answer.result().sequences[0]


def learn(training: Any, steps: int = 2) -> None:
    for _ in range(steps):
        training.forward_backward([datum(weights=[1.0] * len(ANSWER))], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()


def test_the_models_are_those_that_can_be_trained(service: Any) -> None:
    assert [model.model_name for model in service.get_server_capabilities().supported_models] == ["tiny"]


def test_the_client_takes_the_steps_of_the_loop(training: Any, tmp_path: Path) -> None:
    """Losses, log-probabilities and weights are those of `podium.Loop` with the same calls."""
    loop = fresh(tmp_path, 4)
    own = Loop.datum(prompt_ids=PROMPT, token_ids=ANSWER, weights=[1.0, 0.5, -0.2])
    for _ in range(3):
        told = training.forward_backward([datum(weights=[1.0, 0.5, -0.2])], "cross_entropy")
        stepped = training.optim_step(
            types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.3)
        )
        np.testing.assert_array_equal(logps(told.result()), loop.forward([own])[0])
        assert told.result().metrics["loss:sum"] == pytest.approx(loop.forward_backward([own], "cross_entropy")["loss"])
        theirs = loop.optim_step(1e-2, max_grad_norm=0.3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        assert stepped.result().metrics == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("loss", "capped"),
    [
        ("importance_sampling", lambda ratio, weight: ratio * weight),
        ("ppo", lambda ratio, weight: np.minimum(ratio * weight, ratio.clip(0.8, 1.2) * weight)),
    ],
)
def test_losses_are_sums_over_ratios(training: Any, loss: str, capped: Callable[..., Any]) -> None:
    new = logps(training.forward([datum()], "cross_entropy").result())
    old, weights = new - np.array([0.7, -0.6, 0.1]), np.array([1.0, -1.0, 2.0])
    told = training.forward_backward([datum(logprobs=old.tolist(), advantages=weights.tolist())], loss)
    assert told.result().metrics["loss:sum"] == pytest.approx(-capped(np.exp(new - old), weights).sum(), rel=1e-4)


def test_a_custom_loss_is_computed_by_the_client(training: Any) -> None:
    def twice(_: Any, found: list[Any]) -> tuple[Any, dict[str, float]]:
        return -2 * found[0][-len(ANSWER) :].sum(), {"mine": 1.0}

    training.forward_backward_custom([datum()], twice).result()
    custom = training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    training.forward_backward([datum(weights=[2.0] * len(ANSWER))], "cross_entropy").result()
    assert custom.metrics == pytest.approx(training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics)


def test_sampling_clients_keep_their_weights(service: Any, training: Any) -> None:
    base = service.create_sampling_client(base_model="tiny").result()
    before = training.save_weights_and_get_sampling_client().result()
    first = greedy(before).tokens
    learn(training, 4)
    after = training.save_weights_and_get_sampling_client().result()
    assert greedy(after).tokens[: len(ANSWER)] == ANSWER
    assert greedy(before).tokens == greedy(base).tokens == first != greedy(after).tokens
    whole = types.ModelInput.from_ints([*PROMPT, *ANSWER])
    own = logps(training.forward([datum()], "cross_entropy").result())
    scored = after.compute_logprobs(whole).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[len(PROMPT) :], own, atol=1e-5)
    np.testing.assert_allclose(greedy(after).logprobs[: len(ANSWER)], own, atol=1e-5)
    for _ in range(UNNAMED):
        training.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match=f"are kept of the last {UNNAMED}"):
        greedy(before)


def test_completions_end_as_asked(training: Any) -> None:
    learn(training, 4)
    client = training.save_weights_and_get_sampling_client().result()
    assert (greedy(client, stop=[ANSWER[1]]).tokens, greedy(client, stop=[ANSWER[1]]).stop_reason) == (
        ANSWER[:2],
        "stop",
    )
    text = tiny_tokenizer().decode(ANSWER[:2])
    cut = greedy(client, stop=text)
    assert (cut.tokens, cut.stop_reason, len(cut.logprobs)) == (ANSWER[:2], "stop", 2)
    assert (len(greedy(client, stop=[]).tokens), greedy(client, stop=[]).stop_reason) == (6, "length")
    drawn = [greedy(client, temperature=1.0, seed=seed, stop=[]).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    several = [client.sample(types.ModelInput.from_ints(PROMPT), 3, params) for _ in range(4)]
    sequences = [each for future in several for each in future.result().sequences]
    assert len({tuple(each.tokens) for each in sequences}) > 6
    assert len({each.sequence_id for each in sequences}) == 12


def test_a_state_goes_on_where_it_was(service: Any, training: Any) -> None:
    learn(training)
    state, sampler = training.save_state("here").result(), training.save_weights_for_sampler("here").result()
    assert re.fullmatch(r"tinker://[\w:]+/weights/here", state.path)
    learn(training)
    expected = logps(training.forward([datum()], "cross_entropy").result())
    again = service.create_training_client_from_state_with_optimizer(state.path).result()
    assert again.get_info().lora_rank == 4
    learn(again)
    np.testing.assert_allclose(logps(again.forward([datum()], "cross_entropy").result()), expected, atol=1e-6)
    fresh_optimizer = service.create_training_client_from_state(state.path).result()
    learn(fresh_optimizer)
    other = logps(fresh_optimizer.forward([datum()], "cross_entropy").result())
    assert np.abs(other - expected).max() > 1e-4
    assert greedy(service.create_sampling_client(model_path=sampler.path).result()).tokens
    with pytest.raises(tinker.RequestFailedError, match="is not the one that is trained here"):
        training.forward([datum()], "cross_entropy").result()


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "loss": (
        lambda service, mine: mine.forward_backward([datum(logprobs=[-1.0] * 3, advantages=[1.0] * 3)], "gspo"),
        "There is no loss 'gspo'; there are",
    ),
    "settings": (
        lambda service, mine: mine.forward_backward([datum()], "ppo", {"beta": 1.0}),
        "offer `loss_fn_config`",
    ),
    "no advantages": (lambda service, mine: mine.forward_backward([datum()], "ppo"), "no `advantages`, `logprobs`"),
    "a name twice": (lambda service, mine: [mine.save_state("twice") for _ in range(2)][1], "already"),
    "a path": (lambda service, mine: mine.save_state("../../etc"), "is no path of this server"),
    "a model": (lambda service, mine: service.create_lora_training_client("Qwen/Qwen3-8B"), "no model Qwen/Qwen3-8B"),
    "no state": (lambda service, mine: service.create_training_client_from_state("tinker://a/weights/b"), "nothing"),
    "some layers": (
        lambda service, mine: service.create_lora_training_client("tiny", train_mlp=False),
        "does not offer an adapter of some layers",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_once_and_the_server_goes_on(mistake: str, service: Any, training: Any) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        make(service, training).result()
    assert caught.value.category == types.RequestErrorCategory.User
    assert service.create_lora_training_client(base_model="tiny", rank=2).result().get_info().lora_rank == 2


def test_tokens_of_another_model_and_other_targets_are_refused(training: Any) -> None:
    foreign = types.Datum(
        model_input=types.ModelInput.from_ints([5, 10**6]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor([10**6, 7]))},
    )
    with pytest.raises(tinker.RequestFailedError, match="each from 0 to under 260"):
        training.forward([foreign], "cross_entropy").result()
    moved = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor([5, 6, 7]))},
    )
    with pytest.raises(tinker.RequestFailedError, match="is not the next token"):
        training.forward([moved], "cross_entropy").result()
    client = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.APIStatusError, match="does not offer `topk_prompt_logprobs`"):
        client.sample(types.ModelInput.from_ints(PROMPT), 1, params, topk_prompt_logprobs=2).result()


def test_another_key_is_refused(server: TinkerServer) -> None:
    with pytest.raises(tinker.AuthenticationError, match="not the key that the server printed"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-another").create_sampling_client(base_model="tiny")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_arithmetic_recipe_of_the_cookbook_trains_the_built_in_model(tmp_path: Path) -> None:
    """Three steps of `math_rl`, unmodified, and a fourth that goes on from its checkpoint."""
    pytest.importorskip("tinker_cookbook", reason="the cookbook is not installed: make test-tinker")
    source = str(Path(podium.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "podium", "tinker", "builtin:smollm2-135m-instruct", "-o", "saved", "--port", "0"]
    log = tmp_path / "log"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(each for each in server.stdout if "TINKER_BASE_URL" in each)
            environment["TINKER_BASE_URL"] = re.findall(r"http://\S+", line)[0]
            for steps in (3, 4):
                recipe = [
                    *(sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train"),
                    f"model_name={resolve_model('builtin:smollm2-135m-instruct')}",
                    *("renderer_name=qwen3_instruct", "loss_fn=importance_sampling", "learning_rate=1e-4"),
                    *("groups_per_batch=8", "group_size=4", "max_tokens=8", f"max_steps={steps}", "save_every=2"),
                    *(f"log_path={log}", "behavior_if_log_dir_exists=resume"),
                ]
                subprocess.run(recipe, cwd=tmp_path, env=environment, check=True)
        finally:
            server.terminate()
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in trained] == [0, 1, 2, 3]
    assert trained[0]["grad_norm"] > 0
    assert all(abs(row["optim/kl_sample_train_v1"]) < 0.05 for row in trained), "sampler and trainer agree"
    assert list((tmp_path / "saved").glob("*/weights/final/model/adapter_model.safetensors"))

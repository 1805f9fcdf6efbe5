"""`use_vllm` against a server that is not vLLM but speaks its routes: what is sent, what is checked, how it ends.

The same against a real `vllm serve`: tests/vllm/test_vllm.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import TrainerCallback

from podium import GRPOConfig, Loop
from podium.checks.settings import MACHINE
from podium.checks.setup import from_arguments
from podium.engines.vllm import engine as vllm_engine
from podium.engines.vllm import weights
from podium.engines.vllm.colocate import build
from podium.engines.vllm.connect import urls_of
from podium.engines.vllm.engine import Member, ServerEngine
from podium.engines.vllm.requests import read, sampling_of
from podium.engines.vllm.server import VllmServer
from podium.engines.vllm.weights import Folder
from podium.errors import ConfigError, EngineError, ModelError
from podium.errors.rule import findings
from podium.records import Prompt, RolloutRequest, SamplingSettings
from podium.testing import save_tiny_model, tiny_model, tiny_tokenizer
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from podium.trainer.run import Arguments
from podium.trainer.settings import vllm_settings
from tests.vllm.stand_in import StandIn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def server(folder: str) -> Iterator[Any]:
    with StandIn(folder) as running:
        yield running


@pytest.fixture
def make(make_trainer: Callable, folder: str, server: Any) -> Callable:
    """A trainer of the served model that samples from the server."""

    def made(**given: Any) -> Any:
        settings = {
            "model": folder,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 5.0,
            "per_device_train_batch_size": 8,
            "learning_rate": 0.05,
        }
        return make_trainer(**{**settings, **given})

    return made


# ---- weights ----


@pytest.mark.cases(1)
@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["all", "lora"])
def test_the_server_samples_from_the_policy_of_each_step(make: Callable, server: Any, peft_config: Any) -> None:
    trainer = make(peft_config=peft_config, max_steps=3, prove_first_batch=True, **{"save_strategy": "no"})
    ids = torch.arange(10, 30)[None]
    apart, moved, versions = [], [], []
    generate = trainer.run.step.engine.generate

    def looked(*args: Any, **kwargs: Any) -> Any:
        own = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        with torch.no_grad():
            apart.append(float((trainer.model.eval()(ids).logits - server.model(ids).logits).abs().max()))
        moved.append(server.model(ids).logits.sum().item())
        versions.append(server.weight_version)
        groups = generate(*args, **kwargs)
        assert all(torch.equal(own[name], p) for name, p in trainer.model.named_parameters())
        return groups

    trainer.run.step.engine.generate = looked
    trainer.train()
    assert len(apart) == 4  # and once for the proof on the first batch
    assert max(apart) < 1e-4
    assert len(set(moved)) == 4
    assert len(set(versions)) == 4
    assert [v.rpartition("-")[2] for v in versions] == ["0", "0", "1", "2"]


def test_weights_that_have_not_moved_are_sent_once(make: Callable, server: Any) -> None:
    trainer = make(max_steps=1)
    trainer.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    trainer.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    reloads = [body for route, body in server.requests if route == "/collective_rpc"]
    assert len(reloads) == 1
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(1.5)
    trainer.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    assert len([body for route, body in server.requests if route == "/collective_rpc"]) == 2
    assert [route for route, _ in server.requests].count("/reset_prefix_cache") == 2


def test_the_folder_of_weights_goes_with_the_run(make: Callable, tmp_path: Path) -> None:
    trainer = make(max_steps=2, vllm_weights_folder=str(tmp_path / "shared"))
    trainer.train()
    shared = tmp_path / "shared" / "weights-for-vllm"
    steps = sorted(path.name.rpartition("-")[2] for path in shared.iterdir())
    assert steps == ["0", "1"], "the newest, and the one before"
    later = make(max_steps=1, vllm_weights_folder=str(tmp_path / "shared"))  # as a cell that is run again
    later.rollouts.sync(0)
    for run, left in ((trainer, 1), (later, 0)):
        run.run.step.engine.members.clear()
        run.run.step.engine.join = None
        gc.collect()
        assert len([*shared.glob("*")]) == left
    assert not shared.exists()


# ---- completions ----


def test_greedy_completions_are_those_of_the_live_engine(make: Callable, make_trainer: Callable, folder: str) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "17+25=", "answer": "42"}]
    theirs = make(temperature=0.7).generate_completions(rows, 1, greedy=True)
    ours = make_trainer(model=folder, temperature=0.7).generate_completions(rows, 1, greedy=True)
    for a, b in zip(theirs, ours, strict=True):
        assert a.group.completions[0].token_ids == b.group.completions[0].token_ids
        assert a.group.completions[0].logps == pytest.approx(b.group.completions[0].logps, abs=1e-4)


def test_random_numbers_follow_from_seed_round_and_prompt() -> None:
    request = RolloutRequest(token_ids=(1, 2), prompt_id=3, num_completions=4, max_tokens=8)
    settings = SamplingSettings(num_completions=4, max_tokens=8, seed=1, round=2)
    seed = sampling_of(request, settings)["seed"]
    assert seed == sampling_of(request, settings)["seed"]
    others = {
        sampling_of(dataclasses.replace(request, prompt_id=4), settings)["seed"],
        sampling_of(request, dataclasses.replace(settings, round=3))["seed"],
        sampling_of(request, dataclasses.replace(settings, seed=2))["seed"],
    }
    assert seed not in others
    assert len(others) == 3
    assert all(0 <= one < 2**62 for one in [seed, *others])


def test_a_run_is_the_same_twice(make: Callable) -> None:
    losses = []
    for _ in range(2):
        trainer = make()
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == losses[1]
    assert any(losses[0])


def test_filters_and_temperature_reach_the_server(make: Callable, server: Any) -> None:
    trainer = make(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, generation_kwargs={"frequency_penalty": 0.5})
    trainer.train()
    body = next(body for route, body in server.requests if route == "/v1/completions")
    assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (0.7, 3, 0.9, 0.1)
    assert body["frequency_penalty"] == 0.5
    assert body["n"] == 4
    assert body["stop_token_ids"] == sorted(trainer.run.policy.end_ids)


def test_log_probabilities_of_a_filter_are_not_compared_with_the_models(make: Callable) -> None:
    trainer = make(top_k=3, max_steps=1, prove_first_batch=True)
    trainer.train()
    checks = {check.name: check for check in trainer.proof.checks}
    assert checks["rollout and training log-probabilities"].passed is None
    assert "filter" in checks["rollout and training log-probabilities"].detail
    assert checks["the weights reach the sampler"].passed
    [logged] = [row for row in trainer.state.log_history if "loss" in row]
    assert logged["sampling/sampling_logp_difference/mean"] > 0.1  # what the filter left out
    assert "health/logp_gap_mean" not in logged


def test_training_normalizes_over_the_tokens_that_a_server_drew_from(make: Callable, server: Any) -> None:
    server.masks = True
    trainer = make(top_k=3, max_steps=2, num_iterations=2, beta=0.1, prove_first_batch=True)
    trainer.train()
    checks = {check.name: check for check in trainer.proof.checks}
    assert checks["rollout and training log-probabilities"].passed
    first, *_ = [row for row in trainer.state.log_history if "loss" in row]
    assert first["sampling/sampling_logp_difference/max"] < 1e-5
    assert first["rollouts/candidates"] == 3
    assert {route for route, _ in server.requests if "complet" in route or "generate" in route} == {
        "/inference/v1/generate"
    }


def test_greedy_completions_of_a_server_that_draws_from_few_tokens_alone(make: Callable, server: Any) -> None:
    """It refuses a temperature of 0; of a token that is drawn from one the log-probability says nothing."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "17+25=", "answer": "42"}]
    undisturbed = make(top_k=3).generate_completions(rows, 1, greedy=True)
    server.masks = True
    for replay in (True, False):
        trainer = make(top_k=3, sampling_replay=replay)
        for mine, other in zip(trainer.generate_completions(rows, 1, greedy=True), undisturbed, strict=True):
            assert mine.group.completions[0].token_ids == other.group.completions[0].token_ids
            assert np.isnan(mine.group.completions[0].logps).all()
    with pytest.raises(ConfigError, match="refuses requests without top_k") as error:
        make(top_p=0.9)
    assert "Set top_k" in error.value.fix


def test_a_loop_that_leaves_top_k_out(folder: str, server: Any, tmp_path: Path) -> None:
    """At a server that draws from few tokens alone, where the run has `top_k`."""
    server.masks = True
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "use_cpu": True}
    loop = Loop(folder, args=GRPOConfig(str(tmp_path), top_k=3, max_completion_length=4, **settings))
    assert loop.sample(["1+1="], 2)[0].completions[0].candidates
    with pytest.raises(ConfigError, match=f"{server.url} was started with --return-sampling-mask") as error:
        loop.sample(["1+1="], 2, top_k=0)
    assert error.value.code == "C034"
    assert len(loop.sample(["1+1="], 2, temperature=0)[0].completions) == 2


def test_a_server_that_does_not_say_what_it_drew_from(make: Callable, server: Any, caplog: Any) -> None:
    make(top_k=3)
    assert "does not say which tokens top_p, top_k and min_p left" in caplog.text
    assert "--return-sampling-mask" in caplog.text
    caplog.clear()
    make(top_k=3, sampling_replay=False)
    make()
    assert not caplog.text


def test_a_token_that_could_not_be_drawn(make: Callable, server: Any) -> None:
    server.masks = True
    server.break_answer = lambda answer: {
        "choices": [{**c, "sampling_mask": [[] for _ in c["token_ids"]]} for c in answer["choices"]]
    }
    assert "not among those" in ended(make(top_k=3))


def test_the_correction_is_logged_under_trls_names(make: Callable) -> None:
    trainer = make(max_steps=1, vllm_importance_sampling_mode="token_truncate")
    trainer.train()
    logged = {k: v for row in trainer.state.log_history for k, v in row.items() if k.startswith("sampling/")}
    assert set(logged) == {
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/min",
        "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max",
    }
    assert logged["sampling/sampling_logp_difference/max"] < 1e-3
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    off = make(max_steps=1, vllm_importance_sampling_correction=False)
    off.train()
    assert not any(k.startswith("sampling/") for row in off.state.log_history for k in row)


# ---- mistakes before anything starts ----


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"development": False}, ConfigError, ("VLLM_SERVER_DEV_MODE=1", "vllm serve")),
        ({"version": "0.24.0"}, ConfigError, ("version 0.24.0", "0.32", "pip install")),
        ({"logprobs_mode": "raw_logprobs"}, ConfigError, ("raw_logprobs", "--logprobs-mode processed_logprobs")),
        pytest.param(
            {"device": "cpu", "chunked_prefill": True},
            ConfigError,
            ("CPU Generator does not use offset", "--no-enable-chunked-prefill"),
            marks=pytest.mark.defect("E1", "a CPU server with chunked prefill"),
        ),
        ({"longest": 8}, ConfigError, ("takes 8 tokens", "max_completion_length", "--max-model-len")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_was_started_otherwise(
    make: Callable, server: Any, wrong: dict[str, Any], kind: type[Exception], says: tuple[str, ...], now: Callable
) -> None:
    for name, value in wrong.items():
        setattr(server, name, value)
    with pytest.raises(kind) as error:
        make()
    now(str(error.value))
    assert error.value.code == "C034"
    for part in says:
        assert part in str(error.value)


@pytest.mark.defect("E14", "the fix for a server with another model")
def test_a_server_of_another_model(make: Callable, server: Any, tmp_path: Path, now: Callable) -> None:
    server.folder = save_tiny_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ModelError) as error:
        make()
    assert "another model" in str(error.value)
    now(str(error.value))
    assert "[260, 32] in training and [260, 64] on the server" in str(error.value)
    assert f"--port {server.port} --logprobs-mode processed_logprobs" in error.value.fix
    server.folder = save_tiny_model(tmp_path / "copy")  # the same shapes: its weights become ours
    make(max_steps=1).train()


def test_a_tied_head_on_a_cpu_needs_the_extension(make: Callable, server: Any, tmp_path: Path) -> None:
    tied = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    server.device, server.folder = "cpu", tied
    with pytest.raises(ConfigError) as error:
        make(model=tied)
    assert error.value.code == "C034"
    line = re.search(
        r"(PYTHONPATH=.*) VLLM_CPU_KV.* VLLM_SERVER.*--worker-extension-cls (\w+)\.(\w+)", str(error.value)
    )
    [path] = shlex.split(line[1])
    assert (Path(path.removeprefix("PYTHONPATH=")) / f"{line[2]}.py").is_file()
    server.extension = f"{line[2]}.{line[3]}"
    make(model=tied, max_steps=1).train()
    methods = [body["method"] for route, body in server.requests if route == "/collective_rpc"]
    assert methods == ["reload_weights", "podium_refresh"]
    server.device = "cuda"  # there the head is the embedding itself
    make(model=tied, max_steps=1).train()
    assert [body["method"] for route, body in server.requests if route == "/collective_rpc"][2:] == ["reload_weights"]


def test_no_server(make: Callable, server: Any) -> None:
    server.stop()
    with pytest.raises(ConfigError) as error:
        make(vllm_server_timeout=0.1)
    assert "No vLLM server answers at" in str(error.value)
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in str(error.value)
    assert f"--port {server.port}" in str(error.value)
    server.start()


def test_another_program_at_the_address(make: Callable, server: Any) -> None:
    server.answer = lambda route, body: {} if route == "/health" else ["no"]
    with pytest.raises(ConfigError, match="is no vLLM server"):
        make()


def test_prompts_that_the_server_cannot_take_are_found_in_the_data(make: Callable, server: Any) -> None:
    server.longest = 20
    rows = [{"prompt": "1+1=", "answer": "2"}] * 12 + [{"prompt": "1" * 30, "answer": "2"}]
    with pytest.raises(ValueError, match="row 12"):
        make(rows=rows)


def test_a_server_elsewhere_needs_a_way_for_weights(make: Callable, server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("podium.engines.vllm.connect.is_here", lambda url: False)
    with pytest.raises(ConfigError, match="Set vllm_weights_folder"):
        make()


def test_a_check_says_so_and_does_not_wait(folder: str, server: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}] * 8
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    args = GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=8, use_cpu=True, **settings)
    left_out = ("eval_dataset", "processing_class", "reward_processing_classes", "quantization_config", "peft_config")
    given = {"model": folder, "reward_funcs": [len], "args": args, "train_dataset": rows}
    setup = from_arguments(Arguments(**given, **dict.fromkeys(left_out)), all_images=False)
    assert list(findings(MACHINE, setup)) == []
    server.lora_rank = 8
    for adapter in (IA3Config(), LoraConfig(r=4)):
        adapted = Arguments(**{**given, **dict.fromkeys(left_out), "peft_config": adapter})
        assert list(findings(MACHINE, from_arguments(adapted, all_images=False))) == []
    wide = Arguments(**{**given, **dict.fromkeys(left_out), "peft_config": LoraConfig(r=16)})
    [finding] = findings(MACHINE, from_arguments(wide, all_images=False))
    assert "rank 8 at most" in finding.what
    server.stop()
    [finding] = findings(MACHINE, setup)
    assert (finding.code, finding.severity) == ("C034", "warning")
    assert "vllm serve" in finding.fix
    server.start()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"vllm_mode": "server"}, "belongs to vLLM, which does not sample here"),
        ({"vllm_importance_sampling_correction": False}, "belongs to vLLM"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}, "does nothing with vllm_mode"),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_server_port": 8001}, "does nothing with vllm_mode"),
        ({"use_vllm": True, "rollout_engine": "live"}, "name two engines"),
        ({"use_vllm": True, "vllm_mode": "serv"}, "Did you mean `server`"),
        ({"use_vllm": True, "loss_type": "vespo"}, "vespo weighs whole rollouts by itself"),
        ({"use_vllm": True, "cache_implementation": "static"}, "cache_implementation"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "a+"}, "does not honour"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOConfig(str(tmp_path), **settings)
    assert says in str(error.value)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_colocated_without_vllm(make_trainer: Callable, folder: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(model=folder, use_vllm=True, vllm_mode="colocate")
    assert error.value.code == "C032"
    assert "not installed" in str(error.value)
    assert "vllm_mode: server" in str(error.value)


def test_the_engine_by_its_name(tmp_path: Path) -> None:
    assert GRPOConfig(str(tmp_path), rollout_engine="vllm", vllm_mode="server").use_vllm


# ---- ends in the middle of a run ----


def ended(trainer: Any) -> str:
    with pytest.raises(EngineError) as error:
        trainer.train()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.defect("E9", "a server that is lost before the first checkpoint")
def test_a_server_that_is_lost_before_a_checkpoint(make: Callable, server: Any, now: Callable, caplog: Any) -> None:
    """Several requests fail at once; each is looked at, or asyncio prints `Task exception was never retrieved`."""
    trainer = make(max_steps=3, save_strategy="no", vllm_server_timeout=5.0)
    server.die_after = 1
    message = ended(trainer)
    gc.collect()
    now(message)
    assert "start it again" in message
    assert "resume" not in message
    assert "never retrieved" not in caplog.text
    server.die_after = None
    server.start()


@pytest.mark.slow
def test_a_server_that_dies_and_stays_dead(make: Callable, server: Any, tmp_path: Path) -> None:
    trainer = make(max_steps=3, save_strategy="steps", save_steps=1, vllm_server_timeout=1.0)
    server.die_after = 3  # in the second step
    message = ended(trainer)
    assert "No vLLM server answers" in message
    assert "--resume_from_checkpoint true" in message
    server.die_after = None
    server.start()
    again = make(max_steps=3, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-1")] == ["checkpoint-1"]


def test_a_server_that_is_started_again_gets_the_weights_again(make: Callable, server: Any, caplog: Any) -> None:
    trainer = make(max_steps=2)
    trainer.rollouts.sync(trainer.state.global_step)
    server.stop()
    server.start()
    groups = trainer.run.step.engine.generate(round_prompts(trainer.run, RoundKey(0, 0), range(2)), _greedy(trainer))
    assert "was restarted" in caplog.text
    assert len(groups) == 2
    assert server.weight_version == trainer.run.step.engine.version
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert torch.allclose(server.model(ids).logits, trainer.model.eval()(ids).logits, atol=1e-4)


def _greedy(trainer: Any) -> SamplingSettings:
    return SamplingSettings(num_completions=2, max_tokens=4, greedy=True, end_ids=trainer.run.policy.end_ids)


def test_a_server_that_dies_while_it_samples_and_comes_back(
    make: Callable, server: Any, caplog: Any, monkeypatch: Any
) -> None:
    trainer = make(max_steps=1, vllm_server_timeout=120.0)  # of which nothing is waited for unless it stays away
    trainer.rollouts.sync(trainer.state.global_step)
    server.die_after = 1
    wait = vllm_engine.first_up

    def start_again(*args: Any) -> Any:
        server.die_after = None
        server.start()
        return wait(*args)

    monkeypatch.setattr(vllm_engine, "first_up", start_again)
    settings = dataclasses.replace(_greedy(trainer), greedy=False)
    groups = trainer.run.step.engine.generate(round_prompts(trainer.run, RoundKey(0, 0), range(4)), settings)
    assert len(groups) == 4
    assert "is gone" in caplog.text
    assert server.weight_version == trainer.run.step.engine.version


def test_two_runs_cannot_share_a_server(make: Callable, server: Any) -> None:
    first, second = make(), make()
    first.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    second.generate_completions([{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(EngineError, match="those of another run"):
        first.generate_completions([{"prompt": "1+1=", "answer": "2"}])


def test_weights_that_change_in_every_generation(make: Callable, server: Any) -> None:
    trainer = make()
    trainer.rollouts.sync(trainer.state.global_step)
    server.after_completion = lambda: server.rename({"new_version": "somebody's"})
    message = ended(trainer)
    assert "3 times in one round" in message


def test_a_server_that_is_silent(make: Callable, server: Any) -> None:
    trainer = make(vllm_server_timeout=0.5)
    server.delay = 3.0
    message = ended(trainer)
    assert "answered none of 2 requests for 0.5 s" in message
    assert "vllm_server_timeout" in message


@pytest.mark.slow
def test_a_server_that_is_slow_and_answers_is_waited_for(make: Callable, server: Any) -> None:
    """A round may take longer than `vllm_server_timeout`, as long as one answer after the other comes."""
    trainer = make(vllm_server_timeout=4.0, max_steps=1, per_device_train_batch_size=16)
    server.delay = 1.2
    start = time.monotonic()
    trainer.train()
    assert time.monotonic() - start > 4.5


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda answer: {"choices": answer["choices"][:1]}, "1 completions where 4 were asked for"),
        (lambda answer: {"error": "no"}, "lacks token ids"),
        (lambda answer: {"choices": [{**c, "logprobs": None} for c in answer["choices"]]}, "lacks token ids"),
        (lambda answer: {"choices": [{**c, "token_ids": []} for c in answer["choices"]]}, "0 token ids"),
        (
            lambda answer: {
                "choices": [{**c, "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}} for c in answer["choices"]]
            },
            "ended a completion after 1 of 8 tokens",
        ),
    ],
)
def test_answers_that_are_not_what_was_asked_for(make: Callable, server: Any, broken: Any, says: str) -> None:
    trainer = make()
    server.break_answer = broken
    assert says in ended(trainer)


def test_a_server_that_refuses_the_weights(make: Callable, server: Any) -> None:
    trainer = make()

    def refuse(body: Any) -> Any:
        raise ValueError("shapes do not match")

    server.rpc = refuse
    message = ended(trainer)
    assert "shapes do not match" in message
    assert server.weight_version.endswith("-loading")  # nobody takes it for the weights


def test_a_log_probability_that_vllm_could_not_give() -> None:
    settings = SamplingSettings(num_completions=1, max_tokens=2)
    answer = {"choices": [{"index": 0, "token_ids": [5, 6], "logprobs": {"token_logprobs": [None, -0.5]}}]}
    request = RolloutRequest(token_ids=(1,), prompt_id=0, max_tokens=2)
    [drawn] = read(answer, request, settings)
    assert drawn.token_ids == [5, 6]
    assert math.isnan(drawn.logps[0])
    assert drawn.logps[1] == -0.5


def test_generate_needs_weights_first(server: Any, tmp_path: Path) -> None:
    http = VllmServer(server.url, seconds=2)
    member = Member(http, "tiny", Folder(tmp_path / "w", torch.float32))
    engine = ServerEngine([member], tiny_tokenizer())
    prompt = Prompt(id=0, row=0, token_ids=(5, 6), text="", content="")
    with pytest.raises(EngineError, match="`sync` comes before `generate`"):
        engine.generate([prompt], SamplingSettings(num_completions=1, max_tokens=2))
    engine.sync(tiny_model("llama", seed=3), 0)
    [group] = engine.generate([prompt], SamplingSettings(num_completions=1, max_tokens=2))
    assert len(group.completions[0].token_ids) == 2


@pytest.mark.parametrize(("ahead", "stale"), [(1, [0, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 3])])
def test_rounds_ahead_are_sampled_while_those_before_are_trained_on(
    make: Callable, server: Any, ahead: int, stale: list[int]
) -> None:
    trainer = make(async_rollouts=ahead, max_steps=5, prove_first_batch=True)
    trainer.train()
    assert [row["rollouts/staleness"] for row in trainer.state.log_history if "rollouts/staleness" in row] == stale
    assert server.weight_version.endswith(f"step-{4 - ahead}")  # of the last round


def test_weights_wait_in_their_folder_for_their_round(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a version was sent at once or waited for the rounds before it changes nothing; few are kept."""
    losses = []
    for waits in (True, False):
        monkeypatch.setattr("podium.trainer.ahead.RoundsAhead.is_sampling", waits)
        trainer = make(async_rollouts=2, max_steps=5)
        folders: list[int] = []

        def count(*args: Any, folders: list[int] = folders, trainer: Any = trainer, **kwargs: Any) -> None:
            [transfer] = {member.transfer for member in trainer.run.step.engine.members}
            folders.append(len([*transfer.root.iterdir()]))

        trainer.add_callback(type("Count", (TrainerCallback,), {"on_step_end": count})())
        trainer.train()
        assert max(folders) <= 4
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == losses[1]


# ---- addresses, and the line that starts a server ----


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        pytest.param(
            {"vllm_server_base_url": "127.0.0.1:8920"},
            "http://127.0.0.1:8920",
            marks=pytest.mark.defect("E12", "127.0.0.1:8920"),
        ),
        pytest.param(
            {"vllm_server_base_url": "localhost:8920/"},
            "http://localhost:8920",
            marks=pytest.mark.defect("E12", "localhost:8920/"),
        ),
        pytest.param(
            {"vllm_server_base_url": "http://gpu1:8000/v1"},
            "http://gpu1:8000",
            marks=pytest.mark.defect("N", "vllm_server_base_url with /v1"),
        ),
        pytest.param(
            {"vllm_server_host": "http://gpu1", "vllm_server_port": 81},
            "http://gpu1:81",
            marks=pytest.mark.defect("N", "vllm_server_host: http://gpu1"),
        ),
        ({"vllm_server_base_url": "https://gpu1"}, "https://gpu1"),
    ],
    ids=str,
)
def test_addresses(settings: dict[str, Any], url: str, tmp_path: Path, now: Callable) -> None:
    [found] = urls_of(vllm_settings(GRPOConfig(str(tmp_path), use_vllm=True, vllm_mode="server", **settings)))
    now(found)
    assert found == url


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(url, marks=pytest.mark.defect("E12", url))
        for url in ("http://gpu1:80x", "htp://gpu1:8000", "http://", "http://gpu1:99999", "/run/vllm.sock")
    ],
)
def test_what_is_no_address(url: str, make: Callable, now: Callable) -> None:
    with pytest.raises(ConfigError) as error:
        make(vllm_server_base_url=url)
    now(str(error.value))
    assert f"vllm_server_base_url: {url} is no address of a server." in str(error.value)


@pytest.mark.defect("E8", "the line for a server on a CPU, beside a trainer")
def test_the_line_for_a_server_on_a_cpu(make: Callable, server: Any, now: Callable) -> None:
    server.stop()
    with pytest.raises(ConfigError) as error:
        make(vllm_server_timeout=0.1)
    now(error.value.fix)
    assert "VLLM_CPU_KVCACHE_SPACE=2 VLLM_SERVER_DEV_MODE=1 vllm serve" in error.value.fix
    assert "--worker-extension-cls podium_worker.FreshHead --no-enable-chunked-prefill" in error.value.fix
    assert "--enforce-eager" in error.value.fix, "or it compiles for minutes at every start"
    server.start()


@pytest.mark.defect("E1", "vllm_mode: colocate on a CPU")
def test_a_colocated_engine_on_a_cpu_cuts_no_prefill(tmp_path: Path, monkeypatch: Any, now: Callable) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **settings: given.update(settings)))
    build(vllm_settings(GRPOConfig(str(tmp_path), use_vllm=True, use_cpu=True)), "model", None)
    now(f"enable_chunked_prefill is {given['enable_chunked_prefill']}")
    assert given["enable_chunked_prefill"] is False
    assert "max_num_batched_tokens" not in given, "vLLM's own, which then is no less than the longest prompt"


@pytest.mark.parametrize("place", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_one_side_of_a_tied_weight_is_refused(place: dict[str, Any]) -> None:
    """vLLM has one weight for both sides."""
    config = LoraConfig(**{"target_modules": ["q_proj"], **place})
    for tied in (False, True):
        policy = get_peft_model(tiny_model("llama", tie_word_embeddings=tied), config)
        with pytest.raises(ModelError, match="share one weight") if tied else contextlib.nullcontext():
            assert [*weights.tensors(policy, torch.float32)]

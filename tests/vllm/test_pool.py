"""Several servers that share a run's prompts, and adapters that are sent without their base; against stand-ins."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig

from podium.engines.vllm.engine import Link, ServerSession
from podium.errors import ConfigError, EngineError
from podium.records import RolloutRequest, SamplingSettings
from podium.testing import save_tiny_model
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from tests.vllm.stand_in import StandIn

ADAPTER = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def servers(folder: str) -> Iterator[list[Any]]:
    with StandIn(folder, lora_rank=8) as first, StandIn(folder, lora_rank=8) as second:
        yield [first, second]


@pytest.fixture
def make(make_trainer: Callable, folder: str, servers: list[Any]) -> Callable:
    """A trainer of the served model that samples from both servers."""

    def made(**given: Any) -> Any:
        settings = {
            "model": folder,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": [server.url for server in servers],
            "vllm_server_timeout": 5.0,
            "per_device_train_batch_size": 16,
            "learning_rate": 0.05,
        }
        return make_trainer(**{**settings, **given})

    return made


def asked(server: Any) -> int:
    return sum(route == "/v1/completions" for route, _ in server.requests)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


# ---- several servers ----


def test_two_servers_share_the_prompts_and_train_as_one(make: Callable, servers: list[Any]) -> None:
    alone = losses(make(max_steps=3, vllm_server_base_url=servers[0].url))
    before = [asked(server) for server in servers]
    assert losses(make(max_steps=3)) == alone
    assert [asked(server) - n for server, n in zip(servers, before, strict=True)] == [6, 6]
    assert servers[0].weight_version == servers[1].weight_version


def test_addresses_may_stand_in_one_text(make: Callable, servers: list[Any]) -> None:
    trainer = make(max_steps=1, vllm_server_base_url=", ".join(server.url for server in servers))
    assert [member.server.url for member in trainer.run.step.engine.members] == [server.url for server in servers]
    with pytest.raises(ConfigError, match="is given twice"):
        make(vllm_server_base_url=[servers[0].url, servers[0].url])


def test_what_a_server_had_that_died_is_drawn_at_the_other(make: Callable, servers: list[Any], caplog: Any) -> None:
    undisturbed = losses(make(max_steps=3))
    trainer = make(max_steps=3)
    servers[1].die_after = 2  # in the second round
    assert losses(trainer) == undisturbed
    assert "1 of 2 servers are left" in caplog.text


def test_a_server_joins_and_another_comes_back(make: Callable, servers: list[Any], caplog: Any) -> None:
    undisturbed = losses(make(max_steps=4))
    servers[1].stop()
    trainer = make(max_steps=4)
    assert "it is asked again before each round" in caplog.text
    step = trainer.rollouts.sync

    def changes(version: int, *given: Any) -> Any:
        if version == 1:
            servers[1].start()  # it joins
        if version == 2:
            servers[0].stop()
        if version == 3:
            servers[0].start()
            servers[0].requests.clear()
        return step(version, *given)

    trainer.rollouts.sync = changes
    assert losses(trainer) == undisturbed
    assert all(member.up for member in trainer.run.step.engine.members)
    assert asked(servers[0]) == 2
    assert servers[0].weight_version == servers[1].weight_version


def test_one_that_comes_with_another_model_is_left_out(
    make: Callable, servers: list[Any], caplog: Any, tmp_path: Any
) -> None:
    servers[1].stop()
    trainer = make(max_steps=2)
    servers[1].folder = save_tiny_model(tmp_path / "wide", hidden_size=64)
    servers[1].start()
    trainer.train()
    assert "another model" in caplog.text
    assert "It is left out." in caplog.text
    assert asked(servers[1]) == 0


def test_a_silent_server_is_done_without(make: Callable, servers: list[Any], caplog: Any) -> None:
    trainer = make(max_steps=1, vllm_server_timeout=1.0)
    servers[1].delay = 3.0
    trainer.train()
    assert "answered none of" in caplog.text
    assert trainer.state.global_step == 1


def test_no_server_that_is_left(make: Callable, servers: list[Any]) -> None:
    trainer = make(max_steps=1, vllm_server_timeout=0.5)
    for server in servers:
        server.die_after = 0
    with pytest.raises(EngineError) as error:
        trainer.train()
    assert all(server.url in str(error.value) for server in servers)


def test_a_conversation_stays_and_the_rest_goes_where_least_is_drawn(make: Callable, servers: list[Any]) -> None:
    trainer = make()
    engine = trainer.run.step.engine
    trainer.rollouts.sync(0)
    settings = SamplingSettings(num_completions=1, max_tokens=2, end_ids=trainer.run.policy.end_ids)
    sent: list[str] = []

    def link(member: Any) -> Link:
        def send(*_: Any) -> Any:
            sent.append(member.server.url)
            return _Never()

        return Link(member, send)

    session = ServerSession(engine, [link(member) for member in engine.members], settings)
    request = RolloutRequest(token_ids=(5,), prompt_id=0, num_completions=1, max_tokens=2)
    for k in (0, 1, 2, 3):
        session.submit(dataclasses.replace(request, prompt_id=k))
    assert Counter(sent) == {server.url: 2 for server in servers}
    session.submit(dataclasses.replace(request, prompt_id=4, num_completions=8))
    assert sent[-1] == servers[0].url
    session.submit(dataclasses.replace(request, prompt_id=5))
    session.submit(dataclasses.replace(request, prompt_id=6))
    assert sent[-2:] == [servers[1].url] * 2
    session.submit(dataclasses.replace(request, prompt_id=4, turn=1))
    assert sent[-1] == servers[0].url


class _Never:
    """An answer that does not come."""

    def add_done_callback(self, _: Any) -> None:
        """It is never called."""


# ---- adapters without their base ----


def test_only_the_adapter_is_sent(make: Callable, make_trainer: Callable, folder: str, servers: list[Any]) -> None:
    """The servers' adapters are the trainer's after each step, and their base is what they were started with."""
    trainer = make(peft_config=ADAPTER, max_steps=3, prove_first_batch=True)
    ids = torch.arange(10, 30)[None]
    base = servers[0].model(ids).logits
    apart, seen = [], []
    generate = trainer.run.step.engine.generate

    def looked(*args: Any, **kwargs: Any) -> Any:
        for server in servers:
            [(name, adapter)] = server.adapters.items()
            seen.append(name)
            with torch.no_grad():
                apart.append(float((trainer.model.eval()(ids).logits - adapter(ids).logits).abs().max()))
        return generate(*args, **kwargs)

    trainer.run.step.engine.generate = looked
    trainer.train()
    assert len(apart) == 8
    assert max(apart) < 1e-5
    assert len(set(seen)) == 4
    assert not any(route == "/collective_rpc" for server in servers for route, _ in server.requests)
    assert torch.equal(servers[0].model(ids).logits, base)
    live = make_trainer(model=folder, peft_config=ADAPTER, per_device_train_batch_size=16)
    live.model.load_state_dict(trainer.model.state_dict())
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "17+25=", "answer": "42"}]
    both = [t.generate_completions(rows, 1, greedy=True) for t in (trainer, live)]
    for mine, theirs in zip(*both, strict=True):
        assert mine.group.completions[0].token_ids == theirs.group.completions[0].token_ids


@pytest.mark.parametrize(
    "merged",
    [
        LoraConfig(r=2, target_modules="all-linear", use_dora=True),
        LoraConfig(r=2, target_modules="all-linear", rank_pattern={"q_proj": 4}),
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights="pissa"),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["dora", "ranks", "pissa", "saved"],
)
def test_adapters_that_need_their_base_are_merged(make: Callable, servers: list[Any], merged: LoraConfig) -> None:
    make(peft_config=merged, max_steps=1).train()
    assert not servers[0].adapters
    assert any(route == "/collective_rpc" for route, _ in servers[0].requests)


def test_all_servers_take_adapters_or_none_gets_one(make: Callable, servers: list[Any]) -> None:
    servers[1].lora_rank = None
    make(peft_config=ADAPTER, max_steps=1).train()
    assert not servers[0].adapters


def test_a_rank_that_the_server_does_not_take(make: Callable, servers: list[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        make(peft_config=LoraConfig(r=16, target_modules="all-linear"))
    assert "takes adapters of rank 8 at most, and the one that is trained has rank 16" in str(error.value)
    assert "--enable-lora --max-lora-rank 16" in error.value.fix
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in error.value.fix


def test_a_server_that_was_restarted_gets_the_adapter_again(make: Callable, servers: list[Any], caplog: Any) -> None:
    trainer = make(peft_config=ADAPTER, max_steps=1, vllm_server_base_url=servers[0].url)
    trainer.rollouts.sync(trainer.state.global_step)
    servers[0].stop()
    servers[0].start()
    settings = SamplingSettings(num_completions=2, max_tokens=4, greedy=True, end_ids=trainer.run.policy.end_ids)
    engine = trainer.run.step.engine
    assert len(engine.generate(round_prompts(trainer.run, RoundKey(0, 0), range(2)), settings)) == 2
    assert "was restarted" in caplog.text
    assert [*servers[0].adapters] == [engine.version]


def test_an_adapter_that_is_lost_while_a_round_is_drawn(make: Callable, servers: list[Any], caplog: Any) -> None:
    """The server says that it does not know the adapter; that is no other mistake."""
    undisturbed = losses(make(peft_config=ADAPTER, max_steps=1, vllm_server_base_url=servers[0].url))
    trainer = make(peft_config=ADAPTER, max_steps=1, vllm_server_base_url=servers[0].url)
    lose = iter([True])
    servers[0].after_completion = lambda: servers[0].adapters.clear() if next(lose, False) else None
    assert losses(trainer) == undisturbed
    assert "changed while it sampled" in caplog.text


def test_a_base_that_a_run_has_replaced(make: Callable, servers: list[Any]) -> None:
    make(max_steps=1).train()
    with pytest.raises(EngineError, match=r"base weights of the vLLM server .* were replaced") as error:
        make(peft_config=ADAPTER, max_steps=1).train()
    assert "Start the server again." in error.value.fix

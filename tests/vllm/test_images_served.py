"""Rows with images, sampled by a real server on the CPU. About a minute for each family on one core."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podium.engines.vllm.connect import EXTENSION
from podium.engines.vllm.connect import WITH_IMAGES as FLAG
from podium.engines.vllm.requests import GENERATE
from podium.engines.vllm.server import VllmServer
from podium.engines.vllm.weights import AdapterFolder, Folder
from podium.errors import ConfigError
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from tests.vllm.served import Compared, greedy, losses
from tests.vllm.served_images import SIDES, made, save_family
from tests.vllm.serving import WITH_ADAPTERS, Vllm, needs_vllm, serving

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)
pytestmark = [pytest.mark.slow, *needs_vllm]

PILLOW = {"idefics3": ("--mm-processor-kwargs", '{"backend": "pil"}')}
"""Flags of servers whose processor takes Pillow, as the trainer's does here."""


def at(server: Vllm) -> dict[str, Any]:
    """Settings of a run that samples from a server."""
    return {"vllm_mode": "server", "vllm_server_base_url": server.url}


@pytest.fixture(scope="module", params=SIDES)
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Vllm, str]]:
    """A server of a family's tiny model, and the family's name."""
    folder = tmp_path_factory.mktemp("served")
    model = save_family(request.param, folder / "tiny")
    flags = ("--worker-extension-cls", EXTENSION, FLAG, *PILLOW.get(request.param, ()))
    with serving(Vllm(folder / "log.txt", *flags, model=model)) as running:
        yield running, request.param


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is posted to servers to sample."""
    posted: list[tuple[str, Any]] = []
    completing = VllmServer.completing

    @contextlib.contextmanager
    def noted(server: VllmServer) -> Iterator[Any]:
        with completing(server) as send:

            def sent(*call: Any) -> Any:
                posted.append(call)
                return send(*call)

            yield sent

    monkeypatch.setattr(VllmServer, "completing", noted)
    return posted


def test_images_are_sampled_as_they_are_trained_on(
    tmp_path: Path, served: tuple[Vllm, str], asked: list[tuple[str, Any]]
) -> None:
    """All weights move, those of the encoder among them, whose features vLLM keeps between requests."""
    server, name = served
    run = made(tmp_path / "run", server.model, name, **at(server))
    [member] = run.run.step.engine.members
    assert type(member.transfer) is Folder
    compared = Compared(run)
    compared.look()
    run.add_callback(compared)
    asked.clear()
    run.train()

    gaps = [row["sampling/sampling_logp_difference/max"] for row in losses(run)]
    logger.info("%s: greedy log-probabilities apart by %s, sampled by %s", name, compared.apart, gaps)
    assert len({str(texts) for texts in compared.theirs}) > 1
    assert max(compared.apart) < 1e-4
    assert max(gaps) < 1e-4
    checks = {check.name: check for check in run.proof.checks}
    assert checks["rollout and training log-probabilities"].passed

    groups = [body for route, body in asked if route == GENERATE and body["sampling_params"]["n"] == 4]
    assert Counter(len(body.get("content_parts", ())) for body in groups) == {0: 6, 1: 6}


def test_what_is_drawn_depends_on_the_images(tmp_path: Path, served: tuple[Vllm, str]) -> None:
    server, name = served
    run = made(tmp_path / "run", server.model, name, **at(server))
    first, _, second, _ = round_prompts(run.run, RoundKey(0, 0), range(4))
    assert first.token_ids == second.token_ids
    swapped = [replace(first, images=second.images), replace(second, images=first.images)]

    def drawn(prompts: Any) -> list[tuple[Any, Any]]:
        groups = run.step.sample(prompts, greedy(run), taken=0)
        return [(group.completions[0].token_ids, group.completions[0].logps) for group in groups]

    plain = drawn([first, second])
    assert plain[0][1] != plain[1][1]
    assert [ids for ids, _ in drawn(swapped)] == [ids for ids, _ in plain[::-1]]
    assert [logps for _, logps in drawn(swapped)] == [pytest.approx(logps, abs=1e-5) for _, logps in plain[::-1]]


def test_an_adapter_goes_alone(tmp_path: Path) -> None:
    """The encoder stays as it was, and so does what vLLM keeps of images."""
    name = "qwen2_5_vl"
    model = save_family(name, tmp_path / "tiny")
    with serving(Vllm(tmp_path / "log.txt", *WITH_ADAPTERS, FLAG, model=model)) as server:
        run = made(tmp_path / "run", server.model, name, rank=4, **at(server))
        compared = Compared(run)
        run.add_callback(compared)
        run.train()
        [member] = run.run.step.engine.members
        assert type(member.transfer) is AdapterFolder
        assert member.server.weight_version() == "default"
    gaps = [row["sampling/sampling_logp_difference/max"] for row in losses(run)]
    logger.info("greedy log-probabilities apart by %s, sampled by %s", compared.apart, gaps)
    assert len({str(texts) for texts in compared.theirs}) > 1
    assert max(compared.apart) < 1e-4
    assert max(gaps) < 1e-4


def test_a_server_that_was_started_for_text(tmp_path: Path) -> None:
    """It is found before weights load."""
    name = "qwen2_5_vl"
    model = save_family(name, tmp_path / "tiny")
    flags = ("--worker-extension-cls", EXTENSION)
    refused = pytest.raises(ConfigError, match=f"it was started without {FLAG}")
    with serving(Vllm(tmp_path / "log.txt", *flags, model=model)) as server, refused as error:
        made(tmp_path / "run", server.model, name, **at(server))
    assert error.value.code == "C034"

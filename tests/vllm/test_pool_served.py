"""A pool of real servers on the CPU, of which one dies during a run and others come. Three minutes on one core."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.engines.vllm.server import VllmServer, first_up
from podium.testing import save_tiny_model
from tests.vllm.served import SIZES, lengths, losses, made
from tests.vllm.serving import Vllm, needs_vllm, serving

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, *needs_vllm]
START_SECONDS = 600
STEPS = {
    "max_steps": 4,
    "max_completion_length": 200,
    "prove_first_batch": False,
    "vllm_server_timeout": START_SECONDS,
}


def up(server: Vllm) -> None:
    """Wait for a server."""
    first_up([VllmServer(server.url, seconds=5)], START_SECONDS)


def drawn_by(reward: list[Any]) -> Any:
    """The reward of `served`, which keeps the tokens that it is given."""

    def kept(completion_ids: list[list[int]], **_: Any) -> list[float]:
        reward.append(completion_ids)
        return lengths(completion_ids)

    return kept


def test_one_dies_while_it_draws_another_joins_and_the_first_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are those of a run on one server, losses and weights to rounding; none is of other weights."""
    model = save_tiny_model(tmp_path / "tiny", **SIZES)
    first = Vllm(tmp_path / "first.txt", model=model)
    second = Vllm(tmp_path / "second.txt", model=model)
    tokens: dict[str, list[Any]] = {"one": [], "pool": []}
    asked: Counter[tuple[int, str]] = Counter()
    doomed: list[Vllm] = []
    completing = VllmServer.completing

    with serving(first), contextlib.ExitStack() as later:
        one = made(tmp_path / "one", first.url, reward=drawn_by(tokens["one"]), **STEPS)
        one.train()
        pool = made(tmp_path / "pool", [first.url, second.url], reward=drawn_by(tokens["pool"]), **STEPS)
        assert "it is asked again before each round" in caplog.text
        later.enter_context(serving(second))

        @contextlib.contextmanager
        def counted(server: VllmServer) -> Iterator[Any]:
            with completing(server) as send:

                def sent(*call: Any) -> Any:
                    asked[pool.state.global_step, server.url] += 1
                    if doomed and server.url == first.url:
                        threading.Timer(0.2, doomed.pop().kill).start()
                    return send(*call)

                yield sent

        monkeypatch.setattr(VllmServer, "completing", counted)
        sync = pool.rollouts.sync

        def changes(taken: int, *given: Any) -> None:
            if taken == 1:
                up(second)  # it joins
            if taken == 2:
                doomed.append(first)
            if taken == 3:
                first.start()
                up(first)  # it comes back
            sync(taken, *given)

        monkeypatch.setattr(pool.rollouts, "sync", changes)
        pool.train()
        versions = {VllmServer(server.url, seconds=5).weight_version() for server in (first, second)}

    assert re.search(r"is gone: \w+ at /v1/completions. 1 of 2 servers are left", caplog.text)
    assert asked == {
        (0, first.url): 4,
        (1, first.url): 2,
        (1, second.url): 2,
        (2, first.url): 2,
        (2, second.url): 4,  # its own, and those of the one that died
        (3, first.url): 2,
        (3, second.url): 2,
    }
    assert versions == {pool.run.step.engine.version}
    assert tokens["pool"] == tokens["one"]
    gaps = [row["sampling/sampling_logp_difference/max"] for row in losses(pool)]
    logger.info("sampled against trained: %s", gaps)
    assert max(gaps) < 1e-4
    for mine, other in zip(losses(pool), losses(one), strict=True):
        for name in ("loss", "reward", "entropy", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    pairs = zip(pool.model.parameters(), one.model.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    logger.info("weights apart by %s", apart)
    assert apart < 1e-5

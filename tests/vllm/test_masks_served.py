"""Masks of filtered sampling from a real server on the CPU. About two minutes on one core."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from podium.engines.vllm.connect import EXTENSION, MASKS
from podium.engines.vllm.weights import AdapterFolder
from podium.testing import save_tiny_model
from tests.vllm.served import SIZES, Compared, losses, made
from tests.vllm.serving import VLLM, WITH_ADAPTERS, Vllm, needs_vllm, serving

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, *needs_vllm]
PROGRAM = (str(Path(VLLM or "vllm").with_name("python")), str(Path(__file__).with_name("interpreted_vllm.py")))
FILTERS = {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2}


@pytest.fixture(scope="module", params=["all", "adapter"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("served")
    flags = WITH_ADAPTERS if request.param == "adapter" else ("--worker-extension-cls", EXTENSION)
    model = save_tiny_model(folder / "tiny", **SIZES)
    with serving(Vllm(folder / "log.txt", *flags, *MASKS.split(), model=model, program=PROGRAM)) as running:
        yield running


def test_training_normalizes_over_the_tokens_that_the_server_drew_from(tmp_path: Path, server: Vllm) -> None:
    """With all weights and with an adapter alone; each step begins with ratios of 1."""
    rank = 4 if "--enable-lora" in server.flags else 0
    run = made(tmp_path / "run", server.url, rank, **FILTERS)
    run.train()
    [member] = run.run.step.engine.members
    assert member.server.returns_masks
    assert (type(member.transfer) is AdapterFolder) == bool(rank)
    checks = {check.name: check for check in run.proof.checks}
    assert checks["rollout and training log-probabilities"].passed
    rows = losses(run)
    logger.info("candidates %s", [row["rollouts/candidates"] for row in rows])
    logger.info("log-probabilities apart by %s", [row["sampling/sampling_logp_difference/max"] for row in rows])
    assert len({row["loss"] for row in rows}) == 3
    for row in rows:
        assert 1 < row["rollouts/candidates"] < FILTERS["top_k"]
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        for end in ("min", "max"):
            assert row[f"sampling/importance_sampling_ratio/{end}"] == pytest.approx(1, abs=1e-4)
    compared = Compared(run)
    compared.look()  # of greedy texts, for which this server draws from one token
    assert np.isnan(compared.apart).all()

"""`use_vllm` against a real `vllm serve` on the CPU, with the built-in model. About ten minutes on one core.

    sh tests/vllm/install.sh /path/to/env
    PODIUM_VLLM=/path/to/env/bin/vllm python -m pytest tests/vllm

The tests share one server, which some of them kill: they run in the order of the file.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from podium import GRPOConfig, GRPOTrainer
from podium.data.tasks import additions
from podium.engines.vllm.connect import WORKER
from podium.engines.vllm.weights import AdapterFolder, Broadcast, Folder
from podium.errors import EngineError, ModelError
from podium.records import SamplingSettings
from podium.rewards import answer_correct, answer_format
from podium.testing import save_tiny_model
from podium.trainer.rollouts import round_prompts
from podium.trainer.rounds import RoundKey
from tests.vllm.served import Compared, greedy
from tests.vllm.serving import MODEL, OVER_GLOO, WITH_ADAPTERS, Vllm, needs_vllm, serving

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)
pytestmark = needs_vllm
START_SECONDS = 600


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with serving(Vllm(tmp_path_factory.mktemp("vllm") / "log.txt")) as server:
        yield server


def trainer(folder: Path, vllm: Vllm | None, *, model: str = MODEL, lora: bool = False, **settings: Any) -> GRPOTrainer:
    """The quickstart's task, in small steps."""
    sampling = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": vllm.url} if vllm else {}
    given = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 16,
        "temperature": 1.15,
        "learning_rate": 3e-5,
        "adam_beta2": 0.99,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "prove_first_batch": False,
        **({"vllm_server_timeout": START_SECONDS} if vllm else {}),
        **sampling,
        **settings,
    }
    peft_config = LoraConfig(r=8, target_modules="all-linear") if lora else None
    rows = Dataset.from_list(additions()[0])
    args = GRPOConfig(str(folder), **given)
    return GRPOTrainer(model, [answer_format, answer_correct], args, rows, peft_config=peft_config)


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_greedy_completions_are_the_trainers_after_each_step(vllm: Vllm, tmp_path: Path, *, lora: bool) -> None:
    """In float32 on both sides, so that a tensor that stays behind shows; an adapter is merged."""
    run = samples_as_trained(vllm, tmp_path, lora=lora)
    assert type(run.run.step.engine.members[0].transfer) is Folder


def samples_as_trained(vllm: Vllm, folder: Path, *, lora: bool, **settings: Any) -> GRPOTrainer:
    """Train for five steps, and compare greedy completions and log-probabilities with the trainer's after each."""
    run = trainer(
        folder,
        vllm,
        lora=lora,
        product_precision="float32",
        prove_first_batch=lora,
        per_device_train_batch_size=16,
        learning_rate=1e-3 if lora else 5e-5,
        max_steps=5,
        **settings,
    )
    compared = Compared(run)
    compared.look()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.rollouts.sync(run.state.global_step)
    assert all(torch.equal(before[name], p) for name, p in run.model.named_parameters())
    run.add_callback(compared)
    run.train()
    logger.info("log-probabilities apart by %s", compared.apart)
    assert len(compared.theirs) == 6
    assert len({str(ids) for ids in compared.theirs}) > 1, "the weights never changed what is sampled"
    assert max(compared.apart) < 1e-3
    logged = [row.get("sampling/sampling_logp_difference/max") for row in run.state.log_history]
    gaps = [gap for gap in logged if gap is not None]  # a step may have nothing to train on
    logger.info("sampled against trained: %s", gaps)
    assert gaps
    assert max(gaps) < 1e-3
    return run


def test_the_same_requests_give_the_same_completions(vllm: Vllm, tmp_path: Path) -> None:
    run = trainer(tmp_path, vllm)
    prompts = round_prompts(run.run, RoundKey(0, 0), range(4))
    settings = SamplingSettings(num_completions=4, max_tokens=8, end_ids=run.run.policy.end_ids, seed=3, round=1)
    first, second = (run.step.sample(prompts, settings, taken=run.state.global_step) for _ in range(2))
    assert first == second
    assert len({c.token_ids for c in first[0].completions}) > 1


def test_the_wrong_model(vllm: Vllm, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="which is another model than") as error:
        trainer(tmp_path / "run", vllm, model=save_tiny_model(tmp_path / "tiny"))
    assert "vllm serve" in str(error.value)


def test_a_server_that_is_silent(vllm: Vllm, tmp_path: Path) -> None:
    run = trainer(tmp_path, vllm)
    run.rollouts.sync(run.state.global_step)
    run.run.step.engine.members[0].server.seconds = 5.0
    vllm.send(signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"(within|for) 5 s") as error:
            run.train()
    finally:
        vllm.send(signal.SIGCONT)
    assert "vllm_server_timeout" in str(error.value)


class KillAfter(TrainerCallback):
    def __init__(self, vllm: Vllm, step: int) -> None:
        self.vllm, self.step = vllm, step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.vllm.kill()


def test_a_server_that_is_killed_and_started_again(vllm: Vllm, tmp_path: Path) -> None:
    """The run ends with its checkpoints whole, and resumes; a server started anew gets the weights again."""
    saves = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4}
    run = trainer(tmp_path, vllm, **saves)
    run.run.step.engine.members[0].server.seconds = 60.0
    run.add_callback(KillAfter(vllm, 1))
    with pytest.raises(EngineError, match="No vLLM server answers") as error:
        run.train()
    assert "--resume_from_checkpoint true" in str(error.value)
    assert (tmp_path / "checkpoint-1" / "manifest.json").is_file()
    vllm.start("bfloat16")
    run.run.step.engine.members[0].server.seconds = START_SECONDS
    groups = run.run.step.engine.generate(round_prompts(run.run, RoundKey(0, 0), range(2)), greedy(run, 4))
    assert len(groups) == 2
    assert run.run.step.engine.members[0].server.weight_version() == run.run.step.engine.version
    again = trainer(tmp_path, vllm, **saves)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    shutil.rmtree(tmp_path)


def test_an_adapter_goes_alone(tmp_path: Path) -> None:
    """The server never gets another base; each version is an adapter of its own, and the last two are in the folder."""
    with serving(Vllm(tmp_path / "log.txt", *WITH_ADAPTERS)) as server:
        run = samples_as_trained(server, tmp_path / "run", lora=True)
        [member] = run.run.step.engine.members
        assert type(member.transfer) is AdapterFolder
        assert member.server.weight_version() == "default"
        assert member.server.adapters() == [run.run.step.engine.version]
        folder = member.transfer.root / run.run.step.engine.version
        sent = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        logger.info("%.1f MB were sent for each version", sent / 1e6)
        server.kill()
        server.start("float32")  # it comes back without the adapter
        groups = run.run.step.engine.generate(round_prompts(run.run, RoundKey(0, 0), range(2)), greedy(run, 4))
        assert len(groups) == 2
        assert member.server.adapters() == [run.run.step.engine.version]


def test_all_weights_by_the_public_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, in the phases of NCCL; nothing is written, and a server that was restarted joins again."""
    pytest.importorskip("vllm", reason="the trainer's side of vLLM's interface is in its package")
    monkeypatch.syspath_prepend(WORKER)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import_module("gloo_podium_worker").register_trainer()
    with serving(Vllm(tmp_path / "log.txt", *OVER_GLOO)) as server:
        run = samples_as_trained(server, tmp_path / "run", lora=False)
        assert type(run.run.step.engine.members[0].transfer) is Broadcast
        assert not [*(tmp_path / "run").rglob("*.safetensors")]
        server.kill()
        server.start("float32")
        with torch.no_grad():
            next(run.model.parameters()).mul_(1.01)
        compared = Compared(run)
        compared.look()
        assert max(compared.apart) < 1e-3


def test_rewards_rise_as_with_the_live_engine(vllm: Vllm, tmp_path: Path) -> None:
    """Four steps in bfloat16 on both sides."""
    curves = {}
    for name, server in (("vllm", vllm), ("live", None)):
        run = trainer(tmp_path / name, server, max_steps=4)
        start = time.perf_counter()
        run.train()
        rows = [row for row in run.state.log_history if "loss" in row]
        curves[name] = [row["reward"] for row in rows]
        logger.info("%s %s in %.0f s", name, np.round(curves[name], 2).tolist(), time.perf_counter() - start)
        if server is not None:
            trained = [row for row in rows if row["sampling/sampling_logp_difference/mean"] is not None]
            gaps = [row["sampling/sampling_logp_difference/mean"] for row in trained]
            weights = [row["sampling/importance_sampling_ratio/mean"] for row in trained]
            logger.info("log-probabilities apart by %s, weights %s", np.round(gaps, 3), np.round(weights, 3))
            assert max(gaps) < 0.2
            assert all(0.8 < weight < 1.25 for weight in weights)
    last = {name: float(np.mean(curve[-2:])) for name, curve in curves.items()}
    assert all(last[name] > curves[name][0] + 0.3 for name in curves)
    assert last["vllm"] == pytest.approx(last["live"], abs=0.3)

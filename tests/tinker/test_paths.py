"""What a client of `podium tinker` may name: runs and saved weights inside of the server's folder, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from podium import GRPOConfig, Loop
from podium.errors import DataError
from podium.testing import tiny_model, tiny_tokenizer
from podium.tinker.policy import TinkerPolicy


@pytest.fixture
def policy(tmp_path: Path) -> TinkerPolicy:
    def make(rank: int) -> Loop:
        args = GRPOConfig(str(tmp_path / "out"), max_completion_length=8, report_to="none", use_cpu=True)
        lora = LoraConfig(r=rank, target_modules="all-linear")
        return Loop(tiny_model("llama"), args, processing_class=tiny_tokenizer(), peft_config=lora)

    return TinkerPolicy(["tiny"], tmp_path / "kept", make)


@pytest.mark.parametrize("session", ["../../elsewhere", "/tmp/elsewhere", "..", "a/b", ""])
def test_no_run_is_written_outside_of_the_folder(session: str, policy: TinkerPolicy, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    body: dict[str, Any] = {
        "session_id": session,
        "model_seq_id": "0/../x" if not session else 0,
        "base_model": "tiny",
        "lora_config": {"rank": 2, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
    }
    with pytest.raises(DataError):
        policy.create_model(body)
    assert sorted(tmp_path.rglob("*")) == before
    assert policy.run == "base", "the run before it goes on"


def test_a_run_of_the_client_is_begun(policy: TinkerPolicy) -> None:
    body = {"session_id": "abc", "model_seq_id": 0, "base_model": "tiny"}
    body |= {"lora_config": {"rank": 2, "train_mlp": True, "train_attn": True}, "optimizer_config": {"type": "adamw"}}
    assert policy.create_model(body) == {"model_id": "abc:train:0"}
    assert policy.info("abc:train:0")["lora_rank"] == 2
    with pytest.raises(DataError):
        policy.info("../kept/abc:train:0")


@pytest.mark.parametrize("name", ["../../x", "x/../../y", "/tmp/x", ".hidden"])
def test_no_weights_are_written_outside_of_the_folder(name: str, policy: TinkerPolicy, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError):
        policy.save_weights_for_sampler({"model_id": "base", "path": name})
    assert sorted(tmp_path.rglob("*")) == before

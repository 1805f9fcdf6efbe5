"""What a name stands for: the final model of a run, its newest checkpoint, an adapter and its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from podium.errors import ModelError
from podium.models.builtin import BUILTIN_MODELS
from podium.runs.find_model import ModelSource, find_model, load_model
from podium.testing import save_tiny_model, tiny_model


def save_adapter(folder: Path, base: str) -> Path:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    return folder


def test_a_model_folder_is_itself(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    assert find_model(folder) == ModelSource(base=folder)


def test_a_run_is_its_final_model_else_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save_tiny_model(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-11").mkdir()
    assert find_model(str(tmp_path)).base == str(tmp_path / "checkpoint-10")
    save_tiny_model(tmp_path)
    assert find_model(str(tmp_path)).base == str(tmp_path)


def test_a_run_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ModelError, match="has saved no model") as error:
        find_model(str(tmp_path))
    assert "save_steps" in error.value.fix


def test_an_adapter_is_put_on_its_base(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "run", base)
    source = find_model(str(adapter))
    assert source == ModelSource(base=base, adapter=adapter)
    model, _ = load_model(source, dtype=torch.bfloat16)
    assert not model.training
    assert any("lora_B" in name for name, _ in model.named_parameters())
    assert model.get_base_model().lm_head.weight.dtype == torch.bfloat16


def test_an_adapter_without_its_base_names_both(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "run", str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"The adapter .*run belongs to .*gone, which cannot be had: There is no"):
        find_model(str(adapter))
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(ModelError, match="does not say which model"):
        find_model(str(adapter))


def test_the_built_in_model_s_copy_is_found_in_whichever_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on another machine: the path that PEFT wrote down is not here."""
    copy = next(iter(BUILTIN_MODELS.values())).cache_folder
    here = save_tiny_model(tmp_path / "cache" / "models" / copy)
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    adapter = save_adapter(tmp_path / "run", f"/home/elsewhere/.cache/podium/models/{copy}")
    assert find_model(str(adapter)).base == here


def test_a_missing_run_is_one_request_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without network `hf_hub_download` alone tries six times, for half a minute."""
    import httpx
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ConnectError("no network", request=request)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(refuse)))
    try:
        with pytest.raises(ModelError, match="`runs/nothing` is not a folder here, and the hub cannot be reached"):
            find_model("runs/nothing")
    finally:
        set_client_factory(default_client_factory)
    assert [path for path in asked if "nothing" in path] == ["/runs/nothing/resolve/main/config.json"]

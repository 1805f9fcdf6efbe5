"""Chat templates as models ship them, those that come with TRL: text reaches the prompt, and what the check says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import chat_template_utils

import podium
from podium.data import PromptBuilder
from podium.data.prompts import apply_template
from podium.testing import save_tiny_model, tiny_tokenizer

FOLDER = Path(chat_template_utils.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 2+2?"}
TURNS = [QUESTION, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "And 2+3?"}]
REFUSE_SYSTEM = {"gemma"}
ONLY_LISTS = {"idefics3", "llava_next", "smolvlm"}
DATED = {"gptoss": "chat_template: TEXT", "llama3_2": "date_string", "muse_glimmer": "chat_template: TEXT"}
UNSTABLE = {"deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning"} | {
    f"nemotron_3_{size}" for size in ("nano", "super", "ultra")
}


def tokenizer_of(name: str) -> Any:
    tokenizer = tiny_tokenizer(chat_template=(FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", NAMES)
def test_every_message_reaches_the_prompt(name: str) -> None:
    builder = PromptBuilder(tokenizer=tokenizer_of(name), context_length=None)
    for content in (TURNS, [SYSTEM, QUESTION]):
        text = builder.rendered(content, 0)
        if content[0] is SYSTEM and name in REFUSE_SYSTEM:
            assert not isinstance(text, str)
            assert text.code == "D012"
            assert "System role not supported" in text.what
        else:
            assert isinstance(text, str)
            assert all(message["content"] in text for message in content)


@pytest.mark.parametrize("name", sorted(ONLY_LISTS))
def test_text_of_a_template_for_images_is_that_of_a_list(name: str) -> None:
    tokenizer = tokenizer_of(name)
    in_parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}]
    assert apply_template(tokenizer, [QUESTION]) == tokenizer.apply_chat_template(in_parts, tokenize=False)
    assert QUESTION["content"] not in tokenizer.apply_chat_template([QUESTION], tokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", NAMES)
def test_findings_about_templates(name: str, model: str) -> None:
    """None of them leaves out the assistant's turn; those with a date, or another text once there is an answer."""
    args = podium.GRPOConfig("out", per_device_train_batch_size=2, num_generations=2, report_to="none")
    rows = [{"prompt": [QUESTION]}]
    found = podium.check(model, lambda completions, **_: [0.0] * 2, args, rows, processing_class=tokenizer_of(name))
    codes = {finding.code: finding for finding in found if finding.code in ("M019", "M025", "M027")}
    assert set(codes) == {*["M027"] * (name in DATED), *["M019"] * (name in UNSTABLE)}
    if name in DATED:
        assert DATED[name] in codes["M027"].fix


def test_a_date_that_is_fixed_is_no_longer_reported(model: str) -> None:
    def check(**settings: Any) -> list[podium.Finding]:
        args = podium.GRPOConfig("out", per_device_train_batch_size=2, num_generations=2, **settings)
        rows, tokenizer = [{"prompt": [QUESTION]}], tokenizer_of("llama3_2")
        found = podium.check(model, lambda completions, **_: [0.0] * 2, args, rows, processing_class=tokenizer)
        return [finding for finding in found if finding.code == "M027"]

    [found] = check()
    assert check(**found.changes) == []

"""Sequence classifiers as reward functions: by name or as a module, plain and chat."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification

from podium.errors import ConfigError, ModelError, RewardError
from podium.records import Completion, Group, Prompt
from podium.rewards import RewardModel, load_reward_models, resolve_rewards, score
from podium.testing import tiny_model, tiny_tokenizer

TEXTS = ["short", "a rather longer completion", "x"]


@pytest.fixture
def classifier():
    config = tiny_model("llama").config
    config.num_labels = 1
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config).eval()


@pytest.fixture
def folder(classifier, tmp_path):
    folder = tmp_path / "tiny-judge"
    classifier.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def groups(content):
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in TEXTS
    )
    return [Group(prompt=Prompt(id=0, row=0, token_ids=(1,), text="", content=content), completions=completions)]


def one_by_one(model, texts):
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0].item()
            for text in texts
        ]


def test_plain_texts_padded_in_batches_score_as_one_by_one():
    config = tiny_model("gpt2").config  # absolute positions: padding on the left would move them
    config.num_labels = 1
    torch.manual_seed(0)
    classifier = GPT2ForSequenceClassification(config).eval()
    expected = one_by_one(classifier, ["2+2=" + text for text in TEXTS])
    assert len({round(each, 3) for each in expected}) == 3
    tokenizer = tiny_tokenizer()  # with habits that the score must not depend on
    tokenizer.padding_side = "left"
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.add_bos_token = True
    for batch_size in (1, 2, 16):
        judge = RewardModel(classifier, tokenizer, batch_size=batch_size)
        assert judge(["2+2="] * 3, TEXTS) == pytest.approx(expected, abs=1e-5)


def test_by_name_with_its_own_tokenizer_and_template(folder, classifier):
    prompt = [{"role": "user", "content": "hi"}]
    whole = [f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n" for text in TEXTS]
    (reward,) = resolve_rewards(folder)
    assert reward.name == "tiny-judge"
    assert reward.wants == {"prompts", "completions"}
    assert isinstance(reward.function.model, str), "nothing is loaded before it is needed"
    (scored,) = score(groups(prompt), [reward])
    assert scored.names_K == ("tiny-judge",)
    assert scored.rewards_GK[:, 0].tolist() == pytest.approx(one_by_one(classifier, whole), abs=1e-5)


def test_a_module_takes_the_given_tokenizer(classifier):
    bare = tiny_tokenizer()
    bare.pad_token = None
    (reward,) = resolve_rewards([classifier], [bare])
    (scored,) = score(groups("2+2="), [reward])
    assert scored.rewards_GK[:, 0].tolist() == pytest.approx(
        one_by_one(classifier, ["2+2=" + text for text in TEXTS]), abs=1e-5
    )
    assert bare.pad_token == bare.eos_token
    assert classifier.config.pad_token_id == bare.eos_token_id
    assert reward.name == "LlamaForSequenceClassification"


def test_a_wrong_name_is_said_when_models_are_loaded(tmp_path):
    rewards = resolve_rewards(str(tmp_path / "nothing-here"))
    with pytest.raises(ModelError, match=r"reward model `.*nothing-here` could not be loaded"):
        load_reward_models(rewards)
    with pytest.raises(ModelError, match="could not be loaded"):
        score(groups("a"), rewards)


def test_a_module_without_name_needs_a_tokenizer(classifier):
    with pytest.raises(ConfigError, match="reward_processing_classes"):
        load_reward_models(resolve_rewards(classifier))


def test_a_classifier_that_answers_nan_stops_the_run(classifier):
    with torch.no_grad():
        classifier.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="`LlamaForSequenceClassification` returned NaN as value 0"):
        score(groups("a"), resolve_rewards(classifier, tiny_tokenizer()))

"""Sequence classifiers as reward functions: by name or as a module, plain and chat."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification

from podium import GRPOConfig, GRPOTrainer, check
from podium.errors import ConfigError, ModelError, RewardError
from podium.records import Completion, Group, Prompt
from podium.rewards import RewardModel, library_reward, load_reward_models, resolve_rewards, score
from podium.rewards.resolve import check_reward_models
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


CHAT = [{"prompt": [{"role": "user", "content": f"{n} + 1"}], "answer": str(n + 1)} for n in range(8)]
PLAIN = [{"prompt": f"{n} + 1 = ", "answer": str(n + 1)} for n in range(8)]


def _unfit(kind, folder, classifier):
    """A reward model's folder that cannot serve, and the rows that it cannot serve for."""
    config, tokenizer = classifier.config, tiny_tokenizer()
    if kind == "causal":
        tiny_model("llama").save_pretrained(folder)
    elif kind == "two labels":
        config.num_labels = 2
        LlamaForSequenceClassification(config).save_pretrained(folder)
    elif kind == "few positions":
        config = tiny_model("gpt2").config
        config.num_labels, config.n_positions = 1, 24
        GPT2ForSequenceClassification(config).save_pretrained(folder)
    elif kind != "missing":
        classifier.save_pretrained(folder)
    if kind == "no template":
        tokenizer.chat_template = None
    if kind not in ("missing", "no tokenizer"):
        tokenizer.save_pretrained(folder)
    return str(folder), CHAT if kind == "no template" else PLAIN


UNFIT = {
    "causal": ("M013", r"`judge` is not a reward model: its weights \(LlamaForCausalLM\) have no `score.weight`"),
    "two labels": ("M013", "`judge` is not a reward model: it has 2 labels"),
    "no template": ("M004", "the prompts are conversations, and the tokenizer of reward model `judge` has no template"),
    "few positions": ("D015", "reward model `judge` reads 24 tokens, and a prompt with its completion has 264"),
    "missing": ("M001", "reward model: There is no folder"),
    "no tokenizer": ("M003", "no tokenizer files"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.defect("F5" if kind == "causal" else "F6", kind)) for kind in UNFIT],
)
def test_a_reward_model_that_cannot_score_is_refused_alike_by_check_and_train(kind, classifier, tmp_path, now):
    code, message = UNFIT[kind]
    folder, rows = _unfit(kind, tmp_path / "judge", classifier)
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 256, "report_to": []}
    args = GRPOConfig(str(tmp_path / "run"), **settings)
    found = [
        f for f in check(tiny_model("llama"), folder, args, rows, processing_class=tiny_tokenizer()) if f.code == code
    ]
    assert [f.severity for f in found] == ["error"]
    assert re.search(message, found[0].what)
    with pytest.raises(ModelError, match=message) as error:
        GRPOTrainer(tiny_model("llama"), folder, args, rows, processing_class=tiny_tokenizer())
    assert error.value.what == found[0].what
    assert found[0].fix
    now(str(error.value))


@pytest.mark.defect("F5", "from the hub, where headers cannot be read before")
def test_a_random_head_is_refused_by_what_was_loaded(tmp_path, now):
    tiny_model("llama").save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"have no `score\.weight`, which would be random") as error:
        RewardModel(str(tmp_path / "policy")).load()
    now(str(error.value))


@pytest.mark.defect("N", "a completion that is longer than the reward model's positions")
def test_a_text_beyond_the_positions_is_one_message(now):
    config = tiny_model("gpt2").config
    config.num_labels, config.n_positions = 1, 24
    model = RewardModel(GPT2ForSequenceClassification(config), tiny_tokenizer())
    with pytest.raises(ModelError, match="reads 24 tokens") as error:
        score(groups("x" * 30), resolve_rewards([model]))
    now(str(error.value))


@pytest.mark.defect("N", "a reward model inside a combination is checked too")
def test_parts_of_combinations_are_checked(tmp_path, now):
    tiny_model("llama").save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    combined = library_reward("clipped", reward=RewardModel(str(tmp_path / "policy")), low=-1, high=1)
    with pytest.raises(ModelError, match="not a reward model") as error:
        check_reward_models(resolve_rewards([combined]))
    now(str(error.value))

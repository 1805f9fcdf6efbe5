"""The live engine draws what transformers' `generate` would, and what it says of its tokens is what training sees.

Also its promise of order: a completion depends on (seed, round, prompt, completion, position), on nothing beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from podium.engines.live import engine as live
from podium.engines.live.cache import Cache
from podium.engines.live.engine import LiveEngine
from podium.models import devices
from podium.models.attention import attention_implementation, tree_attention
from podium.models.builtin import resolve_model
from podium.models.forward import token_logps
from podium.models.head import learn_head
from podium.models.lean import lean_precision
from podium.models.packing import pack, unscored
from podium.records import Group, Prompt, SamplingSettings
from podium.testing import KINDS, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = frozenset([TOKENIZER.eos_token_id])


def prompt(text: str, id: int) -> Prompt:
    return Prompt(id=id, row=id, token_ids=tuple(TOKENIZER(text)["input_ids"]), text=text, content=text)


PROMPTS = [
    prompt(text, id)
    for id, text in enumerate(
        ["2+2=", "a", "The quick brown fox jumps over the lazy dog.", "19+4=", "to be, or not to be", "7", "(((", "x=y"]
    )
]


def ids_of(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group.completions] for group in groups]


def settings(**overrides: Any) -> SamplingSettings:
    return SamplingSettings(
        **{"num_completions": 4, "max_tokens": 24, "end_ids": END, "seed": 5, "round": 3, **overrides}
    )


# ---- against generate ----


def generated(model: nn.Module, prompt: Prompt, config: GenerationConfig) -> tuple[int, ...]:
    """Greedy tokens of one prompt alone, up to its end token; `eager` is the attention that leaves nothing out."""
    ids = torch.tensor([prompt.token_ids])
    with attention_implementation(model, "eager"), torch.no_grad():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tuple(output[0, len(prompt.token_ids) :].tolist())


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize(("lean", "repetition_penalty"), [(False, 1.3), (True, 1.0), (False, 1.0), (True, 1.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind: str, repetition_penalty: float, lean: bool) -> None:
    """`lean`: with layers in place of the model's own, as on a CPU."""
    model = tiny_model(kind)
    precision = lean_precision(model, enabled=False).sampling if lean else contextlib.nullcontext
    config = GenerationConfig(
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=repetition_penalty,
        eos_token_id=sorted(END),
        pad_token_id=TOKENIZER.pad_token_id,
    )
    how = settings(num_completions=2, greedy=True, repetition_penalty=repetition_penalty)
    groups = LiveEngine(model, TOKENIZER, precision=precision, max_rows=6).generate(PROMPTS, how)
    for group in groups:
        expected = generated(model, group.prompt, config)
        assert [completion.token_ids for completion in group.completions] == [expected, expected]
        for completion in group.completions:
            assert completion.finish == ("stop" if expected[-1] in END else "length")
            assert completion.text == TOKENIZER.decode(expected, skip_special_tokens=True)


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("max_rows", [2, 6, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_a_common_beginning(kind: str, max_rows: int) -> None:
    """It is computed once for all that are admitted together, and continued by each as if it were its own."""
    beginning = "You are a calculator. Answer with the number alone, nothing else, please. "
    prompts = [prompt(beginning + text, id) for id, text in enumerate(["2+2=", "a", "What is the answer?", "19+4="])]
    model = tiny_model(kind)
    config = GenerationConfig(
        max_new_tokens=24, do_sample=False, eos_token_id=sorted(END), pad_token_id=TOKENIZER.pad_token_id
    )
    how = settings(num_completions=2, greedy=True)
    groups = LiveEngine(model, TOKENIZER, max_rows=max_rows).generate(prompts, how)
    assert ids_of(groups) == [[generated(model, p, config)] * 2 for p in prompts]


@cache
def built_in() -> tuple[nn.Module, Any]:
    folder = resolve_model("builtin:smollm2-135m-instruct")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


QUESTIONS = ("What is 7 + 5?", "Write the word blue, then stop.")


def chat_prompts(tokenizer: Any) -> list[Prompt]:
    prompts = []
    for id, text in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append(Prompt(id=id, row=id, token_ids=tuple(ids), text=text, content=messages))
    return prompts


@pytest.mark.slow
def test_greedy_tokens_of_the_built_in_model_are_those_of_generate() -> None:
    model, tokenizer = built_in()
    end = frozenset([tokenizer.eos_token_id])
    prompts = chat_prompts(tokenizer)
    groups = LiveEngine(model, tokenizer).generate(
        prompts, settings(num_completions=1, max_tokens=20, greedy=True, end_ids=end)
    )
    config = GenerationConfig(
        max_new_tokens=20, do_sample=False, eos_token_id=sorted(end), pad_token_id=tokenizer.pad_token_id
    )
    assert ids_of(groups) == [[generated(model, p, config)] for p in prompts]


# ---- against the training forward ----


def training_logps(model: nn.Module, groups: Sequence[Group], temperature: float) -> np.ndarray:
    """What training computes for the same tokens."""
    samples = [
        dataclasses.replace(
            unscored(group.prompt.token_ids, completion.token_ids),
            sampled_logps_A=np.array(completion.logps, np.float32),
        )
        for group in groups
        for completion in group.completions
    ]
    differences, head = [], learn_head(model)
    with torch.no_grad(), tree_attention(model):
        for packed in pack(samples, tokens_per_pack=4096):
            logps_N = token_logps(model, packed, temperature=temperature, head=head).logps_N
            differences.append((logps_N - packed.sampled_logps_N).abs().numpy())
    return np.concatenate(differences)


@pytest.mark.cases(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"top_k": 20, "top_p": 0.9, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_log_probabilities_are_those_of_training(kind: str, how: dict[str, Any]) -> None:
    """Also with filters: what is trained on is the whole distribution at the temperature, as in TRL."""
    model = tiny_model(kind)
    groups = LiveEngine(model, TOKENIZER, max_rows=8).generate(PROMPTS, settings(**how))
    assert training_logps(model, groups, how.get("temperature", 1.0)).max() < 1e-4


@pytest.mark.slow
def test_sampled_log_probabilities_of_the_built_in_model_are_those_of_training() -> None:
    model, tokenizer = built_in()
    end = frozenset([tokenizer.eos_token_id])
    groups = LiveEngine(model, tokenizer).generate(chat_prompts(tokenizer), settings(max_tokens=16, end_ids=end))
    assert training_logps(model, groups, 1.0).max() < 1e-4


def test_an_adapter_is_sampled_from_and_dropout_is_not() -> None:
    model = tiny_model("qwen3")
    before = ids_of(LiveEngine(model, TOKENIZER).generate(PROMPTS, settings()))
    config = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = get_peft_model(model, config)
    policy.train()
    groups = LiveEngine(policy, TOKENIZER).generate(PROMPTS, settings())
    assert all(module.training for module in policy.modules() if isinstance(module, nn.Dropout))
    policy.eval()
    assert training_logps(policy, groups, 1.0).max() < 1e-4
    assert ids_of(groups) != before


def test_it_samples_from_the_weights_of_this_moment() -> None:
    model = tiny_model("llama")
    engine = LiveEngine(model, TOKENIZER)
    engine.generate(PROMPTS, settings())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert training_logps(model, engine.generate(PROMPTS, settings()), 1.0).max() < 1e-4


# ---- a completion depends on nothing beside it ----


def divergences(a: Sequence[Group], b: Sequence[Group]) -> tuple[int, int]:
    """Completions that part, and the tokens compared up to there."""
    parted = compared = 0
    for one, other in zip(a, b, strict=True):
        assert one.prompt == other.prompt
        for x, y in zip(one.completions, other.completions, strict=True):
            same = next(
                (t for t, pair in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if pair[0] != pair[1]), None
            )
            parted += same is not None or len(x.token_ids) != len(y.token_ids)
            compared += len(x.token_ids) if same is None else same + 1
    return parted, compared


@contextlib.contextmanager
def prefill_of(tokens: int) -> Iterator[None]:
    before, live.PREFILL_TOKENS = live.PREFILL_TOKENS, tokens
    try:
        yield
    finally:
        live.PREFILL_TOKENS = before


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "num_prompts"), [("gemma2", 3), ("gemma2", 5), ("llama", 16)])
def test_a_completion_does_not_depend_on_its_company(kind: str, num_prompts: int) -> None:
    """Tokens are equal but where rounding puts a draw on an edge: fewer than one in 10,000."""
    model = tiny_model(kind)
    texts = np.random.default_rng(0)
    prompts = [
        prompt("".join(chr(c) for c in texts.integers(97, 123, texts.integers(1, 40))), id) for id in range(num_prompts)
    ]
    how = settings(num_completions=16, max_tokens=60)
    alone = [LiveEngine(model, TOKENIZER).generate([p], how)[0] for p in prompts]
    together = LiveEngine(model, TOKENIZER, max_rows=512).generate(prompts, how)
    waiting = LiveEngine(model, TOKENIZER, max_rows=40).generate(prompts, how)
    backwards = LiveEngine(model, TOKENIZER).generate(prompts[::-1], how)[::-1]
    with prefill_of(50):
        piecewise = LiveEngine(model, TOKENIZER).generate(prompts, how)
    parted, compared = np.sum(
        [divergences(alone, other) for other in (together, waiting, backwards, piecewise)], axis=0
    )
    assert compared > 2_000 * num_prompts
    assert parted < compared / 10_000
    assert 0.05 < np.mean([c.finish == "stop" for group in together for c in group.completions]) < 0.95


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [{"repetition_penalty": 1.2}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}], ids=str)
def test_company_does_not_matter_with_filters_either(how: dict[str, Any]) -> None:
    model = tiny_model("mistral")
    alone = [LiveEngine(model, TOKENIZER).generate([p], settings(**how))[0] for p in PROMPTS]
    assert ids_of(LiveEngine(model, TOKENIZER, max_rows=8).generate(PROMPTS, settings(**how))) == ids_of(alone)


HOW = [{}, {"repetition_penalty": 1.2, "top_p": 0.9}, {"lengths": lambda p, g: 3 + (p + g) % 5}]


@pytest.mark.cases(2)
@pytest.mark.parametrize("how", HOW, ids=["plain", "filtered", "lengths"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_drawn_from_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, rows: int, how: dict[str, Any]) -> None:
    model = tiny_model("llama")
    expected = LiveEngine(model, TOKENIZER).generate(PROMPTS, settings(**how))
    monkeypatch.setitem(
        devices.KINDS, "cpu", dataclasses.replace(devices.KINDS["cpu"], drawn_bytes=rows * 4 * len(TOKENIZER))
    )
    assert LiveEngine(model, TOKENIZER).generate(PROMPTS, settings(**how)) == expected


def test_completions_that_are_alike_so_far_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy ones never part; sampled ones do, and each row is computed for all that have said the same."""
    rows: list[int] = []
    decode = live.Decode

    def counting(cache: Any, slots_R: np.ndarray, *rest: Any) -> Any:
        rows.append(len(slots_R))
        return decode(cache, slots_R, *rest)

    monkeypatch.setattr(live, "Decode", counting)
    model = tiny_model("llama")
    LiveEngine(model, TOKENIZER).generate(PROMPTS, settings(greedy=True, max_tokens=5))
    assert max(rows) <= len(PROMPTS)
    rows.clear()
    groups = LiveEngine(model, TOKENIZER).generate(PROMPTS, settings(temperature=0.3, max_tokens=5))
    stems = [
        {completion.token_ids[:n] for completion in group.completions if len(completion.token_ids) > n}
        for n in range(1, 5)
        for group in groups
    ]
    assert sum(rows) == sum(map(len, stems)) < sum(len(c.token_ids) - 1 for group in groups for c in group.completions)


def test_lanes_end_with_the_completion_and_grow_in_steps_beyond() -> None:
    cache = Cache(max_rows=4, max_tokens=16)
    assert [cache.room(tokens, torch.device("cpu")) for tokens in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, 64]


def test_fewer_completions_are_the_first_ones() -> None:
    """Random numbers are keyed by the completion's number, so the first two of four are the two."""
    engine = LiveEngine(tiny_model("llama"), TOKENIZER)
    four = ids_of(engine.generate(PROMPTS, settings()))
    assert ids_of(engine.generate(PROMPTS, settings(num_completions=2))) == [group[:2] for group in four]


@pytest.mark.cases(1)
@pytest.mark.parametrize("other", [{"round": 4}, {"seed": 6}])
def test_another_seed_or_round_draws_other_tokens(other: dict[str, int]) -> None:
    engine = LiveEngine(tiny_model("llama"), TOKENIZER)
    first = engine.generate(PROMPTS, settings())
    assert ids_of(first) == ids_of(engine.generate(PROMPTS, settings())), "the same again for the same key"
    second = engine.generate(PROMPTS, settings(**other))
    same = [x == y for a, b in zip(ids_of(first), ids_of(second), strict=True) for x, y in zip(a, b, strict=True)]
    assert np.mean(same) < 0.2


def test_prompts_of_one_text_are_told_apart_by_their_id() -> None:
    engine = LiveEngine(tiny_model("llama"), TOKENIZER)
    first, second = ids_of(engine.generate([prompt("2+2=", 0), prompt("2+2=", 1)], settings()))
    assert first != second


def test_torchs_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    LiveEngine(tiny_model("llama"), TOKENIZER).generate(PROMPTS, settings())
    assert torch.equal(before, torch.get_rng_state())


# ---- edges ----


def test_one_token_no_prompts_and_a_prompt_longer_than_a_prefill() -> None:
    engine = LiveEngine(tiny_model("llama"), TOKENIZER, max_rows=4)
    assert engine.generate([], settings()) == []
    groups = engine.generate(PROMPTS, settings(max_tokens=1))
    assert {len(completion.token_ids) for group in groups for completion in group.completions} == {1}
    expected = ids_of(engine.generate(PROMPTS, settings()))
    with prefill_of(3):
        assert ids_of(engine.generate(PROMPTS, settings())) == expected


@pytest.mark.cases(2)
@pytest.mark.parametrize("max_tokens", [1, 2, 24])
def test_an_end_token_ends_and_stays(max_tokens: int) -> None:
    """Any of the end ids ends a completion, also as its first token and as the last one there is room for."""
    ends = frozenset(range(4, 264, 3))
    groups = LiveEngine(tiny_model("llama"), TOKENIZER, max_rows=8).generate(
        PROMPTS, settings(end_ids=ends, max_tokens=max_tokens)
    )
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        stopped = completion.token_ids[-1] in ends
        assert completion.finish == ("stop" if stopped else "length")
        assert not ends & set(completion.token_ids[:-1])
        assert len(completion.logps) == len(completion.token_ids)
        assert stopped or len(completion.token_ids) == max_tokens
    assert any(len(completion.token_ids) == 1 for completion in completions)


def test_pad_and_end_may_share_an_id() -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    groups = LiveEngine(tiny_model("llama"), tokenizer).generate(PROMPTS, settings(max_tokens=100))
    ended = [c for group in groups for c in group.completions if c.finish == "stop"]
    assert ended
    assert all(c.token_ids[-1] == tokenizer.eos_token_id for c in ended)

"""TRL's own methods and ours call reward functions alike, tokenize prompts alike, and get the same numbers."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
import trl.rewards
from trl.trainer.utils import get_callable_name, start_event_loop_in_daemon

from podium.data import PromptBuilder
from podium.records import Completion, Group
from podium.rewards import LIBRARY, resolve_rewards, score
from podium.testing import tiny_tokenizer

STATE = SimpleNamespace(global_step=5)
TEXTS = [["<answer>7</answer>", "seven", "7"], [r"\boxed{8}", r"<think>so</think> \boxed{8}", ""]]
ROWS = {
    "plain": [{"prompt": "3+4=", "answer": "7", "solution": "7"}, {"prompt": "4+4=", "answer": "8", "solution": "8"}],
    "chat": [
        {"prompt": [{"role": "user", "content": "3+4?"}], "answer": "7", "solution": "7", "completion": "x"},
        {
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "4+4?"}],
            "answer": "8",
            "solution": "8",
            "completion": "y",
        },
    ],
}


def ids(index: int, g: int) -> tuple[int, ...]:
    """Token ids of completion g: of different lengths, and with repetitions."""
    return (*[index + 3] * (g + 1), 2)


@pytest.fixture(params=["plain", "chat"])
def rows(request):
    return ROWS[request.param]


@pytest.fixture
def groups(rows):
    builder = PromptBuilder(tokenizer=tiny_tokenizer())
    return [
        Group(
            prompt=builder(row, id=index, row_index=index),
            completions=tuple(
                Completion(token_ids=ids(index, g), logps=(0.0,) * (g + 2), finish="stop", text=text, policy_step=0)
                for g, text in enumerate(texts)
            ),
        )
        for index, (row, texts) in enumerate(zip(rows, TEXTS, strict=True))
    ]


@pytest.fixture
def trl_rewards(rows):
    """Rewards as TRL's own method computes them, from what its `_generate` would give."""
    loops = []

    def compute(functions, processing_classes=None):
        inputs = [row for row, texts in zip(rows, TEXTS, strict=True) for _ in texts]
        chat = not isinstance(rows[0]["prompt"], str)
        texts = [text for group in TEXTS for text in group]
        completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        completion_ids = [list(ids(index, g)) for index, group in enumerate(TEXTS) for g in range(len(group))]
        thread, loop, ready = start_event_loop_in_daemon()
        ready.wait()
        loops.append((thread, loop))
        stand_in = SimpleNamespace(
            accelerator=SimpleNamespace(device="cpu", is_main_process=True),
            args=SimpleNamespace(report_to=[]),
            reward_funcs=functions,
            reward_func_names=[get_callable_name(each) for each in functions],
            reward_processing_classes=processing_classes or [None] * len(functions),
            chat_template_kwargs={},
            environments=None,
            state=STATE,
            async_loop=loop,
            _log_completion_extra=lambda column, values: None,
            _log_metric=lambda name, value: None,
        )
        # `super()._prepare_inputs` in there only moves tensors to the device.
        unbound = trl.GRPOTrainer._calculate_rewards
        return unbound(stand_in, inputs, [each["prompt"] for each in inputs], completions, completion_ids).numpy()

    yield compute
    for thread, loop in loops:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)


def ours(groups, functions):
    scored = score(groups, resolve_rewards(functions), trainer_state=STATE)
    return np.concatenate([each.rewards_GK for each in scored])


@pytest.mark.versions
def test_the_same_arguments(groups, trl_rewards):
    calls = []

    def spy(**kwargs):
        calls.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    trl_rewards([spy])
    ours(groups, [spy])
    theirs, mine = calls
    assert set(theirs) == set(mine)
    for name in set(theirs) - {"log_extra", "log_metric"}:
        assert theirs[name] == mine[name], name


@pytest.mark.versions
def test_the_same_numbers(groups, trl_rewards):
    def length(completion_ids, answer, **kwargs):
        return [len(ids) + float(gold) for ids, gold in zip(completion_ids, answer, strict=True)]

    async def some(prompts, **kwargs):
        return [None if index % 2 else np.float32(index) for index, _ in enumerate(prompts)]

    def scaled(completions, factor, **kwargs):
        return torch.arange(len(completions)) * factor

    functions = [length, some, functools.partial(scaled, factor=0.5)]
    np.testing.assert_array_equal(trl_rewards(functions), ours(groups, functions))


@pytest.mark.parametrize("rows", ["chat"], indirect=True)  # TRL's rewards read nothing else
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("accuracy_reward", None),
        ("reasoning_accuracy_reward", None),
        ("think_format_reward", None),
        ("get_cosine_scaled_reward", {"max_len": 6}),
        ("get_soft_overlong_punishment", {"max_completion_len": 4, "soft_punish_cache": 2}),
        ("get_repetition_penalty_reward", {"ngram_size": 1}),
    ],
)
def test_trls_rewards_under_their_names(groups, trl_rewards, name, settings):
    theirs, mine = getattr(trl.rewards, name), LIBRARY[name]
    if settings is not None:
        theirs, mine = theirs(**settings), mine(**settings)
    expected = trl_rewards([theirs])
    assert len(np.unique(expected)) > 1  # else this test shows nothing
    np.testing.assert_allclose(ours(groups, [mine]), expected)
    assert [each.name for each in resolve_rewards(mine)] == [get_callable_name(theirs)]


def test_the_same_prompt_tokens(rows):
    tokenizer = tiny_tokenizer()
    stand_in = SimpleNamespace(
        processing_class=tokenizer,
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
        _is_vlm=False,
        environment_factories=None,
    )
    expected, _, _ = trl.GRPOTrainer._tokenize_prompts(stand_in, [row["prompt"] for row in rows])
    builder = PromptBuilder(tokenizer=tokenizer)
    assert [list(builder(row, id=0, row_index=0).token_ids) for row in rows] == [list(ids) for ids in expected]

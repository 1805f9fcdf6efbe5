"""Fixtures every test may use: the tiny tokenizer and a factory of tiny models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from podium.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a ChatML template."""
    return tiny_tokenizer()


@pytest.fixture
def tiny_llama() -> Callable[..., PreTrainedModel]:
    """`tiny_llama(**overrides)`: a fresh two-layer Llama."""
    return lambda **overrides: tiny_model("llama", **overrides)

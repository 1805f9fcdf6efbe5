"""On-policy distillation: a token's advantage is also how much likelier a teacher finds it than the policy does.

    A_it = A_i + teacher_coef * (log pi_teacher(token) - log pi(token))

On completions of the policy itself, this is the gradient of the reverse KL divergence from the teacher, token by token
(Agarwal et al., arXiv:2306.13649). The teacher is another model, an earlier checkpoint, or the policy itself, which
then sees another prompt: the column `teacher_prompt` of a row, such as one with a worked solution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from podium.errors import ConfigError, DataError
from podium.models import loading
from podium.models.forward import Forward, choose_path
from podium.records import Prompt, TrainingGroup
from podium.runs.find_model import ModelSource, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.data.prompts import PromptBuilder
    from podium.trainer.config import GRPOConfig

POLICY = "policy"
"""As `teacher_model`: the policy itself."""
PROMPT = "teacher_prompt"
"""The column with the prompt that the teacher sees in place of the row's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The model that completions are compared with, and the weight of the comparison."""

    model: nn.Module | None
    """None: the policy itself."""
    coef: float
    forward: Forward
    """Settings of its forward passes."""


def find_teacher(args: GRPOConfig, tokenizer: PreTrainedTokenizerBase, settings: loading.LoadSettings) -> ModelSource:
    """The place of the teacher's weights, which are not loaded.

    Raises:
        ConfigError: its tokenizer makes other ids, so that it cannot judge the policy's tokens.
        ModelError: there is no model of that name.
    """
    assert args.teacher_model is not None
    source = find_model(args.teacher_model)
    theirs = loading.load_tokenizer(source.tokenizer, None, settings).get_vocab()
    ours = tokenizer.get_vocab()
    differing = [token for token in sorted(theirs.keys() | ours.keys()) if theirs.get(token) != ours.get(token)]
    if differing:
        raise ConfigError(
            "C063.other_tokenizer",
            teacher=args.teacher_model,
            count=len(differing),
            token=differing[0],
            theirs=theirs.get(differing[0], "none"),
            ours=ours.get(differing[0], "none"),
        )
    return source


def load_teacher(args: GRPOConfig, source: ModelSource | None, policy: Forward, load: loading.LoadSettings) -> Teacher:
    """The teacher with its weights, frozen, on the device that trains. `source`: None for the policy itself."""
    if source is None:
        return Teacher(model=None, coef=args.teacher_coef, forward=policy)
    kwargs = {name: value for name, value in load.init_kwargs.items() if name != "revision"}
    settings = replace(load, init_kwargs=kwargs, peft_config=None, quantization_config=None)
    model = loading.load_to_sample(source.base, source.adapter, settings)
    model.eval().requires_grad_(False).to(args.device)
    return Teacher(model=model, coef=args.teacher_coef, forward=replace(policy, path=choose_path(model)[0]))


def teachers_prompt(prompt: Prompt, builder: PromptBuilder) -> tuple[int, ...]:
    """Token ids of the prompt that the teacher sees: of the row's `teacher_prompt`, or its own.

    Raises:
        DataError: a `teacher_prompt` that cannot be rendered, or is too long.
    """
    content = prompt.columns.get(PROMPT)
    if content is None:
        return prompt.token_ids
    made = builder({"prompt": content}, id=prompt.id, row_index=prompt.row)
    if made is None:
        raise DataError("C063.long_prompt", row=prompt.row)
    return made.token_ids


def check_prompts(args: GRPOConfig, rows: Iterable[Mapping[str, Any]], builder: PromptBuilder) -> None:
    """Render every `teacher_prompt` of the rows, before weights are loaded.

    Raises:
        ConfigError: the policy is its own teacher, and no row shows it another prompt: it would say nothing.
        DataError: as in `teachers_prompt`.
    """
    found = False
    for i, row in enumerate(rows):
        if row.get(PROMPT) is not None:
            found = True
            teachers_prompt(Prompt(id=i, row=i, token_ids=(), text="", content="", columns=row), builder)
    if args.teacher_model == POLICY and not found:
        raise ConfigError("C063.same_prompt")


def as_teacher_sees(group: TrainingGroup, prompt_ids: tuple[int, ...]) -> TrainingGroup:
    """The group behind the teacher's prompt; completions with prompts of their own keep them."""
    return group if group.prompts is not None else replace(group, prompt_ids=prompt_ids)


def distilled(
    group: TrainingGroup, own: Sequence[np.ndarray], teachers: Sequence[np.ndarray], coef: float
) -> TrainingGroup:
    """The group with an advantage for each token.

    Args:
        group: with the advantages of its completions, or of their turns.
        own: log-probabilities of the drawn tokens under the policy that drew them, by completion.
        teachers: the same under the teacher.
        coef: weight of the difference.
    """
    before = group.token_advantages or [np.full(len(x), a) for x, a in zip(own, group.advantages_G, strict=True)]
    found = (a + coef * (t - x) for a, x, t in zip(before, own, teachers, strict=True))
    return replace(group, token_advantages=tuple(each.astype(np.float32) for each in found))

"""On-policy distillation: a token's advantage is also how much likelier a teacher finds it than the policy does.

    A_it = A_i + teacher_coef * (log pi_teacher(token) - log pi(token))

On completions of the policy itself, this is the gradient of the reverse KL divergence from the teacher, token by token
(Agarwal et al., arXiv:2306.13649). The teacher is another model, here or behind a vLLM server, an earlier checkpoint,
or the policy itself, which then sees another prompt: the column `teacher_prompt` of a row, such as one with a worked
solution. One number for each token is all that is asked of it, so no vocabulary of probabilities is moved or kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from podium.data.images import COLUMNS, has_images
from podium.engines.table import ServedTeacher, served_teacher
from podium.errors import ConfigError, DataError, ModelError
from podium.models import loading
from podium.models.forward import Forward, choose_method
from podium.records import Prompt, Sample
from podium.runs.find_model import ModelSource, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.data.prompts import PromptBuilder
    from podium.trainer.config import GRPOConfig

logger = logging.getLogger(__name__)

POLICY = "policy"
"""As `teacher_model`: the policy itself."""
PROMPT = "teacher_prompt"
"""The column with the prompt that the teacher sees in place of the row's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The model that completions are compared with, and the weight of the comparison."""

    model: nn.Module | None
    """None: the policy itself, or a server."""
    served: ServedTeacher | None
    coef: float
    """Weight of the comparison at the first step."""
    last_coef: float
    """At the last; in between it lies on the straight line."""
    forward: Forward | None
    """Settings of its forward passes; None: those of the policy."""

    def coef_at(self, step: int, max_steps: int) -> float:
        """The weight after `step` of `max_steps` optimizer steps."""
        return self.coef + (self.last_coef - self.coef) * step / max(max_steps - 1, 1)


def find_teacher(
    args: GRPOConfig, tokenizer: PreTrainedTokenizerBase, settings: loading.LoadSettings
) -> ModelSource | ServedTeacher:
    """The place of the teacher's weights, which are not loaded, or its server.

    Raises:
        ConfigError: its tokenizer makes other ids, so that it cannot judge the policy's tokens; no server answers.
        ModelError: there is no model of that name.
    """
    assert args.teacher_model is not None
    source: ModelSource | ServedTeacher
    if args.teacher_model.startswith(("http://", "https://")):
        source = served_teacher(args.teacher_model)
        place = source.root
    else:
        source = find_model(args.teacher_model)
        place = source.tokenizer
    try:
        theirs = loading.load_tokenizer(place, None, settings).get_vocab()
    except ModelError:
        if isinstance(source, ModelSource):
            raise
        unread = (
            "%s serves %s, whose tokenizer cannot be read here: that it makes the ids of this policy is not checked."
        )
        logger.warning(unread, args.teacher_model, place)
        return source
    ours = tokenizer.get_vocab()
    differing = [token for token in sorted(theirs.keys() | ours.keys()) if theirs.get(token) != ours.get(token)]
    if differing:
        shown_theirs = theirs.get(differing[0], "none")
        shown_ours = ours.get(differing[0], "none")
        raise ConfigError(
            f"{args.teacher_model}, the teacher, has another tokenizer: {len(differing)} tokens have other "
            f"ids, as {differing[0]!r} (there {shown_theirs}, here {shown_ours}). It cannot judge the "
            "tokens of this policy.",
            code="C063",
            fix="teacher_model: a model of the same family, whose tokenizer makes the same ids",
            settings=("teacher_model",),
            teacher=args.teacher_model,
            count=len(differing),
            token=differing[0],
            theirs=shown_theirs,
            ours=shown_ours,
        )
    return source


def load_teacher(
    args: GRPOConfig,
    source: ModelSource | ServedTeacher | None,
    policy: Forward,
    load: loading.LoadSettings,
    example: Prompt | None = None,
) -> Teacher:
    """The teacher with its weights, frozen, on the device that trains.

    `source`: None for the policy itself; `example`: a prompt with images, if there are some.
    """
    last_coef = args.teacher_coef if args.teacher_coef_end is None else args.teacher_coef_end
    served = None if isinstance(source, ModelSource) else source
    teacher = Teacher(model=None, served=served, coef=args.teacher_coef, last_coef=last_coef, forward=None)
    if not isinstance(source, ModelSource):
        return teacher
    kwargs = {name: value for name, value in load.init_kwargs.items() if name != "revision"}
    settings = replace(load, init_kwargs=kwargs, peft_config=None, quantization_config=None)
    model = loading.load_to_sample(source.base, source.adapter, settings)
    model.eval().requires_grad_(False).to(args.device)
    method = choose_method(model, example)
    return replace(teacher, model=model, forward=replace(policy, path=method.path, head=method.head))


def teachers_prompt(prompt: Prompt, builder: PromptBuilder) -> Prompt:
    """The prompt that the teacher sees: the row's `teacher_prompt` with the images of the row, or its own.

    Raises:
        DataError: a `teacher_prompt` that cannot be rendered, or is too long.
    """
    if (content := prompt.columns.get(PROMPT)) is None:
        return prompt
    images = {name: prompt.columns[name] for name in COLUMNS if name in prompt.columns}
    if (made := builder({**images, "prompt": content}, id=prompt.id, row_index=prompt.row)) is None:
        raise DataError(
            f"row {prompt.row}: its teacher_prompt does not fit into the model's context.",
            code="C063",
            fix="Shorten it, or leave the row out.",
            row=prompt.row,
        )
    return made


def checked_teacher(
    args: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    load: loading.LoadSettings,
    rows: Iterable[Mapping[str, Any]] | None,
    builder: PromptBuilder | None,
) -> ModelSource | ServedTeacher | None:
    """The teacher's place, None for the policy itself, with every prompt that it will see rendered.

    Args:
        args: with a `teacher_model`.
        tokenizer: the policy's.
        load: settings of loading a model.
        rows: of the training set; None where they cannot be read beforehand, and their prompts are not looked at.
        builder: of their prompts.

    Raises:
        ConfigError, ModelError: as `find_teacher`; ConfigError where the policy is its own teacher and no row shows it
            another prompt, so that it would say nothing, or where a rollout is longer than what the teacher reads.
        DataError: as in `teachers_prompt`.
    """
    source = None if args.teacher_model == POLICY else find_teacher(args, tokenizer, load)
    if rows is None or builder is None:
        return source
    reads = _positions(source, load)
    is_short = reads is not None and (builder.context_length is None or reads < builder.context_length)
    found = False
    longest = 0
    for i, row in enumerate(rows):
        if source is not None and has_images(row) and not _reads_images(source, load):
            raise ConfigError(
                f"row {i} has images, and {args.teacher_model}, the teacher, is shown text alone.",
                code="C063",
                fix="teacher_model: policy, or the weights of a model that reads images as the policy does",
                settings=("teacher_model",),
            )
        own = row.get(PROMPT)
        found |= own is not None
        if own is not None or (is_short and row.get("prompt")):
            seen = {**row, PROMPT: row.get("prompt") if own is None else own}
            prompt = Prompt(id=i, row=i, token_ids=(), text="", content="", columns=seen)
            longest = max(longest, len(teachers_prompt(prompt, builder).token_ids))
    if args.teacher_model == POLICY and not found:
        raise ConfigError(
            "teacher_model: policy compares the policy with itself, and no row has a teacher_prompt: the "
            "difference is always 0.",
            code="C063",
            fix="give the rows a column teacher_prompt, such as the prompt with a worked solution, or name "
            "another teacher_model",
            settings=("teacher_model",),
        )
    if reads is not None and is_short and longest + args.max_completion_length > reads:
        raise ConfigError(
            f"teacher_model: {args.teacher_model} reads {reads:,} tokens at most, and a rollout may have "
            f"{longest:,} of its prompt and {args.max_completion_length:,} of its completion.",
            code="C063",
            fix="a shorter max_completion_length, shorter prompts, or a teacher that reads more",
            settings=("teacher_model", "max_completion_length"),
            args=args,
            positions=reads,
            longest=longest,
        )
    return source


def _reads_images(source: ModelSource | ServedTeacher, load: loading.LoadSettings) -> bool:
    """Whether a teacher is shown images: a server is sent tokens."""
    if not isinstance(source, ModelSource):
        return False
    return hasattr(loading.load_config(source.base, replace(load, init_kwargs={})), "image_token_id")


def _positions(source: ModelSource | ServedTeacher | None, load: loading.LoadSettings) -> int | None:
    """The tokens that a teacher with weights of its own reads at most; None: not said."""
    if not isinstance(source, ModelSource):
        return None
    return loading.context_length(loading.load_config(source.base, replace(load, init_kwargs={})))


def as_teacher_sees(samples: Sequence[Sample], prompts: Mapping[int, Prompt]) -> list[Sample]:
    """The samples behind the teacher's prompts, by places of the round; where prompts differ within a group, each keeps
    its own."""
    own: dict[int, set[tuple[int, ...]]] = {}
    for sample in samples:
        own.setdefault(sample.rollout[0], set()).add(sample.prompt_ids)
    return [
        _behind(prompts[sample.rollout[0]], sample) if len(own[sample.rollout[0]]) == 1 else sample
        for sample in samples
    ]


def _behind(prompt: Prompt, sample: Sample) -> Sample:
    """The sample behind another prompt, with the images of that prompt and those that were given after its own."""
    length = len(sample.prompt_ids)
    moved = len(prompt.token_ids) - length
    given = [replace(images, start=images.start + moved) for images in sample.images if images.start >= length]
    return replace(sample, prompt_ids=prompt.token_ids, images=(*prompt.images, *given))


def distilled(sample: Sample, own_A: np.ndarray, teacher_A: np.ndarray, coef: float) -> Sample:
    """The sample with what the teacher adds to the advantage of each token.

    Args:
        sample: with the advantages of its completion, or of its turns.
        own_A: log-probabilities of the drawn tokens under the policy that drew them.
        teacher_A: the same under the teacher.
        coef: weight of the difference.
    """
    return replace(sample, advantages_A=(sample.advantages_A + coef * (teacher_A - own_A)).astype(np.float32))

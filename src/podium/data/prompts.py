"""Dataset rows become prompts: chat template, token ids, length limits, the columns for the reward functions.

    builder = PromptBuilder(tokenizer=tokenizer, context_length=8192, max_completion_length=512)
    prompt = builder({"prompt": "2+2=", "answer": "4"}, id=0, row_index=0)

What is rendered is what TRL's GRPO renders, but for one case: a conversation that ends with an assistant turn is
continued, where TRL closes that turn and opens another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from podium.data.row import check_row, no_template, problems_text, row_problem, text_of
from podium.errors import ConfigError, DataError, Finding
from podium.records import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "drop", "truncate"]
"""Treatment of a prompt that is too long: stop, leave the row out, or keep its last tokens."""

NOT_PASSED_ON = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that reward functions do not get, as in TRL."""


ROOM = {"max_prompt_length": "takes it", "max_completion_length": "makes room for it"}
"""Settings that admit a prompt over the limit, and what a message says of each."""

OVERLONG = {"drop": "leaves such rows out", "truncate": "keeps their last tokens"}
"""Values of `overlong_prompts` with which a prompt over the limit stops no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Makes a `Prompt` of a dataset row.

    A list of messages goes through the tokenizer's chat template, a string is tokenized as it is (with the special
    tokens the tokenizer adds by itself). Raises `DataError` for a row that cannot be used.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """To every `apply_chat_template`. A row's own `chat_template_kwargs` is an ordinary column, as in TRL's GRPO."""
    tools: Sequence[Any] = ()
    """Tools rendered into every conversation (see `schema_of`): they lengthen each prompt."""
    template: str | None = None
    """Chat template to render with in place of the tokenizer's and that of `chat_template_kwargs`."""
    max_prompt_length: int | None = None
    """In tokens; None: only the context limits."""
    overlong: Overlong = "error"
    context_length: int | None = None
    """Positions the model has; None: unknown."""
    max_completion_length: int | None = None
    """Tokens to be kept free for the completion."""
    vocabulary: int | None = None
    """Rows of the model's embedding; None: unknown."""
    name: str = "train_dataset"
    """Name of the dataset in messages."""

    def __post_init__(self) -> None:
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ConfigError(
                f"max_prompt_length is {self.max_prompt_length}; it must be at least 1, or None.",
                code="C016",
                changes={"max_prompt_length": None},
                settings=("max_prompt_length",),
                max_prompt_length=self.max_prompt_length,
            )
        if self.context_room is not None and self.context_room < 1:
            what = (
                f"max_completion_length {self.max_completion_length} leaves no room for a prompt: the model has "
                f"{self.context_length} positions for prompt and completion together."
            )
            raise ConfigError(what, code="D015", fix=f"Set max_completion_length under {self.context_length}.")

    def __call__(
        self,
        row: Mapping[str, Any],
        id: int,
        row_index: int,
        tools: Sequence[Any] | None = None,
        *,
        checked: bool = False,
    ) -> Prompt | None:
        """The row as a prompt; None where it is too long and dropped. Raises `DataError` for a row of no use.

        Args:
            row: with a `prompt`.
            id: number of the prompt in its round.
            row_index: position in the dataset; -1 in a stream.
            tools: those of the row's environment, in place of the builder's own; described in the prompt, they are
                text enough where its messages have none.
            checked: whether `check_row` has found nothing in this very row, as the survey before training does.
        """
        problem = None if checked else check_row(row, row_index, chat_template=self.chat_template)
        if problem is not None and problem.code == "D003" and tools and not isinstance(row["prompt"], str):
            problem = None
        text = problem or self.rendered(row["prompt"], row_index, tools)
        if isinstance(text, Finding):
            raise DataError(problems_text(self.name, [text]), code=text.code)
        content = row["prompt"]
        token_ids = self.tokenizer(text, add_special_tokens=isinstance(content, str))["input_ids"]
        if not token_ids:
            raise DataError(problems_text(self.name, [no_tokens(row_index)]), code="D002")
        if self.limit is not None and len(token_ids) > self.limit:
            if self.overlong == "error":
                what = f"the prompt has {len(token_ids)} tokens, but {self.limit_text}"
                long = row_problem("D014", row_index, what, self.cure(len(token_ids)))
                raise DataError(problems_text(self.name, [long]))
            if self.overlong == "drop":
                return None
            token_ids = token_ids[-self.limit :]
            text = str(self.tokenizer.decode(token_ids))
        if self.vocabulary is not None and max(token_ids) >= self.vocabulary:
            unknown = self.without_embedding(max(token_ids), row_index)
            raise DataError(problems_text(self.name, [unknown]), code=unknown.code)
        return Prompt(
            id=id,
            row=row_index,
            token_ids=tuple(token_ids),
            text=text,
            content=content if isinstance(content, str) else list(content),
            columns={key: value for key, value in row.items() if key not in NOT_PASSED_ON},
        )

    @property
    def chat_template(self) -> str | None:
        template = self.template or self.chat_template_kwargs.get("chat_template")
        template = template or getattr(self.tokenizer, "chat_template", None)
        return template if template is None or isinstance(template, str) else str(template)

    @property
    def settings(self) -> tuple[object, ...]:
        """All that lengths and errors of prompts depend on; equal for two builders that make the same prompts."""
        tokenizer = (type(self.tokenizer), self.tokenizer.name_or_path, self.chat_template)
        rendered = (repr(sorted(self.chat_template_kwargs.items())), repr([schema_of(tool) for tool in self.tools]))
        return (*tokenizer, *rendered, self.limit, self.overlong, self.vocabulary)

    @property
    def lacks_rows(self) -> bool:
        """Whether the tokenizer has tokens for which the model's embedding has no row."""
        return self.vocabulary is not None and len(self.tokenizer) > self.vocabulary

    def without_embedding(self, token: int, row_index: int) -> Finding:
        """The finding for a prompt with a token that is beyond the rows of the model's embedding."""
        what = (
            f"the prompt has token {token} (`{self.tokenizer.convert_ids_to_tokens(token)}`), and the model's "
            f"embedding has {self.vocabulary:,} rows"
        )
        return row_problem("M007", row_index, what, "take the model's own tokenizer, or leave such rows out")

    @property
    def context_room(self) -> int | None:
        """Prompt tokens that fit before the longest completion; None: unknown."""
        return None if self.context_length is None else self.context_length - (self.max_completion_length or 0)

    @property
    def limit(self) -> int | None:
        """Most tokens a prompt may have; None: any number."""
        limits = [limit for limit in (self.max_prompt_length, self.context_room) if limit is not None]
        return min(limits, default=None)

    @property
    def limit_text(self) -> str:
        if self.limit != self.context_room:
            return f"max_prompt_length is {self.limit}"
        less = f"max_completion_length {self.max_completion_length or 0}"
        return f"the context of {self.context_length} tokens less {less} leaves {self.limit} for the prompt"

    def tokenized(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Token ids of many rendered prompts, each with whether it is plain, in one call of the tokenizer."""
        token_ids: list[list[int]] = [[] for _ in texts]
        for special in (True, False):  # a template writes the special tokens itself
            if chosen := [i for i, (_, is_plain) in enumerate(texts) if is_plain is special]:
                encoded = self.tokenizer([texts[i][0] for i in chosen], add_special_tokens=special)["input_ids"]
                for i, own in zip(chosen, encoded, strict=True):
                    token_ids[i] = own
        return token_ids

    def rendered(
        self, content: str | Sequence[Message], row_index: int, tools: Sequence[Any] | None = None
    ) -> str | Finding:
        """The text whose tokens are the prompt's; a Finding where there is no chat template, or it refuses."""
        if isinstance(content, str):
            return content
        if self.chat_template is None:
            return no_template(row_index)
        continued = content[-1]["role"] == "assistant"
        turn = {"add_generation_prompt": not continued, "continue_final_message": continued}
        settings = {**turn, **self.chat_template_kwargs}
        tools = self.tools if tools is None else tools
        try:
            return apply_template(self.tokenizer, content, tools, self.template, settings)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            what = f"the chat template refused the conversation: {error}"
            fix = (
                "look at the roles: many templates want user and assistant to take turns, and a system message only "
                "first"
            )
            return row_problem("D012", row_index, what, fix)

    def may_exceed(self, text: str) -> bool:
        """Whether a rendered prompt may have more tokens than the limit, without counting them."""
        return self.limit is not None and most_tokens(text) + SPECIAL_TOKENS > self.limit

    def cure(self, num_tokens: int) -> str:
        """Settings with which a prompt of `num_tokens` tokens does not stop the run."""
        ways = (f'overlong_prompts="{word}" {what}' for word, what in OVERLONG.items())
        return "; ".join(filter(None, [self.wider(num_tokens), ", ".join(ways)]))

    def wider(self, num_tokens: int) -> str:
        """The argument that makes room for a prompt of `num_tokens` tokens; empty: the model has no room for it."""
        name, value = self.room_for(num_tokens) or ("", 0)
        return f"{name}={value} {ROOM[name]}" if name else ""

    def room_for(self, num_tokens: int) -> tuple[str, int] | None:
        """The setting that makes room for a prompt of `num_tokens` tokens; None: the model has no room for it."""
        room = self.context_room
        if self.max_prompt_length is not None and (room is None or num_tokens <= room):
            return "max_prompt_length", num_tokens
        if self.context_length is not None and num_tokens < self.context_length:
            return "max_completion_length", self.context_length - num_tokens
        return None


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    template: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a conversation, by `apply_chat_template`.

    An empty list of tools becomes None: some templates (Llama) render their instructions for tools even for `[]`.
    Contents that are lists become text: most templates raise for them, or leave them out. Some of models with images
    (SmolVLM, Idefics3, LLaVA-NeXT) do the reverse, and leave out text that is no list; they get lists.

    Args:
        tokenizer: with a chat template, or `template` is given.
        messages: the conversation.
        tools: schemas, or what `schema_of` makes them of.
        template: in place of the tokenizer's; None: its own.
        settings: of `apply_chat_template`.
    """
    chosen = {} if template is None else {"chat_template": template}
    plain = [m if isinstance(m.get("content"), str | None) else {**m, "content": _as_text(m)} for m in messages]
    contents = [m["content"].strip() for m in plain if (m.get("content") or "").strip()]
    how = {**settings, **chosen, "tools": [schema_of(tool) for tool in tools] or None, "tokenize": False}
    results: list[str | Exception] = []
    for takes_parts in (False, True):
        form: list[Message] = plain
        if takes_parts:
            form = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m for m in plain
            ]
        try:
            text = str(tokenizer.apply_chat_template(form, **how))
        except Exception as error:  # noqa: BLE001  a template can raise anything
            results.append(error)
            continue
        if not contents or any(content in text for content in contents):
            return text
        results.append(text)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _as_text(message: Message) -> str:
    """The text of parts of text; a list of other things, as a tool may return it, as Python writes it."""
    content = message["content"]
    return text_of(message) if all(isinstance(part, Mapping) and "text" in part for part in content) else str(content)


def schema_of(tool: Any) -> dict[str, Any]:
    """The JSON schema of a tool: a schema itself, an object with a `schema`, or a documented function."""
    tool = getattr(tool, "schema", tool)
    if isinstance(tool, Mapping):
        return dict(tool)
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


SPECIAL_TOKENS = 8
"""An upper limit of the tokens that a tokenizer puts around a text."""


def most_tokens(text: str) -> int:
    """An upper limit of the tokens of a text: its bytes.

    >>> most_tokens("2+2="), most_tokens("\u00e9")
    (4, 4)
    """
    return len(text) if text.isascii() else 4 * len(text)


def no_tokens(row_index: int) -> Finding:
    """A prompt of which the tokenizer makes no token."""
    return row_problem("D002", row_index, "the tokenizer made no token of the prompt", "leave the row out")

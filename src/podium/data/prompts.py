"""Dataset rows become prompts: what is wrong with a row, chat template, token ids, length limits.

    builder = PromptBuilder(tokenizer=tokenizer, context_length=8192, max_completion_length=512)
    prompt = builder({"prompt": "2+2=", "answer": "4"}, id=0, row_index=0)

What is rendered is what TRL's GRPO renders, but for one case: a conversation that ends with an assistant turn is
continued, where TRL closes that turn and opens another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from podium.data.columns import QUESTIONS, RESERVED, likely, names_or_none
from podium.data.images import (
    ImageReader,
    has_images,
    image_blocks,
    image_column,
    image_values,
    opened,
    placed,
    with_blocks,
)
from podium.errors import ConfigError, DataError, Finding, ModelError
from podium.errors.texts import did_you_mean, quoted
from podium.records import GivenImages, Message, Prompt, content_of

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


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Known to the templates of common models. A role that the chat template itself names is accepted too."""

_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_LISTED = 20  # problems written out in one message; the rest is counted

UNWRITTEN = frozenset({"D001", "D003", "D005"})
"""Codes of problems that a row has where an environment is to write its prompt."""

LEAVE_OUT = "leave such rows out, for example with `dataset.filter(...)`"
TEXT_ONLY = "take a model that reads images, or remove them; a column of something else needs a name other than `image`"

AS_CONVERSATION = (
    'write the prompt as [{"role": "user", "content": text}], in a recipe by `chat: true`: the images are put before '
    "the text"
)

SPELLED = 'take it out: images are put before the text, or where its content has {"type": "image"}'

SPECIAL_TOKENS = 8
"""An upper limit of the tokens that a tokenizer puts around a text."""


# ---- a row as a prompt ----


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
    images: ImageReader | None = None
    """Reads the images of rows that have some; None: the model takes text alone."""
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
        if problem is not None:
            raise DataError(problems_text(self.name, [problem]), code=problem.code)
        row = self.with_images(row, row_index)
        text, token_ids, images = self._encoded(row, row_index, tools)
        content = row["prompt"]
        if not token_ids:
            raise DataError(problems_text(self.name, [no_tokens(row_index)]), code="D002")
        if self.limit is not None and len(token_ids) > self.limit:
            if self.overlong == "error":
                what = f"the prompt has {len(token_ids)} tokens, but {self.limit_text}"
                long = row_problem("D014", row_index, what, self.cure(len(token_ids), images=images is not None))
                raise DataError(problems_text(self.name, [long]))
            if self.overlong == "drop":
                return None
            if images is not None:
                raise DataError(problems_text(self.name, [self.uncut(len(token_ids), row_index)]), code="D014")
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
            images=() if images is None else (replace(images, prompt=(id, row_index)),),
        )

    def _encoded(
        self, row: Mapping[str, Any], row_index: int, tools: Sequence[Any] | None
    ) -> tuple[str, list[int], GivenImages | None]:
        """Text, token ids and images of a row whose images are opened. Raises `DataError`."""
        content = row["prompt"]
        if has_images(row):
            token_ids, images = self.read_images(content, row_index, tools)
            first = int(images.placeholders[0])
            stands_for = {*images.placeholders}
            behind = [token for i, token in enumerate(token_ids) if i > first and i not in stands_for]
            mark = f"[image {images.digest.hex()[:8]}]"  # tells rows apart in records and findings
            marked = f"{self.tokenizer.decode(token_ids[:first])}{mark}{self.tokenizer.decode(behind)}"
            return marked, token_ids, images
        text = self.rendered(content, row_index, tools)
        if isinstance(text, Finding):
            raise DataError(problems_text(self.name, [text]), code=text.code)
        return text, self.tokenizer(text, add_special_tokens=isinstance(content, str))["input_ids"], None

    def with_images(self, row: Mapping[str, Any], row_index: int) -> Mapping[str, Any]:
        """The row with its images opened, in their columns and in its prompt; itself without any. Raises `DataError`.

        The error has a finding for each image that cannot be read.
        """
        if not has_images(row):
            return row
        if self.images is None:
            raise self._refused("D036", row_index, "the row has images, and the model reads text alone", TEXT_ONLY)
        if isinstance(row["prompt"], str):
            raise self._refused("D063", row_index, "the prompt is a text, and the row has images", AS_CONVERSATION)
        if token := self.spelled(row["prompt"]):
            what = f"the text has `{token}`, which stands for an image"
            raise self._refused("D063", row_index, what, SPELLED)
        problems: list[Finding] = []

        def read(value: Any, which: str) -> Any:
            try:
                return opened(value, which)
            except DataError as error:
                problems.append(row_problem(error.code, row_index, error.what, error.fix))
                return None

        images = [read(value, f"image {number}") for number, value in enumerate(image_values(row), start=1)]
        messages = with_blocks(row["prompt"], lambda value, number: read(value, f"the image in message {number}"))
        if problems:
            raise DataError(problems_text(self.name, problems), code=problems[0].code, findings=problems)
        try:
            found = {**row, "prompt": placed(messages, images)}
        except DataError as error:
            raise self._refused(error.code, row_index, error.what, error.fix) from None
        if (column := image_column(row)) is not None:
            found[column] = images if column == "images" else images[0]
        return found

    def spelled(self, content: str | Sequence[Message]) -> str:
        """The token that stands for an image, where the text of a prompt spells it; empty: it does not."""
        token = None if self.images is None else self.tokenizer.convert_ids_to_tokens(self.images.placeholder)
        texts = [content] if isinstance(content, str) else map(text_of, content)
        return token if token and any(token in text for text in texts) else ""

    def read_images(
        self, messages: Sequence[Message], row_index: int, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], GivenImages]:
        """Token ids and images of a conversation whose images are in its blocks. Raises `DataError`."""
        assert self.images is not None, "`with_images` refuses the row"
        settings = {**self.turn(messages), **self.chat_template_kwargs}
        settings["tools"] = [schema_of(tool) for tool in (self.tools if tools is None else tools)] or None
        if self.template is not None:
            settings["chat_template"] = self.template
        try:
            token_ids, images = self.images(messages, settings)
        except ModelError as error:
            raise self._refused("D036", row_index, f"the row has images, and {error.what}", error.fix) from error
        except Exception as error:  # the processor of each family fails in its own way
            said = quoted(error) or type(error).__name__
            what = f"the processor refused the conversation with its images: {said}"
            fix = "look at the roles and at the sizes of the images, or leave the row out"
            raise self._refused("D063", row_index, what, fix) from error
        if not len(images.placeholders):
            what = "the chat template leaves the images out: no token stands for them"
            raise self._refused("D063", row_index, what, "take the chat template that comes with the model's processor")
        pictures = tuple(block["image"] for message in messages for block in image_blocks(message))
        return token_ids, replace(images, pictures=pictures)

    def _refused(self, code: str, row_index: int, what: str, fix: str) -> DataError:
        problem = row_problem(code, row_index, what, fix)
        return DataError(problems_text(self.name, [problem]), code=code, findings=[problem])

    def uncut(self, num_tokens: int, row_index: int) -> Finding:
        """The finding for a prompt that is too long and cannot be cut, since it has images."""
        what = f"the prompt has {num_tokens} tokens, but {self.limit_text}, and one with images is not cut"
        return row_problem("D014", row_index, what, self.cure(num_tokens, images=True))

    @staticmethod
    def turn(content: Sequence[Message]) -> dict[str, bool]:
        """Settings of `apply_chat_template`: another turn begins, or that of the assistant goes on."""
        continued = content[-1]["role"] == "assistant"
        return {"add_generation_prompt": not continued, "continue_final_message": continued}

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
        settings = {**self.turn(content), **self.chat_template_kwargs}
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

    def cure(self, num_tokens: int, *, images: bool = False) -> str:
        """Settings with which a prompt of `num_tokens` tokens does not stop the run; one with images is not cut."""
        ways = (f'overlong_prompts="{word}" {what}' for word, what in OVERLONG.items() if not images or word == "drop")
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
    """The text of parts of text, with a mark for each image; a list of other things as Python writes it."""
    content = message["content"]
    if not all(isinstance(part, Mapping) and ("text" in part or "image" in part) for part in content):
        return str(content)
    return content_of(message) if image_blocks(message) else text_of(message)


def schema_of(tool: Any) -> dict[str, Any]:
    """The JSON schema of a tool: a schema itself, an object with a `schema`, or a documented function."""
    tool = getattr(tool, "schema", tool)
    if isinstance(tool, Mapping):
        return dict(tool)
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts that a tokenizer recognises in any text as tokens, and leaves out when it decodes; the longest first.

    >>> from podium.testing import tiny_tokenizer
    >>> special_tokens(tiny_tokenizer())
    ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|pad|>')
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special and len(token.content) > 1}
    return tuple(sorted(sorted(names), key=len, reverse=True))


def most_tokens(text: str) -> int:
    """An upper limit of the tokens of a text: its bytes.

    >>> most_tokens("2+2="), most_tokens("\u00e9")
    (4, 4)
    """
    return len(text) if text.isascii() else 4 * len(text)


def no_tokens(row_index: int) -> Finding:
    """A prompt of which the tokenizer makes no token."""
    return row_problem("D002", row_index, "the tokenizer made no token of the prompt", "leave the row out")


# ---- problems of one row ----


def check_row(row: Any, index: int, *, chat_template: str | None = None) -> Finding | None:
    """The problem of one row's prompt, or None. A role that `chat_template` names is accepted."""
    if not isinstance(row, Mapping):
        return row_problem("D006", index, f"the row is {shown(row)}", 'a row is a dict: {"prompt": ...}')
    if "prompt" not in row:
        fix = rename(row) if likely(list(row))[0] in (*QUESTIONS, *RESERVED) else LEAVE_OUT
        return row_problem("D001", index, f"no `prompt`; the row has {names_or_none(row)}", fix)
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return _check_text(prompt, index)
    if isinstance(prompt, (list, tuple)):
        return _check_conversation(prompt, index, chat_template)
    if prompt is None:
        return row_problem("D005", index, "prompt is null", LEAVE_OUT)
    fix = "a prompt is a string or a list of messages"
    if isinstance(prompt, Mapping):
        fix = f"{fix}; put the message into a list"
    return row_problem("D006", index, f"prompt is {shown(prompt)}", fix)


def no_template(row: int) -> Finding:
    """Chat rows, and a tokenizer without a chat template."""
    fix = (
        "use an instruct model, or set `tokenizer.chat_template` (that of the instruct model of the same family fits) "
        "and pass the tokenizer as `processing_class`, or write the prompts as plain strings"
    )
    return row_problem("M004", row, "the prompt is a conversation, but the tokenizer has no chat template", fix)


def _check_text(text: str, index: int) -> Finding | None:
    if not text:
        return row_problem("D002", index, "prompt is empty", LEAVE_OUT)
    if text.isspace():
        return row_problem("D003", index, "prompt is only whitespace", LEAVE_OUT)
    return _surrogate(text, index, "the prompt")


def _surrogate(text: str, index: int, where: str) -> Finding | None:
    """Half of a character, as a cut through UTF-16 leaves it: no tokenizer takes it."""
    if text.isascii() or (found := _SURROGATE.search(text)) is None:
        return None
    what = f"{where} has half a character (U+{ord(found[0]):04X}) at offset {found.start()}, which is not text"
    return row_problem("D033", index, what, LEAVE_OUT)


def _check_conversation(messages: Sequence[Any], index: int, chat_template: str | None) -> Finding | None:
    if not messages:
        return row_problem("D007", index, "the conversation has no messages", LEAVE_OUT)
    for number, message in enumerate(messages, start=1):
        if problem := _check_message(message, chat_template):
            code, what, fix = problem
            return row_problem(code, index, f"message {number}{what}", fix)
    if not any(text_of(message).strip() or image_blocks(message) for message in messages):
        return row_problem("D003", index, "the conversation has no text in any message", LEAVE_OUT)
    texts = ((n, text_of(m)) for n, m in enumerate(messages, start=1))
    return next((bad for n, text in texts if (bad := _surrogate(text, index, f"message {n}"))), None)


def _check_message(message: Any, chat_template: str | None) -> tuple[str, str, str] | None:
    """Code, what and fix of the first thing wrong with a message."""
    shape = 'a message is {"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        return "D009", f" is {shown(message)}", shape
    if message.get("role") is None:
        cure = "; rename `from` to `role` and `value` to `content`" if "from" in message else ""
        cure += ", and `human` to `user`, `gpt` to `assistant`" if message.get("from") in ("human", "gpt") else ""
        return "D009", f": `role` missing; it has {names_or_none(message)}", shape + cure
    role = message["role"]
    if role not in ROLES and not any(f"{mark}{role}{mark}" in (chat_template or "") for mark in "'\""):
        return "D010", f': unknown role "{role}"', f"roles are {', '.join(ROLES)}. {did_you_mean(role, ROLES)}".rstrip()
    if role == "assistant" and message.get("tool_calls"):
        return None
    return _check_content(message, shape)


def _check_content(message: Mapping[str, Any], shape: str) -> tuple[str, str, str] | None:
    role = f" ({message['role']})"
    if "content" not in message:
        return "D009", f"{role}: `content` missing; it has {names_or_none(message)}", shape
    content = message["content"]
    if content is None:
        return "D008", f"{role}: content is null", LEAVE_OUT
    if isinstance(content, str):
        return None
    is_parts = isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and (part.get("type") != "text" or isinstance(part.get("text"), str))
        for part in content
    )
    if not is_parts:
        return "D009", f"{role}: content is {shown(content)}", shape
    kinds = {str(part.get("type")) for part in content} - {"text", "image"}
    fix = "prompts are of text and images: leave the row out, or take these parts out of it"
    return ("D036", f"{role}: content of type {', '.join(sorted(kinds))}", fix) if kinds else None


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text; parts of text are joined.

    >>> text_of({"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]})
    '1+1'
    """
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


def row_problem(code: str, row: int | None, what: str, fix: str) -> Finding:
    """An error of one row; None: of the dataset."""
    where = "" if row is None else f"row {row}: "
    return Finding(code=code, severity="error", what=where + what, fix=fix, facts={"leave_out": fix == LEAVE_OUT})


def problems_text(name: str, findings: Sequence[Finding]) -> str:
    """One message of many problems; each fix is written once.

    >>> print(problems_text("train_dataset", [row_problem("D005", 8, "prompt is null", "drop it")]))
    train_dataset, row 8: prompt is null [D005]
      fix: drop it
    """
    if len(findings) == 1:
        lines = [f"{name}, {findings[0].what} [{findings[0].code}]"]
    else:
        lines = [f"{name} has {len(findings)} problems:"]
        lines += [f"  {finding.what} [{finding.code}]" for finding in findings[:MAX_LISTED]]
        if len(findings) > MAX_LISTED:
            lines.append(f"  and {len(findings) - MAX_LISTED} more")
    codes_by_fix: dict[str, dict[str, None]] = {}
    for finding in findings[:MAX_LISTED]:
        if finding.fix:
            codes_by_fix.setdefault(finding.fix, {})[finding.code] = None
    coded = len(codes_by_fix) > 1
    for fix, codes in codes_by_fix.items():
        lines.append(f"  fix{' (' + ', '.join(codes) + ')' if coded else ''}: {fix}")
    return "\n".join(lines)


def rename(columns: Iterable[str], name: str = "dataset") -> str:
    """The call that gives the column with the question the name `prompt`."""
    question, answer = likely(list(columns))
    renamed = {question: "prompt", **({answer: "answer"} if answer in RESERVED else {})}
    name = name if name.isidentifier() else "dataset"
    one = (
        f'rename_column("{question}", "prompt")'
        if len(renamed) == 1
        else f"rename_columns({renamed})".replace("'", '"')
    )
    return f"GRPO needs a column `prompt`: {name} = {name}.{one}"


def shown(value: Any) -> str:
    """A value for a message, with its type."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"

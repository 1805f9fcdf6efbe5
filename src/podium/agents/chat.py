"""The tokens of a conversation between the policy's turns: prompts with tools, parsed turns, suffixes.

    chat = tool_format(tokenizer, {}, needs_tools=True)
    message = chat.parse(drawn, prefix=prompt_ids, tools=schemas)
    next_ids = prompt_ids + drawn + chat.suffix([{"role": "tool", "name": "add", "content": "3"}], last=drawn[-1])

Drawn tokens are never decoded and encoded again: a turn is parsed for its message, and the text of the template after
the turn (the separator, the replies, the header of the next turn) is appended to the tokens as they were drawn.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from podium.data.images import image_blocks
from podium.data.prompts import apply_template, schema_of
from podium.errors import ConfigError
from podium.errors.texts import as_line
from podium.models.turns import parse_turn, parses_turns
from podium.records import GivenImages, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.models.images import ImageProcessor

logger = logging.getLogger(__name__)

TOOL_TEMPLATE = "builtin:tools"
"""As `chat_template_kwargs: {chat_template: ...}`: Podium's tool template, for tokenizers with ChatML's tokens."""

_TEMPLATES = files("podium.agents") / "templates"
_SYSTEM = "You are a helpful assistant."
_SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_MARK = "TURN-OF-THE-ASSISTANT"
_BREAK = "␞⁂␞"
"""In a given text, where its tokens are cut; characters that neither `repr` nor JSON escapes."""
_MOST_CHARACTERS = 8
"""Characters a token at which the first look at a long text begins; most texts have about 4."""
_CUT_TOKENS = 512
"""More tokens than a word can have that ends where such a look ends, over those that it has as a whole."""
_REFUSED = (TemplateError, ValueError, TypeError, KeyError)
"""The errors of a chat template that cannot render a conversation."""


class TooManyTokens(Exception):
    """A text has more tokens than there is room for; it was not looked at to its end."""


class TemplateDifference(NamedTuple):
    """The first token at which a stream is not the template's rendering of its messages."""

    position: int
    """In the stream; its length, where the rendering goes on."""
    streamed: str
    """Text of the stream from there; empty: it has ended."""
    rendered: str
    """Text of the template from there."""
    same_text: bool
    """Whether the texts are equal but for the closing of the last turn: only the division into tokens differs."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The chat template of a run and the parser of its turns."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None
    """To render with in place of the tokenizer's; None: its own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """To every `apply_chat_template`."""
    images: ImageProcessor | None = None
    """None: the model reads text alone."""

    @property
    def parses(self) -> bool:
        """Whether the tokenizer has a response template: calls and reasoning are parsed, else a turn is its text."""
        return parses_turns(self.tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), **settings: Any) -> str:
        """The text of a conversation. `settings`: arguments of `apply_chat_template`.

        Raises:
            jinja2.TemplateError, ValueError, TypeError: the template refuses the conversation.
        """
        settings = {**self.template_kwargs, **settings}
        if self.images is None or not any(image_blocks(message) for message in messages):
            return apply_template(self.tokenizer, messages, tools, self.chat_template, settings)
        settings["tools"] = [schema_of(tool) for tool in tools] or None
        settings.setdefault("chat_template", self.chat_template or self.images.load().chat_template)
        return str(self.tokenizer.apply_chat_template([*map(_in_blocks, messages)], **settings, tokenize=False))

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The token ids of rendered text, in which the template has written the special tokens.

        Raises:
            TooManyTokens: see `bounded`.
        """

        def encoded(text: str) -> list[int]:
            parts = [self.tokenizer(part, add_special_tokens=False, verbose=False) for part in text.split(_BREAK)]
            return [id for part in parts for id in part["input_ids"]]

        return bounded(encoded, text.encode("utf-8", "replace").decode(), most)  # halves of surrogate pairs

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, most: int | None = None
    ) -> tuple[list[int], tuple[GivenImages, ...]]:
        """The token ids and images of a conversation that a program has sent, up to the header of the next turn.

        Special tokens in its texts are text: a program repeats what tools and models have written.

        Raises:
            jinja2.TemplateError, ValueError, TypeError: the template refuses the conversation.
            TooManyTokens: see `bounded`.
        """
        text = self.render([self._as_text(message) for message in messages], tools, add_generation_prompt=True)
        return self._encode_with_images(text, messages, most)

    def _encode_with_images(
        self, text: str, messages: Sequence[Message], most: int | None
    ) -> tuple[list[int], tuple[GivenImages, ...]]:
        """Token ids of a rendered conversation, and the images of its messages, each where it is in the text.

        Raises:
            ConfigError: the template leaves some out.
            TooManyTokens: see `bounded`.
        """
        images = [block.get("image") for message in messages for block in image_blocks(message)]
        if self.images is None or not images:
            return self.encode(text, most), ()
        first, *others = text.split(self._image_text) if self._image_text else [text]
        if len(others) != len(images):
            raise _unusable(f"The chat template writes {len(others)} of {len(images)} images.")
        ids = self.encode(first, most)
        found = []
        for image, behind in zip(images, others, strict=True):
            own, given = self.images.encoded(self._image_text, image)
            found.append(replace(given, start=len(ids)))
            ids += own + self.encode(behind, most)
        return ids, tuple(found)

    @cached_property
    def _image_text(self) -> str:
        """The text that the chat template writes for an image; empty: none."""
        block = {"type": "text", "text": _MARK}
        shown = self.render([{"role": "user", "content": [{"type": "image"}, block]}], add_generation_prompt=True)
        plain = self.render([{"role": "user", "content": _MARK}], add_generation_prompt=True)
        pairs = zip(shown, plain, strict=False)
        begin = next(i for i, (one, other) in enumerate(pairs) if one != other or shown.startswith(_MARK, i))
        return shown[begin : shown.find(_MARK)].strip()

    def _as_text(self, value: Any) -> Any:
        """A given message, or a content, with a mark in every special token, at which `encode` cuts: whoever writes
        the result of a tool could else end a turn and open another."""
        if isinstance(value, Mapping):
            return {name: item if name == "role" else self._as_text(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._as_text(item) for item in value]
        if isinstance(value, str):
            value = value.replace(_BREAK, "\ufffd")
            for token in (token for token in self._special.values() if len(token) > 1 and token in value):
                value = value.replace(token, f"{token[0]}{_BREAK}{token[1:]}")
        return value

    def parse(self, token_ids: Sequence[int], *, prefix: Sequence[int], tools: Sequence[Any] = ()) -> Message:
        """The message of a drawn turn: see `models.turns.parse_turn`. `tools`: see `data.prompts.schema_of`."""
        return parse_turn(self.tokenizer, token_ids, prefix=prefix, schemas=[schema_of(tool) for tool in tools])

    def suffix(
        self, replies: Sequence[Message], *, last: int, most: int | None = None
    ) -> tuple[tuple[int, ...], tuple[GivenImages, ...]]:
        """Token ids to append to a drawn turn: the rest of the turn's closing, the replies, the next turn's header; and
        the images among them.

        The template's end token is among them unless `last`, the last token drawn, is one of its end tokens. Rendered
        is a short conversation in place of the real one, as in TRL: earlier turns stand in the stream as they are.

        Args:
            replies: tool messages in the order of the calls, or a user message.
            last: the last token of the drawn turn.
            most: tokens that there is room for; None: any number.

        Raises:
            ConfigError: the template does not keep the end of a turn when replies follow.
            TooManyTokens: see `bounded`.
        """
        given = replies
        replies = [self._as_text(reply) for reply in replies]
        turn: Message = {"role": "assistant", "content": _MARK}
        if replies[0]["role"] == "tool":
            # The name is the real one: GPT-OSS writes it into the header of the reply. One call: Llama refuses several.
            call = {"type": "function", "function": {"name": replies[0]["name"], "arguments": {}}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        before: list[Message] = [{"role": "user", "content": "dummy"}, turn]
        closed = self.render(before, add_generation_prompt=False)
        answered = self.render([*before, *replies], add_generation_prompt=True)
        mark = closed[: len(closed) - len(self._closing(closed))] if "tool_calls" in turn else _MARK
        at = answered.find(mark) + len(mark)
        head = self.encode(answered[:at])
        ids, images = self._encode_with_images(answered, given, None if most is None else len(head) + most + 1)
        if mark not in answered or ids[: len(head)] != head:
            what = "Unexpected tokenization: the chat template renders a turn otherwise when replies follow it."
            raise _unusable(what)
        rest = ids[len(head) :]
        ends = {rest[0], self.encode(closed[closed.find(mark) + len(mark) :] or answered[at:])[0]}
        begin = len(head) + (last in ends)
        return tuple(ids[begin:]), tuple(replace(x, start=x.start - begin) for x in images)

    def first_difference(
        self, stream_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> TemplateDifference | None:
        """The first difference of a sampled stream from the template's own rendering of its parsed messages.

        A stream that ends with its last turn's content is complete, with any end token or without one: templates may
        write more behind it.

        Args:
            stream_ids: prompt and completion, drawn and given tokens.
            messages: of the prompt and of the completion.
            tools: rendered into the prompt.
        """
        stream = list(stream_ids)
        is_drawn = messages[-1]["role"] == "assistant"
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        later = [message if message["role"] == "assistant" else self._as_text(message) for message in messages[first:]]
        text = self.render([*messages[:first], *later], tools, add_generation_prompt=not is_drawn)
        rendered = self.encode(text)
        pairs = zip(stream, rendered, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(stream), len(rendered)))
        closing = len(self.encode(self._closing(text))) if is_drawn else 0
        has_end = is_drawn and stream[-1] in self._special
        if at >= len(stream) - has_end and at >= len(rendered) - closing:
            return None
        texts = [str(self.tokenizer.decode(ids)) for ids in (stream[at:], rendered[at:])]
        ours = stream[: len(stream) - has_end]
        theirs = rendered[: len(rendered) - closing]
        same = bool(self.tokenizer.decode(ours) == self.tokenizer.decode(theirs))
        return TemplateDifference(at, texts[0], texts[1], same)

    def _closing(self, text: str) -> str:
        """The end token of a rendered conversation, and the white space behind it."""
        stripped = text.rstrip()
        end = next((token for token in self._special.values() if stripped.endswith(token)), "")
        return text[len(stripped) - len(end) :]

    @cached_property
    def _special(self) -> dict[int, str]:
        """Texts of the special tokens, and of the one that stands for images, by their ids."""
        placeholder = -1 if self.images is None else self.images.placeholder
        added = self.tokenizer.added_tokens_decoder.items()
        return {id: str(token) for id, token in added if token.special or id == placeholder}


def _in_blocks(message: Message) -> Message:
    """A message whose content is a list of blocks, as TRL has all messages where there are images."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def bounded(encode: Callable[[str], list[int]], text: str, most: int | None) -> list[int]:
    """The token ids of a text; of a long one no more is encoded than shows that they are too many.

    Raises:
        TooManyTokens: a part of the text has more than `most` already; None: any number is right.
    """
    if most is not None:
        size = _MOST_CHARACTERS * (most + _CUT_TOKENS)
        while size < len(text):
            if len(encode(text[:size])) > most + _CUT_TOKENS:
                raise TooManyTokens
            size *= 2
    return encode(text)


def tool_format(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], *, needs_tools: bool
) -> ChatFormat:
    """The format of a run's conversations, verified as TRL does, before any weights are loaded.

    With tools a tokenizer without a response template gets the one that TRL stores for its chat template, and
    SmolLM2's tokenizer gets Podium's tool template. A template that renders earlier turns otherwise once others follow
    is replaced for rendering by TRL's training template; the tokenizer keeps its own.

    Args:
        tokenizer: gets the templates that it lacks.
        template_kwargs: `chat_template_kwargs`. Podium's tool template is taken out of it and given to the tokenizer,
            so that it is saved with the model.
        needs_tools: whether there are tools or environments.

    Raises:
        ConfigError: the chat template cannot render calls and their results, or nothing parses its calls.
    """
    kwargs = with_named_template(template_kwargs)
    if kwargs.get("chat_template") == tool_template():
        del kwargs["chat_template"]
        set_tool_template(tokenizer)
    if not needs_tools:
        return ChatFormat(tokenizer=tokenizer, template_kwargs=kwargs)
    if not hasattr(tokenizer, "get_response_parser"):
        raise ConfigError(
            "Tools and environments need transformers 5.13 or later.", code="C052", fix="pip install -U transformers"
        )
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    own = kwargs.get("chat_template")
    if own is None and not _renders_tools(tokenizer) and _SMOLLM in str(tokenizer.chat_template):
        set_tool_template(tokenizer, _SMOLLM)
    shown = copy.copy(tokenizer)  # TRL's helpers look at the tokenizer's template alone
    shown.chat_template = own or tokenizer.chat_template
    if not _renders_tools(shown):
        raise _unusable(
            "The provided chat template does not support tool calling. The template must be able to render a full "
            "tool-calling conversation (user -> assistant with tool_calls -> tool)."
        )
    if not parses_turns(tokenizer):
        tokenizer.response_template = _response_template(shown)
    try:
        replaced = None if is_chat_template_prefix_preserving(shown) else get_training_chat_template(shown)
        chat = ChatFormat(tokenizer=tokenizer, chat_template=replaced, template_kwargs=kwargs)
        chat.suffix([{"role": "tool", "name": "dummy", "content": "dummy"}], last=-1)
    except _REFUSED as error:
        raise error if isinstance(error, ConfigError) else _unusable(str(error)) from error
    return chat


def tool_template(system: str = _SYSTEM) -> str:
    """Podium's tool template. `system`: the system message of conversations that have none.

    Without tools it renders what SmolLM2's own template does. With tools the system message also has their schemas and
    a call of the first one as an example; `tool_example: false` in `chat_template_kwargs` leaves the example out.
    """
    return (_TEMPLATES / "tools.jinja").read_text(encoding="utf-8").replace(_SYSTEM, system)


def with_named_template(template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` with the text of the chat template where `builtin:tools` stands for it."""
    named = template_kwargs.get("chat_template") == TOOL_TEMPLATE
    return {**template_kwargs, **({"chat_template": tool_template()} if named else {})}


def set_tool_template(tokenizer: PreTrainedTokenizerBase, system: str = _SYSTEM) -> None:
    """Give a tokenizer with ChatML's tokens Podium's tool template and its response template, and say so.

    Raises:
        ConfigError: the tokenizer lacks `<|im_start|>` or `<|im_end|>`.
    """
    give_tool_template(tokenizer, system)
    # Not that it is saved with the model: where two models are compared, nothing is.
    logger.info("The tokenizer has Podium's chat template for tools (%s).", TOOL_TEMPLATE)


def give_tool_template(tokenizer: PreTrainedTokenizerBase, system: str = _SYSTEM) -> None:
    """`set_tool_template` without a word."""
    if missing := {"<|im_start|>", "<|im_end|>"} - set(tokenizer.get_vocab()):
        what = f"`{TOOL_TEMPLATE}` is written for tokenizers with ChatML's tokens; this one lacks "
        raise _unusable(what + ", ".join(sorted(missing)) + ".")
    tokenizer.chat_template = tool_template(system)
    tokenizer.response_template = json.loads((_TEMPLATES / "tools.json").read_text(encoding="utf-8"))


def _renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    from trl.chat_template_utils import supports_tool_calling

    try:
        return bool(supports_tool_calling(tokenizer))
    except _REFUSED:
        return False


def _response_template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The response template that TRL stores for the tokenizer's chat template."""
    from trl.chat_template_utils import add_response_schema

    if getattr(tokenizer, "response_schema", None) is not None:
        warnings.warn(
            "The tokenizer has a `response_schema` and no `response_template`; transformers parses turns with the "
            "latter alone.",
            FutureWarning,
            stacklevel=3,
        )
    try:
        return add_response_schema(tokenizer).response_template
    except ValueError as error:
        raise _unusable(str(error), "Set tokenizer.response_template and pass processing_class=tokenizer.") from error


def _unusable(what: str, fix: str = "") -> ConfigError:
    other = as_line("chat_template_kwargs", {"chat_template": TOOL_TEMPLATE})
    default = (
        "Choose a model whose template renders tools, such as Qwen2.5 or Llama 3.1; "
        f"for another one with ChatML's tokens: {other}"
    )
    return ConfigError(what, code="C052", fix=fix or default)

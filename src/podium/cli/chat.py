"""`podium chat MODEL_OR_RUN`: talk to a model, or to what a run made of it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from podium.cli.flags import IgnoreOption
from podium.console.terminal import errors, plain_text, prepare_output
from podium.data.prompts import apply_template
from podium.errors import ConfigError, PodiumError
from podium.errors.texts import clean, counted, quoted

if TYPE_CHECKING:
    from podium.agents.tools import Tool
    from podium.records import Message
    from podium.runs.find_model import ModelSource

HELP = "/exit, an empty line or Ctrl-D ends, /new starts over."
ENDS = ("/exit", "/quit", "/bye")
MOST_TOKENS = 512
TEMPERATURE = 0.7
MOST_ROUNDS = 8
"""Rounds of calls in one answer, where the run had no limit."""

PLAYS = "To play it on a row of its data: podium chat RUN --row 0"


def chat(
    model: Annotated[str, typer.Argument(help="A run's folder, a model folder, a hub id or `builtin:...`.")],
    system: Annotated[
        str | None, typer.Option(help="A system prompt, in place of what training began with; an empty one: none.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Longest answer, in tokens: {MOST_TOKENS}, of a row as in training.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"0: the likeliest token, always. {TEMPERATURE}, of a row as in evaluations."),
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools/--no-tools", help="Run the tools that the run was trained with.")
    ] = True,
    image: Annotated[str | None, typer.Option(help="A file with an image that the first question is about.")] = None,
    row: Annotated[
        int | None, typer.Option(min=0, help="Play this row of the run's data, with its agent or environment, instead.")
    ] = None,
    ignore: IgnoreOption = None,
) -> None:
    """Talk to a model or to the result of a run.

    `/exit`, an empty line or Ctrl-D ends; `/new` starts over. The system prompt and examples that preceded every
    question in training precede the talk, too. Tools in files are run as they were in training.
    """
    from podium.agents.chat import with_named_template
    from podium.cli.played import play_row
    from podium.data.images import opened
    from podium.models.loading import read_processor
    from podium.runs.find_model import find_model, load_model
    from podium.runs.shipping.origin import opening, template_kwargs

    if row is not None:
        if system is not None or not tools:
            raise ConfigError(
                "--row plays an episode as in training; --system and --no-tools are of a talk.",
                fix=f"podium chat {model} --row {row}",
                model=model,
                row=row,
            )
        play_row(model, row, max_tokens=max_tokens, temperature=temperature, ignore=ignore)
        return
    source = find_model(model, ignore=ignore)
    prepare_output()
    picture = None if image is None else opened(image, "the image")
    begun = opening(source) if system is None else []
    if system:
        begun = [{"role": "system", "content": system}]
    if begun and system is None:
        note(_described(begun))
    own, most = tools_of(source) if tools else ((), 0)
    policy, tokenizer = load_model(source)
    speaker = Speaker(
        policy,
        tokenizer,
        max_tokens=max_tokens or MOST_TOKENS,
        temperature=TEMPERATURE if temperature is None else temperature,
        tools=own,
        most_rounds=most,
        template_kwargs=with_named_template(template_kwargs(source)),
        processor=None if picture is None else read_processor(source.processor),
    )
    talk(speaker, begun, picture)


def tools_of(source: ModelSource) -> tuple[tuple[Tool, ...], int]:
    """The tools in a run's recipe, and the most rounds of calls; none, and a note, where they cannot be had here.

    Files are looked for in the working directory, as `podium train` was started.
    """
    from podium.runs.find_model import run_of

    run = run_of(source)
    recipe: Any = {} if run is None else run.given
    if recipe.get("environment"):
        note(f"The run's environment is not played here: you write what it answered. {PLAYS}")
    if recipe.get("agent"):
        note(f"The run's agent is not played here: you talk to its model, without the prompts it writes. {PLAYS}")
    entries = recipe.get("tools") or []
    if not entries:
        return (), 0
    from podium.agents.resolve import resolve_tools

    try:
        tools = resolve_tools(entries if isinstance(entries, list) else [entries], Path.cwd())
    except PodiumError as error:
        note(f"Without the tools of the run: {error.what} Start in the folder of its recipe, or give --no-tools.")
        return (), 0
    note(f"With the tools of the run: {', '.join(tool.name for tool in tools)}; --no-tools leaves them out.")
    most = recipe.get("max_tool_calling_iterations")
    return tools, most if isinstance(most, int) else MOST_ROUNDS


def note(text: str) -> None:
    """A line on stderr."""
    errors.print(plain_text(f"note: {text}"), soft_wrap=True)


def _described(opening: Sequence[dict[str, str]]) -> str:
    first = opening[0]
    more = len(opening) - 1
    also = f" and {counted(more, 'more message')}" if more else ""
    text = f"{first['role']} {textwrap.shorten(first['content'], 100, placeholder='...')!r}{also}"
    return f'The talk begins as the prompts of the training did, with {text}; `--system ""` leaves that out.'


def talk(speaker: Speaker, opening: list[dict[str, Any]], image: Any = None) -> None:
    """Read a line, answer it, until it is `/exit` or empty. Piped input works the same, without a prompt sign.

    `image`: stands before the first question.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo(HELP)
    turns = list(opening)
    while (text := _read_line(interactive)) and text not in ENDS:
        if text == "/new":
            turns = list(opening)
            continue
        if text == "/help":
            typer.echo(HELP)
            continue
        if image is not None and speaker.placeholder in text:
            typer.echo(f"`{speaker.placeholder}` stands for an image: write it apart, or leave it out.")
            continue
        content: Any = text
        if image is not None and len(turns) == len(opening):
            content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        turns.append({"role": "user", "content": content})
        speaker.answer(turns)


def _read_line(interactive: bool) -> str:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return ""


class Speaker:
    """A model that answers, with tools that it may call."""

    def __init__(
        self,
        policy: Any,
        tokenizer: Any,
        *,
        max_tokens: int,
        temperature: float,
        tools: Sequence[Tool] = (),
        most_rounds: int = 0,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        processor: Any = None,
    ) -> None:
        """`most_rounds`: of calls in one answer; `template_kwargs`: arguments of the chat template; `processor`: of
        talks with images."""
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.most_rounds = most_rounds
        self.sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            self.sampling["temperature"] = temperature
        self.tools = list(tools)
        self.template_kwargs = dict(template_kwargs)
        self.processor = processor
        self.placeholder = ""
        if processor is not None:
            self.placeholder = tokenizer.convert_ids_to_tokens(policy.config.image_token_id)
            self.sampling["suppress_tokens"] = [policy.config.image_token_id]
        self._chat: Any = None
        if tools:
            from podium.agents.chat import tool_format

            self._chat = tool_format(tokenizer, self.template_kwargs, needs_tools=True)

    def answer(self, turns: list[dict[str, Any]]) -> None:
        """Print the answer while it is written, and what its calls gave; all of it is appended to `turns`."""
        from podium.agents.episode import Episode, EpisodeLimits, Observation
        from podium.agents.tools import by_name

        def act(observation: Observation) -> Message:
            for call in observation.calls:
                typer.echo(clean(f"  [{call.name}: {call.content}]"))
            turns.extend(map(dict, observation.messages))
            turns.append(dict(self._message(*self._written(turns))))
            return turns[-1]

        episode = Episode(by_name(self.tools), limits=EpisodeLimits(max_iterations=self.most_rounds))
        with closing(episode):
            for _ in episode.play(act):
                pass

    def _message(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Message:
        if self._chat is None:
            return {"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)}
        schemas = [tool.schema for tool in self.tools]
        return cast("Message", self._chat.parse(token_ids, prefix=prompt_ids, tools=schemas))

    def _written(self, turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and of the answer, which is printed while it is drawn."""
        import torch

        tokenizer = self.tokenizer
        if self.processor is not None:
            how = {**self.template_kwargs, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
            schemas = [tool.schema for tool in self.tools] or None
            try:
                inputs = self.processor.apply_chat_template(turns, **how, tools=schemas, add_generation_prompt=True)
            except Exception as error:  # the processor of each family fails in its own way
                raise ConfigError(
                    f"the processor refused the talk with its image: {quoted(error) or type(error).__name__}.",
                    fix="look at the size of the image, or talk without it",
                    error=error,
                ) from error
        elif tokenizer.chat_template is None:
            inputs = tokenizer(turns[-1]["content"], return_tensors="pt")
        elif self._chat is not None:
            text = self._chat.render(turns, [tool.schema for tool in self.tools], add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            text = apply_template(tokenizer, turns, settings={**self.template_kwargs, "add_generation_prompt": True})
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        inputs = inputs.to(self.policy.device)
        with torch.inference_mode():
            output = self.policy.generate(
                **inputs,
                **self.sampling,
                max_new_tokens=self.max_tokens,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                streamer=_streamer(tokenizer),
            )
        length = inputs["input_ids"].shape[1]
        return output[0, :length].tolist(), output[0, length:].tolist()


def _streamer(tokenizer: Any) -> Any:
    """transformers' streamer, which prints what the model wrote as it is: here without control sequences."""
    from transformers import TextStreamer

    class CleanStreamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(clean(text), stream_end=stream_end)

    return CleanStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

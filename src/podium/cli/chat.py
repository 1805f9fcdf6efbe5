"""`podium chat MODEL_OR_RUN`: talk to a model, or to what a run made of it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from podium.cli.terminal import errors, plain_text, prepare_output
from podium.records import clean

HELP = "An empty line or Ctrl-D ends, /new starts over."


def chat(
    model: Annotated[str, typer.Argument(help="A run's folder, a model folder, a hub id or `builtin:...`.")],
    system: Annotated[
        str | None, typer.Option(help="A system prompt, in place of what training began with; an empty one: none.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token, always.")] = 0.7,
) -> None:
    """Talk to a model or to the result of a run.

    The system prompt and examples that preceded every question in training precede the talk, too.
    """
    from podium.runs.find_model import find_model, load_model
    from podium.runs.shipping.prompt_prefix import opening

    source = find_model(model)
    prepare_output()
    begun = opening(source) if system is None else [{"role": "system", "content": system}] * bool(system)
    if begun and system is None:
        errors.print(plain_text(f"note: {_described(begun)}"), soft_wrap=True)
    policy, tokenizer = load_model(source)
    talk(policy, tokenizer, begun, max_tokens=max_tokens, temperature=temperature)


def _described(opening: Sequence[dict[str, str]]) -> str:
    first, more = opening[0], len(opening) - 1
    also = f" and {more} more {'message' if more == 1 else 'messages'}" if more else ""
    text = f"{first['role']} {textwrap.shorten(first['content'], 100, placeholder='...')!r}{also}"
    return f'The talk begins as the prompts of the training did, with {text}; `--system ""` leaves that out.'


def talk(policy: Any, tokenizer: Any, opening: list[dict[str, str]], *, max_tokens: int, temperature: float) -> None:
    """Read a line, answer it, until there is none. Piped input works the same, without a prompt sign."""
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo(HELP)
    turns = list(opening)
    while text := _read_line(interactive):
        if text == "/new":
            turns = list(opening)
            continue
        turns.append({"role": "user", "content": text})
        answer = _answer(policy, tokenizer, turns, max_tokens=max_tokens, temperature=temperature)
        turns.append({"role": "assistant", "content": answer})


def _read_line(interactive: bool) -> str:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return ""


def _answer(policy: Any, tokenizer: Any, turns: list[dict[str, str]], *, max_tokens: int, temperature: float) -> str:
    """Print the answer while it is written; gives it whole."""
    import torch

    if tokenizer.chat_template is None:
        inputs = tokenizer(turns[-1]["content"], return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(policy.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        output = policy.generate(
            **inputs,
            **sampling,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=_streamer(tokenizer),
        )
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _streamer(tokenizer: Any) -> Any:
    """transformers' streamer, which prints what the model wrote as it is: here without control sequences."""
    from transformers import TextStreamer

    class CleanStreamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(clean(text), stream_end=stream_end)

    return CleanStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

"""The command line: one file per verb. Nothing heavy is imported before a verb runs, so `--help` is quick."""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from podium.cli import rewards
from podium.cli.chat import chat
from podium.cli.check import check
from podium.cli.compare import compare
from podium.cli.cure import cure
from podium.cli.doctor import doctor
from podium.cli.eval import evaluate
from podium.cli.explain import explain
from podium.cli.init import init
from podium.cli.merge import merge
from podium.cli.push import push
from podium.cli.recipes import recipes
from podium.cli.report import report
from podium.cli.sample import sample
from podium.cli.serve import serve
from podium.cli.tinker import tinker
from podium.cli.train import train
from podium.cli.try_out import try_out, try_out_environments, try_out_program, try_out_rewards
from podium.cli.watch import watch
from podium.console.terminal import is_main
from podium.errors import PodiumError
from podium.errors.texts import clean
from podium.isolation.machine import END_SIGNALS

MISTAKE = 2
"""Exit code of whatever the user can repair."""
INTERRUPTED = 130

ANY_FLAG = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Any key of a recipe is a flag; `podium.cli.words` reads them."""
RECIPE = "RECIPE [OPTIONS] [--ANY_KEY VALUE]..."
RUN_OR_RECIPE = "RUN_OR_RECIPE [OPTIONS] [--ANY_KEY VALUE]..."
MODEL = "MODEL_OR_RUN [OPTIONS] [--ANY_KEY VALUE]..."
MODELS = "A [B] [OPTIONS] [--ANY_KEY VALUE]..."


BEGINS = {
    "train": "Reading the recipe, its rows and its rewards",
    "check": "Reading the recipe, its rows and its rewards; no weight is loaded",
    "try_out": "Reading what is to be tested",
    "cure": "Reading the findings",
    "sample": "Reading the recipe, then its model",
    "evaluate": "Reading the model's recipe and rows, then the model",
    "compare": "Reading the recipe and rows, then the models",
    "chat": "Loading the model",
    "merge": "Reading the adapter and its base",
    "serve": "Reading the model's folder",
    "tinker": "Loading the model",
    "push": "Reading the model's folder",
    "doctor": "Reading the run",
    "report": "Reading the run",
    "watch": "Reading the run",
    "rewards test": "Reading rows and rewards",
    "environments test": "Reading tools and environments",
    "agents test": "Reading the agent",
}
"""First line of each verb, by the name of its function or by its words; printed before slow imports begin."""


def _begin(name: str) -> None:
    """Say once for all processes what a verb does first: on stderr as other progress, for a pipe has results alone."""
    if name in BEGINS and is_main():
        sys.stderr.write(f"{BEGINS[name]} ...\n")
        sys.stderr.flush()


def _guarded(verb: Callable[..., None], name: str) -> Callable[..., None]:
    """Mistakes end as one message and code 2, Ctrl-C as code 130; bugs keep their traceback."""

    @functools.wraps(verb)
    def guarded(*args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):  # one that is not UTF-8 shows what it lacks as an escape
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            _refuse_deleted_folder()
            if not kwargs.get("as_json"):
                _begin(name)
            verb(*args, **kwargs)
        except PodiumError as error:
            sys.stderr.write(f"error: {error}\n")
            raise typer.Exit(MISTAKE) from None
        except OSError as error:
            if (known := _of_disk(error)) is None:
                raise
            sys.stderr.write(f"error: {known}\n")
            raise typer.Exit(MISTAKE) from None
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted\n")
            raise typer.Exit(INTERRUPTED) from None

    return guarded


def _refuse_deleted_folder() -> None:
    """Raises `PodiumError` where the working directory is gone: no library could be imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise PodiumError("The working directory was deleted.", fix="cd to a folder that is there") from None


def _of_disk(error: OSError) -> PodiumError | None:
    """A full disk or a name that no file can have as a message; None for other errors."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"No space is left for {error.filename or 'what is to be written'} ({error.strerror})."
        return PodiumError(what, fix="make room there (df -h), or --output_dir with a folder on another disk")
    if error.errno == errno.ENAMETOOLONG:
        what = f"{str(error.filename)[:60]}... is longer than the name of a file can be ({error.strerror})."
        return PodiumError(what, fix="a name of at most 255 characters")
    return None


class Verbs(TyperGroup):
    """Verbs, and what was meant by a first word that is none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `Exit` with a message for a word that is no verb; `help VERB` is `VERB --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        options = [name for option in self.get_params(ctx) for name in option.opts]
        if args and args[0] not in (*self.commands, *options):
            from podium.cli.words import meant

            within = "" if ctx.parent is None else str(ctx.info_name)
            listed = ", ".join(name for name, verb in self.commands.items() if not verb.hidden)
            command = " ".join(filter(None, ["podium", within]))
            error = PodiumError(
                f"`{args[0]}` is no command of `{command}`; there are {listed}.",
                fix=meant(args, self.commands, within),
                word=args[0],
                command=command,
                listed=listed,
            )
            sys.stderr.write(f"error: {error}\n")
            raise typer.Exit(MISTAKE)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each verb with the whole first sentence of its help, wrapped: click cuts it off at the terminal's width."""
        verbs = [(name, verb) for name, verb in self.commands.items() if not verb.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(limit=10_000)) for name, verb in verbs])


app = typer.Typer(
    name="podium",
    cls=Verbs,
    help="Fine-tune language models with GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version(wanted: bool = True) -> None:
    """The version of Podium."""
    if wanted:
        from importlib import metadata

        typer.echo(f"podium {metadata.version('podium')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version, and end.", callback=version)] = False,
) -> None:
    pass


app.command("version", hidden=True)(lambda: version())
_VERBS: tuple[tuple[Callable[..., None], str], ...] = (
    (init, ""),
    (train, RECIPE),
    (check, RECIPE),
    (try_out, ""),
    (cure, RUN_OR_RECIPE),
    (sample, RECIPE),
    (evaluate, MODEL),
    (compare, MODELS),
    *((verb, "") for verb in (chat, merge, serve, tinker, push, recipes, doctor, explain, report, watch)),
)
for _verb, _metavar in _VERBS:
    _name = {"evaluate": "eval", "try_out": "test"}.get(_verb.__name__, _verb.__name__)
    app.command(_name, context_settings=ANY_FLAG if _metavar else None, options_metavar=_metavar or "[OPTIONS]")(
        _guarded(_verb, _verb.__name__)
    )
_GROUPS: tuple[tuple[str, str, dict[str, Callable[..., None]]], ...] = (
    (
        "rewards",
        "The reward library, and a test of rewards that needs no model.",
        {"list": rewards.list_rewards, "show": rewards.show, "test": try_out_rewards},
    ),
    ("environments", "A test of tools and environments that needs no model.", {"test": try_out_environments}),
    ("agents", "A test of an agent program that needs no model.", {"test": try_out_program}),
)
for _name, _help, _verbs in _GROUPS:
    _group = typer.Typer(help=_help, no_args_is_help=True)
    _group.callback()(lambda: None)
    for _word, _verb in _verbs.items():
        _group.command(_word)(_guarded(_verb, f"{_name} {_word}"))
    app.add_typer(_group, name=_name, cls=Verbs)


def _interrupt_again(dropped: Any) -> None:
    """Interrupt once more where the exception of a signal was raised in a `__del__` or a callback, which drops it."""
    error = dropped.exc_value
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    if isinstance(error, SystemExit) and error.code in [128 + ending for ending in END_SIGNALS]:
        number = int(error.code) - 128
    if number == 0:
        sys.__unraisablehook__(dropped)
        return
    main_thread = threading.main_thread().ident
    # After the call that drops exceptions; to the thread, so that a sleep or a read of its own ends.
    timer = threading.Timer(0.05, signal.pthread_kill, [main_thread, number])
    timer.daemon = True
    timer.start()


def main() -> None:
    """Run the command line."""
    sys.unraisablehook = _interrupt_again
    # What is registered first runs last: at the interpreter's end a search of all objects for cycles takes seconds.
    atexit.register(gc.freeze)
    try:
        app()
    except Exception:  # noqa: BLE001  a bug, whose text may quote a model
        sys.stderr.write(clean(traceback.format_exc()))
        sys.exit(1)

"""`podium merge RUN --out DIR`: a run's model as one plain folder, proved to be the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium.cli.flags import IgnoreOption
from podium.console.next_command import print_next
from podium.console.terminal import prepare_output


def merge(
    run: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or an adapter's folder.")],
    out: Annotated[Path, typer.Option(help="The folder to make; it must not be there.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the type the base is stored in.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The model to merge into, in place of the one that was trained on.")
    ] = None,
    ignore: IgnoreOption = None,
) -> None:
    """Merge a run's adapter into its base, compare both on prompts of the run, and save one plain model."""
    from podium.runs.find_model import find_model, run_of
    from podium.runs.shipping.merge import export_model

    source = find_model(run, base=base, ignore=ignore)
    prepare_output()
    made = export_model(source, out, dtype=dtype)
    size = sum(path.stat().st_size for path in made.folder.iterdir()) / 1e9
    trained = "all its weights were trained" if run_of(source) else "no adapter and no run beside it"
    what = "merged in float32" if made.merged else f"{trained}, so there is nothing to merge: copied"
    typer.echo(f"{run}: {what}, saved in {made.dtype}")
    typer.echo(f"{made.proof}")
    typer.echo(f"{made.folder}  ({size:.1f} GB; README.md is its card)")
    print_next("merge", out=str(made.folder))

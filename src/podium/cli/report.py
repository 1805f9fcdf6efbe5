"""`podium report RUN`: one HTML file about a run, or about two side by side."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from podium.console.next_command import print_next
from podium.errors import ConfigError
from podium.runs.run import CONFIG, REPORT, Run, names_data


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]", help="A run's folder; two are put side by side.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; report.html in the first run's folder.")
    ] = None,
) -> None:
    """Write a report: curves, findings and every completion in one HTML file that needs no network."""
    from podium.runs.report import WITHOUT_CHARTS, has_charts, write_report

    if len(runs) > 2:
        raise ConfigError(
            f"`podium report` shows one run, or two side by side; {len(runs)} were given.", runs_count=len(runs)
        )
    if output is None:
        names = "-and-".join(run.resolve().name for run in runs)
        output = runs[0] / REPORT if len(runs) == 1 else Path(f"{names}.html")
    records = [Run.load(run) for run in runs]
    written = write_report(records, output)
    typer.echo(f"{written}  ({written.stat().st_size / 1e6:.1f} MB)")
    if not has_charts():
        typer.echo(WITHOUT_CHARTS)
    if len(records) == 1:
        run = records[0]
        outcome = run.outcome
        if outcome == "no better" and (run.parts or not names_data(run.given)):
            outcome = "better or not known"
        print_next(f"report, {outcome}", recipe=shlex.quote(str(run.folder / CONFIG)), run=str(run.folder))


def report_of_finished_run(folder: str | Path) -> str:
    """Write `report.html` into a run's folder; the line to print. A page that fails does not fail the run."""
    from podium.runs.report import WITHOUT_CHARTS, has_charts, write_report

    try:
        written = f"Report: {write_report([Run.load(folder)], Path(folder) / REPORT)}"
        return written if has_charts() else f"{written}\n{WITHOUT_CHARTS}; then podium report {folder}"
    except Exception as error:  # noqa: BLE001 - the model is trained and saved; whatever a page stumbles over is one line
        return f"No report was written: {type(error).__name__}: {error}. Try: podium report {folder}"

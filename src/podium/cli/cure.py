"""`podium cure`: a recipe with the settings that the findings about it, or about its run, ask for."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podium.console.next_command import print_next
from podium.console.terminal import console, counted, plain_text, print_findings, quiet
from podium.errors import ConfigError
from podium.errors.texts import as_lines, listed

if TYPE_CHECKING:
    from podium.errors import Finding
    from podium.recipe.cure import Prescription
    from podium.recipe.document import Document


def cure(
    context: typer.Context,
    codes: Annotated[str, typer.Option("--codes", help="Only the cures of these findings, notes too: C024,M122.")] = "",
    out: Annotated[str, typer.Option("--out", help="The file to write; without: NAME.cured.yaml.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes, and write nothing.")] = False,
) -> None:
    """Write a recipe with the settings that errors and warnings ask for, and show each change with its reason.

    RUN_OR_RECIPE is the folder of a run, whose findings and settings are read, or a recipe, which is checked. Where
    two findings disagree about a setting, the graver one decides. Notes are left alone but for those that --codes
    names, and so is a run that is solved. What is written is checked; nothing is overwritten.
    """
    from podium.cli.words import recipe_and_flags
    from podium.recipe.changes import differences
    from podium.recipe.cure import patched, prescribe

    name, flags = recipe_and_flags(context.args, "cure")
    quiet()
    if isinstance(name, str) and Path(name).expanduser().is_dir():
        document, found, folder = _of_run(Path(name).expanduser(), codes)
    else:
        document, found, folder = _of_recipe(name, flags)
    wanted = _wanted(found, codes)
    prescribed = prescribe(wanted)
    text = _text(document)
    changed = differences(document.values, {**flags, **prescribed.changes})
    console.print(plain_text(f"{document}: {counted(found) or 'no findings'}"), soft_wrap=True)
    _print(prescribed, document)
    if left := dict.fromkeys(finding.code for finding in found if finding.changes and finding not in wanted):
        console.print(f"Not applied without --codes: {', '.join(left)}.")
    if not changed:
        console.print("No setting is to be changed.")
        return
    target = Path(out) if out else _free(folder, document)
    if out and target.exists():
        raise ConfigError(f"--out {out}: the file exists, and nothing is overwritten.", fix="another name", out=out)
    if not target.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {out}: there is no folder {target.parent}.",
            fix=f"mkdir -p {target.parent}",
            out=out,
            target_parent=target.parent,
        )

    def written(changes: Mapping[str, Any]) -> str:
        return patched(text, document.values, {**flags, **changes}, folder=document.folder, target=target)

    if dry_run:
        console.print("Nothing was written (--dry-run).")
        return
    with target.open("x", encoding="utf-8") as file:
        file.write(written(prescribed.changes))
    _check_again(target, prescribed, written, {finding.code for finding in found})


Writer = Callable[[Mapping[str, Any]], str]
"""The text of the new recipe, from its changes."""


def _check_again(target: Path, prescribed: Prescription, written: Writer, known: Collection[str]) -> None:
    """Say what `podium check` finds in the recipe that was written, and what to type next.

    The changes of a finding that bring an error of another code than the `known` ones are taken back.
    """
    from podium.checks import check_recipe
    from podium.recipe.cure import wanted

    found = check_recipe(target)
    if brought := _errors(found, known):
        found = _without_harm(target, prescribed, written, known, brought[0]) or found
    left = wanted(found)
    console.print(plain_text(f"Written: {target}. `podium check` of it: {counted(found)}"), soft_wrap=True)
    print_findings(console, left)
    worst = next((finding.code for finding in left if finding.severity == "error"), "")
    print_next("check, errors" if worst else "cure", recipe=shlex.quote(str(target)), code=worst)


def _errors(found: Sequence[Finding], known: Collection[str]) -> list[Finding]:
    return [finding for finding in found if finding.severity == "error" and finding.code not in known]


def _without_harm(
    target: Path, prescribed: Prescription, written: Writer, known: Collection[str], brought: Finding
) -> list[Finding] | None:
    """Write the recipe without the changes of the one finding that bring an error; what is found then.

    None: the error stays whichever changes are left out; then all are written as before.
    """
    from podium.checks import check_recipe

    for code in dict.fromkeys(finding.code for finding in prescribed.reasons.values()):
        kept = {key: value for key, value in prescribed.changes.items() if prescribed.reasons[key].code != code}
        target.write_text(written(kept), encoding="utf-8")
        found = check_recipe(target)
        if not _errors(found, known):
            taken = as_lines({key: value for key, value in prescribed.changes.items() if key not in kept})
            what = f"Taken back, as it brings an error: {taken}   ({code})\n  {brought.code}: {brought.what}"
            console.print(plain_text(f"{what}\n    fix: {brought.fix}; then {taken}"), soft_wrap=True)
            return found
    target.write_text(written(prescribed.changes), encoding="utf-8")
    return None


def _of_run(folder: Path, codes: str) -> tuple[Document, list[Finding], Path]:
    """The settings and the findings of a run, most important first; the folder that its own is in.

    A run that is solved has none, unless `codes` names some.
    """
    from podium.recipe.cure import recipe_of_run
    from podium.runs.doctor import examine
    from podium.runs.run import CONFIG

    report = examine(folder)
    found = [issue.finding for issue in report.issues]
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} has no {CONFIG}, so there is no recipe to change.",
            fix="podium cure RECIPE",
            folder=folder,
            config=CONFIG,
        )
    if (document := recipe_of_run(folder)) is None:
        what = f"{folder / CONFIG} names no dataset: a script started the run, and no recipe could."
        fixes = " ".join(finding.fix for finding in found if finding.changes)
        raise ConfigError(what, fix=fixes and f"Change the script: {fixes}")
    if report.outcome == "solved" and not codes:
        console.print(plain_text(f"The run is done: {report.verdict}"), soft_wrap=True)
        found = []
    return document, found, folder.resolve().parent


def _of_recipe(name: str | Document, flags: Mapping[str, Any]) -> tuple[Document, list[Finding], Path]:
    """A recipe and what `podium check` finds, most important first; the folder for another one."""
    from podium.checks import examine
    from podium.recipe.document import SHIPPED, open_document
    from podium.runs.monitors import agreed, rank

    document = open_document(name)
    if not document.is_file:
        raise ConfigError("`podium cure` takes a recipe or the folder of a run.", fix="podium init, for a recipe")
    found = examine(document, flags).findings
    return document, agreed(sorted(found, key=rank)), Path() if document.folder == SHIPPED else document.folder


def _wanted(found: Sequence[Finding], codes: str) -> list[Finding]:
    from podium.recipe.cure import wanted

    named = {code.strip().upper() for code in codes.split(",") if code.strip()}
    if missing := sorted(named - {finding.code for finding in found}):
        there = ", ".join(dict.fromkeys(finding.code for finding in found)) or "none"
        raise ConfigError(
            f"--codes: {listed(missing)} was not found here; found: {there}.", missing=missing, there=there
        )
    return [finding for finding in found if finding.code in named] if named else wanted(found)


def _text(document: Document) -> Any:
    """The recipe as it is written."""
    from podium.recipe.document import SHIPPED
    from podium.runs.run import CONFIG

    path = Path(document.name).expanduser()
    if path.is_dir():
        path = path / CONFIG
    elif not path.is_file():
        path = SHIPPED / path.name
    return path.read_text(encoding="utf-8-sig")


def _free(folder: Path, document: Document) -> Path:
    """`NAME.cured.yaml`, or with the first number that is free."""
    name = Path(document.name).expanduser()
    stem = name.resolve().name if name.is_dir() else name.stem
    stem = stem.removesuffix(".cured")
    names = (f"{stem}.cured{number}.yaml" for number in itertools.chain([""], itertools.count(2)))
    here = Path(os.path.relpath(folder)) if folder.is_absolute() else folder
    return next(here / name for name in names if not (here / name).exists())


def _print(prescribed: Prescription, document: Document) -> None:
    """A line for each setting that changes, and for what is left to do by hand."""
    from podium.recipe.changes import differences

    for key, value in prescribed.changes.items():
        finding = prescribed.reasons[key]
        changed: list[object] = [*differences(document.values, {key: value})]
        for change in changed or [f"{key}: as it is"]:
            console.print(plain_text(f"  {change}   ({finding.code}: {finding.what})"), soft_wrap=True)
    if prescribed.by_hand:
        console.print("Not by a setting:")
    for finding in prescribed.by_hand:
        console.print(plain_text(f"  {finding.code}: {finding.what}\n    fix: {finding.fix}"), soft_wrap=True)

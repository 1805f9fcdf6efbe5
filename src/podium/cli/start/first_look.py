"""The end of `podium init`: the new recipe is checked, and a few rows are sampled and scored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podium.console.terminal import console, plain_text, print_findings, print_wrapped, quiet, show_notes, table
from podium.errors import Finding
from podium.models.builtin import PREFIX
from podium.planning.propose import shown
from podium.records import last_user_turn

if TYPE_CHECKING:
    from rich.table import Table

    from podium.records import ScoredGroup

PROMPTS = 8
"""Prompts that are sampled, each with the completions of the recipe; fewer where they may be long."""
SHORT_TOKENS = 64
"""Completion limit up to which `PROMPTS` are sampled: 64 completions of it take the built-in model some seconds."""
SHOWN = (4, 2)
"""Prompts that are shown, and completions of each."""
EPISODES = 2
"""The same for completions of several turns, both of prompts and of completions."""
SMALL_BYTES = 2_000_000_000
"""Size of the weights up to which a model is loaded for it."""


def can_sample(model: str, folder: Path) -> bool:
    """Whether a model is on this machine and small: the built-in one, a folder, or one in the hub's cache.

    `folder` is that of the recipe, which a model's path is relative to.
    """
    if model.startswith(PREFIX):
        return True
    weights = folder / Path(model).expanduser()
    if not weights.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json") if model.count("/") <= 1 else None
        if not isinstance(found, str):
            return False
        weights = Path(found).parent
    sizes = [file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in weights.glob(pattern)]
    return 0 < sum(sizes) <= SMALL_BYTES


def first_look(recipe: Path) -> list[Finding]:
    """Check a recipe, sample from it, and print completions, rewards and numbers; the findings are returned."""
    from podium.checks import examine

    quiet()
    show_notes()
    logging.getLogger("podium").setLevel(logging.WARNING)  # notes on the trainer are for those who train
    with contextlib.chdir(recipe.parent):  # where its paths hold, and its commands are typed
        checked = examine(recipe.name, {}, keep_rows=True)
        serious = [finding for finding in checked.findings if finding.severity != "note"]
        print_findings(console, serious)
        if checked.recipe is None:
            codes = ", ".join(dict.fromkeys(finding.code for finding in serious if finding.severity == "error"))
            print_wrapped(console, plain_text(f"Not ready: {codes} first. Nothing was sampled."))
            return checked.findings
        from podium.cli.sample import opened, plain, print_groups
        from podium.cli.sampled import drawn_rows, numbers, print_numbers, sample_groups

        with opened(checked.recipe) as (loaded, trainer, rows, _):
            limit = trainer.args.max_completion_length or SHORT_TOKENS
            drawn = drawn_rows(trainer, rows, max(2, min(PROMPTS, PROMPTS * SHORT_TOKENS // limit)))
            groups, seconds = sample_groups(trainer, drawn)
            found = numbers(groups, seconds, trainer, loaded.accuracy)
            settings = trainer.run.scoring.advantage
    if any(completion.turns for group in groups for completion in group.group.completions):
        shown = [{**group, "completions": group["completions"][:EPISODES]} for group in plain(groups, settings)]
        print_groups(shown[:EPISODES], groups[0].names_K)
    else:
        console.print(samples(groups))
    print_numbers(found)
    return checked.findings


def samples(groups: Sequence[ScoredGroup]) -> Table:
    """A few prompts: the right answer, and completions with their rewards."""
    prompts, most = SHOWN
    names = groups[0].names_K
    rows = []
    for scored in groups[:prompts]:
        asked = shown(last_user_turn(scored.group.prompt.content))
        gold = scored.group.prompt.columns.get("answer")
        for index, completion in enumerate(scored.group.completions[:most]):
            scores = ["none" if value != value else f"{value:.2f}" for value in scored.rewards_GK[index]]
            right = "" if index or gold is None else shown(str(gold))
            rows.append(("" if index else asked, right, shown(completion.text), *scores))
    titles = [
        ("question", "left"),
        ("right answer", "left"),
        ("completion", "left"),
        *((n, "right whole") for n in names),
    ]
    return table(titles, rows, title="Before training")

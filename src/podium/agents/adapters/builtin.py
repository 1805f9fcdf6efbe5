"""Podium's own environments, those of its recipes: `builtin:guess?questions=3`, `builtin:chain`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.agents.plain_text import TextEnvironment
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean, nearest


class Guess(TextEnvironment):
    """A hidden number, for rows with `number` (those of `builtin:guesses`): a guess is answered with higher or lower.

    The episode pays 1 if the number is found, else 0.05 for every guess that is a number in the range.
    """

    def __init__(self, largest: int = 7, questions: int = 3) -> None:
        self.largest = largest
        self.max_turns = questions  # type: ignore[misc]
        self.number = 0
        self.earned = 0.0

    def reset(self, number: int, **row: Any) -> None:
        """Hide the row's number."""
        self.number = number
        self.earned = 0.0

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """Compare a guess with the number."""
        guess = int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text) else 0
        if not 1 <= guess <= self.largest:
            return f"Answer with a number from 1 to {self.largest}.", 0.0, False, {}
        if guess == self.number:
            return None, 1.0 - self.earned, True, {}
        self.earned += 0.05
        return "higher" if guess < self.number else "lower", 0.05, False, {}


class Chain:
    """A table in which each code leads to the next, for rows with `codes` (those of `builtin:chains`).

    The reward is the share of the chain's codes that were looked up in order, and 0 after a call behind the last of
    them: where such a call costs less, it is worth more than to stop too early, and a policy may learn to call on and
    never to answer.
    """

    def __init__(self) -> None:
        self.codes: Sequence[str] = ()
        self.found = 0
        self.called_on = False

    def reset(self, codes: Sequence[str], **row: Any) -> None:
        """Lay out the row's chain."""
        self.codes = [str(code) for code in codes]
        self.found = 0
        self.called_on = False

    def look_up(self, code: str) -> str:
        """Look up a code in the table.

        Args:
            code: The code to look up.

        Returns:
            The code that stands beside it, and whether it is the last one.
        """
        place = self.codes.index(str(code)) if str(code) in self.codes[:-1] else None
        self.called_on |= self.found == len(self.codes) - 1
        self.found += place == self.found
        if place is None:
            raise ValueError(f"the table has no code {code}")
        code = self.codes[place + 1]
        return f"{code} (last)" if place + 2 == len(self.codes) else code

    def get_reward(self) -> float:
        """The share of the look-ups that were made in order; 0 with a call after them."""
        return 0.0 if self.called_on else self.found / max(len(self.codes) - 1, 1)


ENVIRONMENTS: dict[str, Callable[..., Any]] = {"chain": Chain, "guess": Guess}


def factory(name: str, folder: Path, **arguments: Any) -> Callable[[], Any]:
    """The factory of `builtin:name`. Raises `ConfigError` for another name, and for arguments that it does not take."""
    if name not in ENVIRONMENTS:
        environments = ", ".join(f"builtin:{n}" for n in ENVIRONMENTS)
        near = nearest(f"builtin:{name}", [f"builtin:{known}" for known in ENVIRONMENTS])
        raise ConfigError(
            f"there is no environment `builtin:{name}`; there are {environments}.",
            fix=f"Did you mean `{near}`?" if near else "",
            name=name,
            environments=environments,
            near=near,
        )
    known = list(inspect.signature(ENVIRONMENTS[name]).parameters)
    if wrong := [key for key in arguments if key not in known]:
        what = f"`builtin:{name}` has no setting `{wrong[0]}`; it has {', '.join(known) or 'none'}."
        raise ConfigError(what, fix=did_you_mean(wrong[0], known) or f"environment: builtin:{name}")
    return functools.partial(ENVIRONMENTS[name], **arguments)

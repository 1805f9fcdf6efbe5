"""gymnasium's environments with a few numbered actions as text: `gymnasium:FrozenLake-v1?is_slippery=false`.

FrozenLake, CliffWalking, Taxi and Blackjack are described in words and played by naming an action; other environments
with discrete actions are played by its number. The last action in a turn counts.

A turn without an action is worth as much as the worst step that a few random steps have shown, and never more than 0:
were it cheaper than a legal step, a policy would learn to name no action.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from podium.agents.plain_text import TextEnvironment
from podium.errors import ConfigError
from podium.errors.texts import listed, nearest, quoted


class Game(NamedTuple):
    """The words for an environment."""

    task: str
    actions: tuple[str, ...]
    """A word for each number."""
    describe: Callable[[Any, Any], str]
    """The environment and its observation as text."""


def _lake(env: Any, observation: Any) -> str:
    cells = [[cell.decode() for cell in row] for row in env.desc.tolist()]
    row, column = divmod(int(observation), env.ncol)
    cells[row][column] = "P"
    return "\n".join("".join(row) for row in cells)


def _cliff(env: Any, observation: Any) -> str:
    row, column = divmod(int(observation), env.shape[1])
    return f"You are in row {row}, column {column}."


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, goal = env.decode(int(observation))
    places = [f"row {r}, column {c}" for r, c in env.locs]
    where = "in the taxi" if passenger == len(places) else f"at {places[passenger]}"
    return f"The taxi is at row {row}, column {column}. The passenger is {where} and wants to go to {places[goal]}."


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, ace = observation
    return f"Your cards sum to {total}{' with a usable ace' if ace else ''}. The dealer shows {dealer}."


_LAKE = Game("Cross the lake from S to G. P is you, F is ice, H is a hole.", ("left", "down", "right", "up"), _lake)
_CLIFF = "Walk from row 3, column 0 to row 3, column 11. Columns 1 to 10 of row 3 are a cliff."
_TAXI = ("south", "north", "east", "west", "pickup", "dropoff")

GAMES = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": Game(_CLIFF, ("up", "right", "down", "left"), _cliff),
    "Taxi": Game("Fetch the passenger and bring them to their goal.", _TAXI, _taxi),
    "Blackjack": Game("Come closer to 21 than the dealer without going over it.", ("stick", "hit"), _blackjack),
}
"""By the name of the environment without its version."""


PROBED_STEPS = 200
"""Random steps, from seed 0, among which the worst reward is looked for."""


@functools.cache
def worst_reward(name: str, arguments: tuple[tuple[str, Any], ...]) -> float:
    """The least reward of a step among `PROBED_STEPS` random ones, at most 0; the same in every process."""
    import gymnasium

    env = gymnasium.make(name, **dict(arguments))
    env.action_space.seed(0)
    env.reset(seed=0)
    worst = 0.0
    for _ in range(PROBED_STEPS):
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        worst = min(worst, float(reward))
        if terminated or truncated:
            env.reset()
    env.close()
    return worst


class Gymnasium(TextEnvironment):
    """An environment of gymnasium. A turn without an action changes nothing, and costs what the worst step costs."""

    def __init__(self, name: str, **arguments: Any) -> None:
        import gymnasium
        from gymnasium.spaces import Discrete

        try:
            self._env = gymnasium.make(name, **arguments)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            near = nearest(name, gymnasium.registry)
            raise ConfigError(
                f"gymnasium cannot make `{name}` with {arguments}: {quoted(error)}",
                fix=f"Did you mean `{near}`?" if near else "environment: gymnasium:FrozenLake-v1",
                name=name,
                arguments=arguments,
                error=error,
                near=near,
            ) from error
        space = self._env.action_space
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"gymnasium's `{name}` has the actions {space}; as text are played those with numbered actions.",
                fix=f"one of {listed(GAMES)}",
                name=name,
                space=space,
                games=GAMES,
            )
        numbers = tuple(str(int(space.start) + number) for number in range(int(space.n)))
        plain = Game("Choose an action by its number.", numbers, lambda _, observation: str(observation))
        self._game = GAMES.get(name.rpartition("-v")[0] or name, plain)
        self._first = int(space.start)
        self._worst = worst_reward(name, tuple(sorted(arguments.items())))
        self.actions = self._game.actions
        self._choice = f"Choose one of: {', '.join(self._game.actions)}."

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The task, the first observation and the actions."""
        observation, _ = self._env.reset(seed=seed)
        return "\n".join([self._game.task, self._told(observation), self._choice])

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """The last action that is named."""
        named = re.findall(rf"\b({'|'.join(self._game.actions)})\b", text.lower())
        if not named:
            return f"There is no action in this. {self._choice}", self._worst, False, {"invalid": True}
        action = self._first + self._game.actions.index(named[-1])
        observation, reward, terminated, truncated, info = self._env.step(action)
        return self._told(observation), float(reward), bool(terminated or truncated), dict(info)

    def _told(self, observation: Any) -> str:
        return self._game.describe(self._env.unwrapped, observation)


def factory(name: str, folder: Path, /, **arguments: Any) -> Callable[[], Gymnasium]:
    """Makes environments of that name with these arguments of `gymnasium.make`."""
    return functools.partial(Gymnasium, name, **arguments)

"""TextArena's games for one player: `textarena:GuessTheNumber-v0?max_number=7`.

An observation is what the game has written since the last turn, without the model's own words. A game is paid at its
end. TextArena's games draw from Python's global random numbers and seed them; here each environment draws from a
generator of its own (see `_Draws`), so that the same seed gives the same game and nothing else is disturbed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from podium.agents.plain_text import TextEnvironment
from podium.errors import ConfigError
from podium.errors.texts import nearest

logger = logging.getLogger(__name__)

_generator: ContextVar[Any] = ContextVar("generator", default=random)


class _Draws:
    """Stands in for the module `random` in TextArena's modules: the generator of the environment that is being played.

    Outside of one it is the module itself. Swapping the global state would disturb other threads that draw meanwhile.
    """

    def __getattr__(self, name: str) -> Any:
        generator = _generator.get()
        return getattr(generator if hasattr(generator, name) else random, name)


_DRAWS = _Draws()


@contextmanager
def _drawing_from(generator: random.Random) -> Iterator[None]:
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


class TextArena(TextEnvironment):
    """A game of TextArena. One that raises on a model's text ends unpaid, with the exception in `info`."""

    def __init__(self, name: str, **arguments: Any) -> None:
        drawn = random.getstate()
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if name not in ENV_REGISTRY:
            near = nearest(name, ENV_REGISTRY)
            raise ConfigError(
                f"TextArena has no game `{name}`. It has {len(ENV_REGISTRY)}.",
                fix=f"Did you mean `{near}`?" if near else "environment: textarena:GuessTheNumber-v0",
                name=name,
                env_registry_count=len(ENV_REGISTRY),
                near=near,
            )
        self._draws = random.Random(0)
        try:
            importlib.import_module(ENV_REGISTRY[name].entry_point.partition(":")[0])
            for path, module in list(sys.modules.items()):
                if path.startswith("textarena.") and getattr(module, "random", None) is random:
                    module.random = _DRAWS  # type: ignore[attr-defined]
            with _drawing_from(self._draws):
                self._game = self._inner = textarena.make(name, **arguments)
            while hasattr(self._inner, "env"):
                self._inner = self._inner.env
            self.reset(seed=0)
            if self._inner.state.num_players != 1:
                raise ValueError("it is for several")
        except Exception as error:  # games assert their number of players, and raise whatever they like
            raise _cannot_begin(name, arguments, error) from error
        finally:
            random.setstate(drawn)  # imports draw, too

    def reset(self, seed: int | None = None, **row: Any) -> str:
        """The rules of the game, and its first position."""
        self._draws.seed(seed)
        with _drawing_from(self._draws):
            self._game.reset(num_players=1, seed=self._draws.getrandbits(32))
            return self._news() or ""

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """A move: the whole turn, in the notation of the game."""
        with _drawing_from(self._draws):
            try:
                done, info = self._game.step(action=text)
            except Exception as error:  # noqa: BLE001  a text that the game did not expect
                logger.warning("TextArena's %s raised %s: %s", self._game.env_id, type(error).__name__, error)
                return None, 0.0, True, {"error": f"{type(error).__name__}: {error}"}
            if not done:
                return self._news() or "Go on.", 0.0, False, dict(info)
            rewards, games = self._game.close()
            return self._news(), float((rewards or {}).get(0, 0.0)), True, {**info, **games.get(0, {})}

    def _news(self) -> str | None:
        """The game's own messages since the last call; its wrappers would repeat all earlier ones."""
        from textarena import GAME_ID

        _, written = self._inner.get_observation()
        return "\n".join(text for sender, text, _ in written if sender == GAME_ID) or None


def _cannot_begin(name: str, arguments: Any, error: Exception) -> ConfigError:
    what = f"TextArena cannot begin `{name}` for one player with {arguments}: "
    text = str(error)
    if data := re.search(r"nltk\.download\('([\w.-]+)'\)", text):
        return ConfigError(
            f"{what}it needs NLTK's `{data[1]}`.",
            fix=f"Type: python -m nltk.downloader {data[1]}",
            what=what,
            second_data=data[1],
        )
    if key := re.search(r"\b[A-Z_]+_API_KEY\b", text):
        return ConfigError(
            f"{what}another model plays in it. {text}",
            fix=f"Type: export {key[0]}=..., with your key",
            what=what,
            text=text,
            first_key=key[0],
        )
    return ConfigError(
        f"{what}{type(error).__name__}: {text}",
        fix="environment: textarena:GuessTheNumber-v0",
        what=what,
        kind=type(error).__name__,
        text=text,
    )


def factory(name: str, folder: Path, /, **arguments: Any) -> Callable[[], TextArena]:
    """Makes games of that name with these arguments of the game."""
    return functools.partial(TextArena, name, **arguments)

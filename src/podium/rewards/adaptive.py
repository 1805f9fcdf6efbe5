"""Weights that adapt: more for what hardly succeeds, less for what nearly always does.

    weights = AdaptiveWeights.of(names, base_weights, {"answer_correct": AdaptiveSettings()})
    weights = weights.after(rewards_RK)     # once a generation round
    weights.weights_K                       # for the next round

A completion succeeds in a reward function where its reward is above a threshold. The success rate is the share over the
last rounds. Under `low` the weight is multiplied by `raise_by`, over `high` by `lower_by`, within bounds around the
weight that was given. Pure functions of numbers that are the same on every rank.

Shape letters: R rollouts of a generation round over all ranks, K reward functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.errors import ConfigError
from podium.errors.texts import listed, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSettings:
    """Settings of one adaptive weight. Raises `ConfigError` for numbers that do not go together."""

    low: float = 0.3
    """Success rate under which the weight rises."""
    high: float = 0.8
    """Success rate over which it falls."""
    raise_by: float = 1.1
    """Factor a round, as is `lower_by`."""
    lower_by: float = 0.9
    least: float = 0.25
    """Bound, as is `most`, as a multiple of the weight that was given."""
    most: float = 4.0
    threshold: float | None = None
    """A completion succeeds above it; None: half of `maximum`."""
    maximum: float | None = None
    """The best reward there is; None: the largest that was seen. Of a penalty, 0."""
    window: int = 5
    """Rounds that the success rate looks back."""

    def __post_init__(self) -> None:
        problems = (
            (0 <= self.low <= self.high <= 1, "0 <= low <= high <= 1"),
            (self.raise_by >= 1 and math.isfinite(self.raise_by), "raise_by >= 1"),
            (0 < self.lower_by <= 1, "0 < lower_by <= 1"),
            (0 < self.least <= 1 <= self.most < math.inf, "0 < least <= 1 <= most"),
            (self.window >= 1, "window >= 1"),
        )
        broken = [rule for holds, rule in problems if not holds]
        if broken:
            raise ConfigError(f"adaptive weights need {' and '.join(broken)}", broken=" and ".join(broken))


def adaptive_settings(value: Any) -> AdaptiveSettings | None:
    """The settings that `adaptive: true` or a mapping stands for; None for false. Raises `ConfigError`.

    >>> adaptive_settings({"low": 0.2}).low
    0.2
    """
    if isinstance(value, AdaptiveSettings):
        return value
    if value is None or isinstance(value, bool):
        return AdaptiveSettings() if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is neither true nor a mapping", value=value)
    known = {field.name: field for field in dataclasses.fields(AdaptiveSettings)}
    for key, number in value.items():
        if key not in known:
            near = nearest(str(key), known)
            raise ConfigError(
                f"unknown setting `{key}`. There are {listed(known)}",
                fix=f"Did you mean `{near}`?" if near else "",
                settings=(key,),
                setting=key,
                known=known,
                near=near,
            )
        whole = key == "window"
        may_lack = known[key].default is None and number is None
        if not may_lack and (isinstance(number, bool) or not isinstance(number, int if whole else (int, float))):
            raise ConfigError(f"`{key}` must be a {'whole number' if whole else 'number'}, got {number!r}")
    return AdaptiveSettings(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveState:
    """One weight on its way."""

    factor: float = 1.0
    """Multiplies the weight that was given."""
    maximum: float = -math.inf
    """The largest reward seen."""
    minimum: float = math.inf
    rates: tuple[float, ...] = ()
    """Success rates of the last rounds, the latest last."""

    @property
    def rate(self) -> float:
        """Success rate over the window; NaN before the first round with an opinion."""
        return sum(self.rates) / len(self.rates) if self.rates else math.nan


def adapted(state: AdaptiveState, settings: AdaptiveSettings, rewards_R: np.ndarray) -> AdaptiveState:
    """The state after a round. Rewards that are NaN (no opinion) count neither way; a round of them changes nothing.

    >>> adapted(AdaptiveState(), AdaptiveSettings(), np.array([0.0, 0.0, 0.0, 1.0])).factor
    1.1
    >>> adapted(AdaptiveState(), AdaptiveSettings(), np.array([1.0, 1.0, np.nan])).factor
    0.9
    >>> adapted(AdaptiveState(), AdaptiveSettings(), np.array([0.0, 0.0])).factor  # never earned
    1.1
    """
    known = rewards_R[~np.isnan(rewards_R)]
    if known.size == 0:
        return state
    maximum = max(state.maximum, float(known.max()))
    minimum = min(state.minimum, float(known.min()))
    state = dataclasses.replace(state, maximum=maximum, minimum=minimum)
    if (threshold := _threshold(settings, state)) is None:
        return state
    rate = float((known > threshold).mean())
    state = dataclasses.replace(state, rates=(*state.rates, rate)[-settings.window :])
    factor = state.factor
    if state.rate < settings.low:
        factor = min(factor * settings.raise_by, settings.most)
    elif state.rate > settings.high:
        factor = max(factor * settings.lower_by, settings.least)
    return dataclasses.replace(state, factor=factor)


def _threshold(settings: AdaptiveSettings, state: AdaptiveState) -> float | None:
    """Half of the maximum; of penalties 0, and what costs nothing is a success.

    None where success cannot be told: all rewards were below 0, and no maximum is set.
    """
    if settings.threshold is not None:
        return settings.threshold
    maximum = state.maximum if settings.maximum is None else settings.maximum
    if maximum > 0:
        return maximum / 2
    if maximum < 0:
        return None
    return math.nextafter(0.0, -1.0) if state.minimum < 0 or settings.maximum is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveWeights:
    """The weights of all K reward functions, of which some adapt."""

    names_K: tuple[str, ...]
    base_K: np.ndarray
    """float64, as given."""
    settings: Mapping[int, AdaptiveSettings]
    """By number of the function; none: nothing adapts."""
    states: Mapping[int, AdaptiveState]

    @classmethod
    def of(cls, names_K: Sequence[str], base_K: np.ndarray, chosen: Mapping[str, Any] | None) -> AdaptiveWeights:
        """At the start of a run. Raises `ConfigError` for a name that no reward has, and for wrong settings."""
        settings: dict[int, AdaptiveSettings] = {}
        for name, value in (chosen or {}).items():
            if name not in names_K:
                near = nearest(name, names_K)
                raise ConfigError(
                    f"adaptive_rewards names no reward here ({listed(names_K)}): `{name}`.",
                    fix=f"Did you mean `{near}`?" if near else "",
                    settings=("adaptive_rewards", name),
                    names=names_K,
                    name=name,
                    near=near,
                )
            try:
                own = adaptive_settings(value)
            except ConfigError as error:
                raise ConfigError(
                    f"adaptive_rewards: `{name}`: {error.what}.",
                    fix=error.fix,
                    settings=("adaptive_rewards", name),
                    name=name,
                    what=error.what,
                ) from None
            if own is not None:
                settings[names_K.index(name)] = own
        states = {k: AdaptiveState() for k in settings}
        return cls(names_K=tuple(names_K), base_K=np.asarray(base_K, np.float64), settings=settings, states=states)

    @property
    def weights_K(self) -> np.ndarray:
        """float64: the weights of the round to come."""
        factors = [self.states[k].factor if k in self.states else 1.0 for k in range(len(self.names_K))]
        return self.base_K * np.array(factors)

    def after(self, rewards_RK: np.ndarray) -> AdaptiveWeights:
        """After a round of these rewards (all ranks together)."""
        states = {k: adapted(self.states[k], own, rewards_RK[:, k]) for k, own in self.settings.items()}
        return dataclasses.replace(self, states=states)

    def metrics(self, after: AdaptiveWeights) -> dict[str, float]:
        """`reward_weights/<name>` of a round for what adapts, and with what is known `after` it
        `rewards/<name>/success_rate`."""
        names = {k: self.names_K[k] for k in self.states}
        return {
            **{f"reward_weights/{name}": float(self.weights_K[k]) for k, name in names.items()},
            **{f"rewards/{names[k]}/success_rate": state.rate for k, state in after.states.items() if state.rates},
        }

    # ---- for checkpoints ----

    def to_json(self) -> dict[str, Any]:
        """The states by name, as plain numbers; JSON keeps every bit of a float."""
        known = {k: dataclasses.asdict(state).items() for k, state in self.states.items()}
        return {
            self.names_K[k]: {name: None if value in (math.inf, -math.inf) else value for name, value in own}
            for k, own in known.items()
        }

    def restored(self, saved: Mapping[str, Any]) -> AdaptiveWeights:
        """With the states that `to_json` wrote; what adapts only now starts at its given weight."""
        states = dict(self.states)
        for k in [k for k in states if self.names_K[k] in saved]:
            own = {name: value for name, value in saved[self.names_K[k]].items() if value is not None}
            states[k] = AdaptiveState(**{**own, "rates": tuple(own["rates"])})
        return dataclasses.replace(self, states=states)

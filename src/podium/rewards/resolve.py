"""Rewards as users give them become `Reward` records; what cannot work is an error before any weight is loaded.

The library's are in a table that the package fills (`LIBRARY`); `library_reward` gets one by name with its settings.

rewards = resolve_rewards([format_reward, "org/reward-model"])
check_rewards(rewards, dataset.column_names)
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from podium.data.columns import GOLD, SERVICES, TESTS
from podium.errors import ConfigError, RewardError
from podium.errors.texts import as_line, did_you_mean, listed, named_list, nearest, quoted
from podium.isolation.functions import function_name, is_async, location, parameters_of, unwrapped
from podium.isolation.reward_calls import VERL_GOLD, as_reward, asks_for_gold
from podium.rewards.from_file import FileReward, file_reward
from podium.rewards.model import RewardModel

GIVEN = ("prompts", "completions", "completion_ids", *SERVICES)
"""Arguments of every reward function besides the columns of the dataset."""

ENVIRONMENTS = "environments"
"""Argument with the environment of each completion, where there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its signature."""

    name: str
    """As in TRL's metrics; two rewards never share one."""
    function: Callable[..., Any]
    where: str
    """`file.py:12`, for messages; empty where Python does not know."""
    is_async: bool
    wants: frozenset[str] | None
    """Arguments it can take; None: all, it has `**kwargs`."""
    needs: tuple[str, ...]
    """Arguments without a default."""

    def __str__(self) -> str:
        return f"reward function `{self.name}`" + (f" ({self.where})" if self.where else "")


def resolve_rewards(
    reward_funcs: Any,
    reward_processing_classes: Any = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    device: Any = None,
) -> tuple[Reward, ...]:
    """TRL's `reward_funcs` as records: functions, callable objects, partials, reward models by name or as modules.

    Loads nothing: a reward model given by name is loaded when it is first asked, or by `load_reward_models`. The
    arguments are never changed. Raises `ConfigError`.
    """
    functions = as_list(reward_funcs)
    if not functions:
        raise ConfigError(
            "No reward source provided.", fix="Pass `reward_funcs`: a function, a reward model, or a list of them."
        )
    tokenizers = as_list(reward_processing_classes) or [None] * len(functions)
    if len(tokenizers) != len(functions):
        raise ConfigError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward "
            f"functions ({len(functions)}).",
            fix="Write None for those that are not reward models.",
            tokenizers_count=len(tokenizers),
            functions_count=len(functions),
        )
    model_settings: dict[str, Any] = {
        "model_init_kwargs": {"trust_remote_code": trust_remote_code, **(model_init_kwargs or {})},
        "chat_template_kwargs": chat_template_kwargs or {},
        "device": device,
    }
    rewards = []
    for index, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=True)):
        if isinstance(function, str) and ".py:" in function:
            function = file_reward(function)
        if isinstance(function, FileReward) and _takes_environments(function):
            function = function.in_this_process()
        if isinstance(function, str) or _is_module(function):
            function = RewardModel(function, tokenizer, **model_settings)
        rewards.append(_inspect(as_reward(function), index))
    names = distinct_names([reward.name for reward in rewards])
    return tuple(replace(reward, name=name) for reward, name in zip(rewards, names, strict=True))


def _takes_environments(function: FileReward) -> bool:
    """Whether a function has the argument, or takes any and finds it by its name."""
    parameters = function.parameters
    takes_any = parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = any(parameter.name == ENVIRONMENTS for parameter in parameters or ())
    return named or (takes_any and reads_environments(function.code))


def reads_environments(code: str) -> bool:
    """Whether the name of the argument stands in the code as text.

    >>> reads_environments('kw["environments"]'), reads_environments("def f(completions, environments): ...")
    (True, False)
    """
    return any(f"{mark}{ENVIRONMENTS}{mark}" in code for mark in "'\"")


def check_reward_models(
    rewards: Iterable[Reward], prompts: Sequence[Any] = (), max_completion_length: int | None = None
) -> None:
    """Raises `ModelError` for a reward model, alone or in a combination, that cannot score these prompts."""
    for reward in rewards:
        if isinstance(reward.function, RewardModel):
            reward.function.check(prompts, max_completion_length or 0)
        check_reward_models(getattr(reward.function, "parts", ()), prompts, max_completion_length)


def load_reward_models(rewards: Iterable[Reward]) -> None:
    """Loads the reward models that were given by name, so that a wrong name fails before anything is sampled."""
    for reward in rewards:
        if isinstance(reward.function, RewardModel):
            reward.function.load()
        load_reward_models(getattr(reward.function, "parts", ()))  # of a combination


def resolve_weights(reward_weights: Sequence[float] | None, reward_funcs: Any) -> tuple[float, ...]:
    """One weight per reward function, 1 by default. Raises `ConfigError` where the counts differ."""
    names = [reward.name if isinstance(reward, Reward) else callable_name(reward) for reward in as_list(reward_funcs)]
    if reward_weights is None:
        return (1.0,) * len(names)
    weights = tuple(float(weight) for weight in reward_weights)
    if len(weights) != len(names):
        raise ConfigError(
            f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(names)}): "
            f"the weights are {list(weights)}, the functions are {listed(names)}.",
            fix="give one weight for each function",
            weights_count=len(weights),
            names_count=len(names),
            weights=list(weights),
            names=names,
        )
    if not all(map(math.isfinite, weights)):
        raise ConfigError(
            f"reward_weights must be finite numbers; they are {list(weights)}.",
            settings=("reward_weights",),
            weights=list(weights),
        )
    return weights


def check_rewards(rewards: Sequence[Reward], columns: Iterable[str], *, environments: bool = False) -> None:
    """Raises one `RewardError` with every argument that a function needs and is not given.

    `columns`: the dataset's; `environments`: whether there are any, which functions get too.
    """
    offered = (*GIVEN, ENVIRONMENTS) if environments else GIVEN
    passed_on = [column for column in columns if column not in (*offered, "prompt", "completion")]
    available = [*passed_on, *offered]
    missing = [(reward, name) for reward in rewards for name in reward.needs if name not in available]
    problems = [
        f"{reward} needs `{name}`, which is neither a column nor given to every reward."
        + (f" Did you mean `{near}`?" if (near := near_column(name, [*passed_on, *GIVEN])) else "")
        for reward, name in missing
    ]
    needs_gold = [reward for reward in rewards if asks_for_gold(reward.wants) and not set(VERL_GOLD) & set(available)]
    either = " and ".join(f"`{name}`" for name in VERL_GOLD)
    problems += [f"{reward} needs one of the columns {either}." for reward in needs_gold]
    if not problems:
        return
    listed = f"Columns: {', '.join(passed_on) or 'none besides `prompt`'}. Given to every reward: {', '.join(offered)}."
    fix = "rename the column or the argument, or give the argument a default"
    if lost := next((reward for reward in rewards if {"args", "kwargs"} & set(reward.needs) - set(available)), None):
        fix = f"def {lost.name}(completions, **kwargs): asterisks are lost in its signature"
    raise RewardError(
        "\n".join([*problems, listed]),
        code="W002",
        fix=fix,
        missing=[name for _, name in missing],
        problems=problems,
        listed=listed,
    )


def near_column(name: str, names: Sequence[str]) -> str:
    """The name of the same meaning, else the one that is spelt nearly the same; empty where there is none.

    >>> near_column("tests", ["text", "test_list"]), near_column("solution", ["answer"]), near_column("x", ["answer"])
    ('test_list', 'answer', '')
    """
    alike = [other for other in names for kind in (GOLD, TESTS) if other in kind and name in kind]
    return alike[0] if alike else nearest(name, names)


def as_list(value: Any) -> list[Any]:
    """A new list: of nothing for None, of one for a single thing.

    >>> as_list(None), as_list(3), as_list((1, 2))
    ([], [3], [1, 2])
    """
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def callable_name(function: Any) -> str:
    """The name TRL's metrics use: of the function inside partials, of an object its class, of a model its last part.

    >>> callable_name(as_list), callable_name("org/reward-model")
    ('as_list', 'reward-model')
    """
    if isinstance(function, str) or _is_module(function):
        return RewardModel.name_of(function)
    return function_name(function)


def _inspect(function: Any, index: int) -> Reward:
    if inspect.isclass(function):
        raise ConfigError(
            f"reward_funcs[{index}] is the class {function.__name__}; pass an instance of it.",
            settings=("reward_funcs",),
            index=index,
            function=function.__name__,
        )
    if not callable(function):
        raise ConfigError(
            f"reward_funcs[{index}] is {type(function).__name__} {function!r:.60}; expected a function, a "
            "callable object, or a reward model (its name, or the module).",
            settings=("reward_funcs",),
            index=index,
            kind=type(function).__name__,
            function=function,
        )
    name = callable_name(function)
    where = _location(function)
    parameters = parameters_of(function)
    empty = inspect.Parameter.empty
    by_position = inspect.Parameter.POSITIONAL_ONLY
    if any(parameter.kind is by_position and parameter.default is empty for parameter in parameters or ()):
        raise ConfigError(
            f"reward function `{name}` ({where}) takes arguments by position only, but rewards are called with keyword "
            "arguments.",
            code="W001",
            fix="Remove the `/` from its signature.",
            name=name,
            place=where,
        )
    named = [
        parameter
        for parameter in parameters or ()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_all = parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return Reward(
        name=name,
        function=function,
        where=where,
        is_async=is_async(function),
        wants=None if takes_all else frozenset(parameter.name for parameter in named),
        needs=tuple(parameter.name for parameter in named if parameter.default is empty),
    )


def _location(function: Any) -> str:
    """Empty for what is not the user's Python."""
    inner = unwrapped(function)
    if isinstance(inner, FileReward):
        return inner.where
    return "" if isinstance(inner, RewardModel) else location(inner)


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """The second and later bearers of a name get `name_2`, `name_3`; whoever has a name first keeps it.

    >>> distinct_names(["a", "b", "a"])
    ('a', 'b', 'a_2')
    """
    used: list[str] = []
    for own in names:
        name = own
        number = 1
        while name in used or (number > 1 and name in names):
            number += 1
            name = f"{own}_{number}"
        used.append(name)
    return tuple(used)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a module cannot exist before torch was imported
    return torch is not None and isinstance(value, torch.nn.Module)


FACTORIES: dict[str, Callable[..., Callable[..., Any]] | str] = {}
"""Called with their settings, they give a reward function. `module:name` is imported when it is used."""

LIBRARY: dict[str, Callable[..., Any] | str] = {}
"""Every reward by its name in recipes."""


def library_function(name: str) -> Callable[..., Any]:
    """The reward function, or factory, of that name in the library."""
    function = LIBRARY[name]
    if not isinstance(function, str):
        return function
    module, _, attribute = function.partition(":")
    named: Callable[..., Any] = getattr(import_module(module), attribute)
    return named


def library_reward(name: str, **arguments: Any) -> Callable[..., Any]:
    """The reward function of that name with these settings. Raises `ConfigError` for a name or setting it lacks.

    >>> library_reward("regex_format", pattern="[0-9]+")(completions=["7", "seven"])
    [1.0, 0.0]
    """
    if name not in LIBRARY:
        near = nearest(name, LIBRARY)
        raise ConfigError(
            f"no reward `{name}` in the library. It has {listed(LIBRARY)}.",
            fix=f"Did you mean `{near}`?" if near else "podium rewards list",
            settings=(name,),
            name=name,
            library=LIBRARY,
            near=near,
        )
    function = library_function(name)
    settings = settings_of_reward(name)
    for argument in arguments:
        if argument not in settings:
            known = f"It takes {', '.join(settings)}." if settings else "It takes no settings."
            raise ConfigError(
                f"reward `{name}` has no setting `{argument}`. {known}",
                fix=did_you_mean(argument, settings) or as_line(argument, None),
                settings=(name,),
                name=name,
                argument=argument,
                known=known,
            )
    needed = [
        key for key, parameter in settings.items() if parameter.default is parameter.empty and key not in arguments
    ]
    if needed:
        raise ConfigError(f"reward `{name}` needs {named_list(needed)}.", settings=(name,), name=name, needed=needed)
    if name in FACTORIES:
        return function(**arguments)
    made = functools.partial(function, **arguments) if arguments else function
    _try_settings(name, made)
    return made


def _try_settings(name: str, made: Callable[..., Any]) -> None:
    """Scores no completions at all, so that a setting that cannot work is found now and not in the first round."""
    data = set(inspect.signature(library_function(name)).parameters) - set(settings_of_reward(name)) - {*SERVICES}
    try:
        made(**{column: [] for column in data})
    except ConfigError as error:
        raise ConfigError(
            f"reward `{name}`: {error.what}",
            code=error.code,
            fix=error.fix,
            settings=(name,),
            name=name,
            what=error.what,
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward `{name}` cannot work with these settings: {quoted(error)}",
            settings=(name,),
            name=name,
            error=error,
        ) from error


def settings_of_reward(name: str) -> dict[str, inspect.Parameter]:
    """The parameters that a recipe may set: all of a factory; those behind the `*` of a reward function."""
    parameters = inspect.signature(library_function(name)).parameters
    return {
        key: parameter
        for key, parameter in parameters.items()
        if name in FACTORIES or parameter.kind is parameter.KEYWORD_ONLY
    }

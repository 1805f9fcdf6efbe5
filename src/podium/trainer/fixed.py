"""Read-only lists, dicts, tensors and generation configs: a change of them would have no effect on training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from transformers import GenerationConfig

# fmt: off
_CHANGES = (
    "__delitem__", "__iadd__", "__imul__", "__ior__", "__isub__", "__itruediv__", "__setitem__", "append", "clear",
    "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
)
# fmt: on
"""Methods of lists, dicts and tensors that change them; of a tensor, those that end with one `_` as well."""


def fixed(value: Any, refuse: Callable[..., NoReturn]) -> Any:
    """A list, dict, tensor or `GenerationConfig` that calls `refuse` in place of every change; others as they are.

    Copies of it can be changed, and so can what is computed from it.

    >>> def refuse(*_):
    ...     raise AttributeError("fixed")
    >>> kept = fixed([1, 2], refuse)
    >>> kept.append(3)
    Traceback (most recent call last):
    AttributeError: fixed
    >>> kept + [3]
    [1, 2, 3]
    """
    kind = type(value)
    if kind in (list, dict):
        changes: dict[str, Any] = dict.fromkeys((name for name in _CHANGES if hasattr(kind, name)), refuse)
        return type(kind.__name__, (kind,), changes | {"__reduce__": lambda own: (kind, (kind(own),))})(value)
    if kind is Tensor:
        return value.as_subclass(_of_tensors(refuse))
    if kind is GenerationConfig:
        changes = {"__setattr__": refuse, "__reduce__": lambda own: (GenerationConfig.from_dict, (own.to_dict(),))}
        value.__class__ = type(kind.__name__, (kind,), changes)
    return value


def _of_tensors(refuse: Callable[..., NoReturn]) -> Any:
    class Fixed(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def plain(given: Any) -> Any:
                own = given.as_subclass(Tensor) if isinstance(given, cls) else given
                return type(given)(map(plain, given)) if type(given) in (list, tuple) else own

            if func.__name__ in _CHANGES or (func.__name__.endswith("_") and not func.__name__.endswith("__")):
                refuse()
            return func(*plain(args), **{key: plain(each) for key, each in (kwargs or {}).items()})

    return Fixed

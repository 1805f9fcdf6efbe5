"""A verb's flags as records: Typer sees each annotated field of a dataclass as an option of the verb."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_origin, get_type_hints


def takes_records(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by its `Annotated` fields, and fill the record when called.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: Annotated[int, "--width"] = 3
    ...     area: int = 0
    >>> @takes_records
    ... def draw(size: Size, *, colour: Annotated[str, "--colour"] = "red") -> None:
    ...     print(size, colour)
    >>> list(inspect.signature(draw).parameters)
    ['width', 'colour']
    >>> draw(width=4, colour="blue")
    Size(width=4, area=0) blue
    """
    hints = get_type_hints(verb, include_extras=True)
    hints.pop("return", None)
    records = {name: tuple(_flags(hint)) for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        for name, flags in records.items():
            given[name] = hints[name](**{flag.name: given.pop(flag.name) for flag in flags})
        verb(**given)

    parameters = [
        parameter
        for own in inspect.signature(verb).parameters.values()
        for parameter in records.get(own.name, [own.replace(annotation=hints[own.name], kind=own.KEYWORD_ONLY)])
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _flags(record: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        if get_origin(hints[field.name]) is Annotated:
            annotation, default = hints[field.name], _default(field)
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default

"""Modules that are imported when something of them is first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of its name, which is imported when an attribute is looked up."""

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # asked of every name by what looks for decorated functions, such as doctest
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)

"""Modules, and names of packages, that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of its name, which is imported when an attribute is looked up."""

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # asked of every name by what looks for decorated functions, such as doctest
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


def imported(name: str) -> Any:
    """What `package.module:attribute` names, imported now.

    >>> imported("podium.errors:ConfigError").__name__
    'ConfigError'
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def lazy_names(package: str, **homes: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562): by module, the names in it; a module's own name is the module itself.

    Modules are relative to the package; one that begins with a dot is beside it.

    >>> lazy_names("podium", errors="Finding PodiumError")("Finding").__module__
    'podium.errors'
    """
    module_of = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        module = import_module(f".{module_of[name]}", package)
        return module if module_of[name].rpartition(".")[2] == name else getattr(module, name)

    return load

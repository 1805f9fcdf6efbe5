"""Objects in place of the environments of completions that were not played: in a test, a baseline, a second call.

environments = StandIns(groups)
score(groups, [reward], environments=environments)
environments.asked         # whether the function looked into one, so that its values mean nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podium.records import Group


class StandIns(list[Any]):
    """One stand-in for each completion of the groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.asked = False
        """Whether anything of any of them was read, whatever the function did with the error that this raises."""

        def ask(_: object, *arguments: object) -> Any:
            self.asked = True
            raise AttributeError("this completion was not played in an environment")

        reads = ("__getattribute__", "__getitem__", "__iter__", "__len__", "__call__", "__contains__")
        stand_in = type("Environment", (), dict.fromkeys(reads, ask))
        super().__init__(stand_in() for group in groups for _ in group.completions)

"""The test of tools and environments, by the name under which it is public: see `podium.tester.environments`."""

from __future__ import annotations

from podium.lazy import lazy_names

__getattr__ = lazy_names("podium", **{"tester.environments": "audit examine EnvironmentReport ExamineSettings"})

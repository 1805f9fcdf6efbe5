"""The health of a run: detectors over its numbers and its groups. `monitor.DETECTORS` lists them all."""

from podium.runs.monitors import agents
from podium.runs.monitors.detection import ends
from podium.runs.monitors.history import MetricHistory, RunSettings, run_settings
from podium.runs.monitors.monitor import DETECTORS, Issue, Monitor, diagnose, rank

__all__ = [
    "DETECTORS",
    "Issue",
    "MetricHistory",
    "Monitor",
    "RunSettings",
    "agents",
    "diagnose",
    "ends",
    "rank",
    "run_settings",
]

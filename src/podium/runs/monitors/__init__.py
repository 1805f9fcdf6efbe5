"""The health of a run: detectors over its numbers and its groups. `table.DETECTORS` lists them all."""

from podium.runs.monitors.detection import Detection, Detector, ends
from podium.runs.monitors.history import MetricHistory, RoundView, RunSettings, fixed_reward, round_view, settings_of
from podium.runs.monitors.table import DETECTORS, Rule
from podium.runs.monitors.watch import Condition, Watch, diagnose, rank

__all__ = [
    "DETECTORS",
    "Condition",
    "Detection",
    "Detector",
    "MetricHistory",
    "RoundView",
    "Rule",
    "RunSettings",
    "Watch",
    "diagnose",
    "ends",
    "fixed_reward",
    "rank",
    "round_view",
    "settings_of",
]

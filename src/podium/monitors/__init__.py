"""The health of a run: detectors over its numbers and its groups. `table.DETECTORS` lists them all."""

from podium.monitors.sight import RoundView, RunSettings, Sight, fixed_reward, round_view, settings_of
from podium.monitors.symptom import Detector, Symptom, ends
from podium.monitors.table import DETECTORS, Rule
from podium.monitors.watch import Condition, Watch, diagnose, rank

__all__ = [
    "DETECTORS",
    "Condition",
    "Detector",
    "RoundView",
    "Rule",
    "RunSettings",
    "Sight",
    "Symptom",
    "Watch",
    "diagnose",
    "ends",
    "fixed_reward",
    "rank",
    "round_view",
    "settings_of",
]

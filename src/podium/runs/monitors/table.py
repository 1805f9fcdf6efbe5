"""Every detector, once: its code, how soon it grows worse, and what explains what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from podium.runs.monitors import collapse, drift, hacking, labels, machine, signal, texts
from podium.runs.monitors.detection import Detector


class Rule(NamedTuple):
    """One row."""

    look: Detector
    rank: int
    """Of findings of one severity the lowest rank comes first: causes before what follows from them."""
    grows_after: int | None = None
    """Steps in a row after which a note becomes a warning and a warning an error; None: never."""


DETECTORS: Mapping[str, Rule] = {
    "M101": Rule(signal.no_signal, 80, 20),
    "M102": Rule(signal.constant_reward, 30),
    "M103": Rule(signal.silent_reward, 32),
    "M104": Rule(signal.reward_flat, 90),
    "M105": Rule(signal.one_reward_carries, 92, 60),
    "M106": Rule(signal.rewards_cancel, 26, 10),
    "M107": Rule(signal.flipped_reward, 7),
    "M108": Rule(signal.one_prompt_dominates, 60, 20),
    "M109": Rule(signal.repeated_prompt, 6, 6),
    "M110": Rule(signal.stuck_prompts, 94),
    "M111": Rule(signal.reward_falls, 50, 20),
    "M121": Rule(collapse.spread_vanishes, 70),
    "M122": Rule(collapse.duplicates, 22, 8),
    "M123": Rule(collapse.too_cold, 4),
    "M124": Rule(collapse.entropy_collapse, 40, 20),
    "M125": Rule(collapse.repetition, 42, 20),
    "M126": Rule(collapse.entropy_explodes, 16, 10),
    "M131": Rule(drift.non_finite, 0),
    "M132": Rule(drift.kl_explodes, 10, 10),
    "M133": Rule(drift.clips_much, 46, 20),
    "M134": Rule(drift.gradient_spikes, 72),
    "M135": Rule(drift.sampler_disagrees, 5, 10),
    "M136": Rule(drift.steps_too_large, 12, 20),
    "M137": Rule(drift.steps_too_small, 14, 20),
    "M138": Rule(drift.weights_frozen, 2),
    "M139": Rule(drift.adapter_rate_low, 62),
    "M141": Rule(texts.truncated, 24, 20),
    "M142": Rule(texts.length_grows, 44, 20),
    "M143": Rule(texts.length_collapses, 48, 20),
    "M144": Rule(texts.empty, 28, 20),
    "M145": Rule(texts.wrong_language, 52, 20),
    "M146": Rule(texts.format_ignored, 18, 20),
    "M147": Rule(texts.beyond_the_end, 54, 40),
    "M151": Rule(hacking.held_out_falls, 34, 60),
    "M152": Rule(hacking.pays_for_length, 20, 10),
    "M153": Rule(hacking.pays_for_a_phrase, 36, 20),
    "M154": Rule(hacking.held_back_falls, 38, 40),
    "M155": Rule(labels.answers_elsewhere, 8),
    "M156": Rule(labels.suspicious_labels, 9),
    "M157": Rule(hacking.differs_on_the_same, 3),
    "M158": Rule(hacking.pays_for_the_prompt, 13, 20),
    "M159": Rule(hacking.one_for_all, 21, 20),
    "M161": Rule(machine.memory_creeps, 56, 12),
    "M162": Rule(machine.speed_falls, 96),
    "M163": Rule(machine.slow_reward, 58),
}
"""`podium explain CODE` shows the page of each."""

"""Time left: from the typical step, never from the first; evaluations and checkpoints count as often as they come."""

from __future__ import annotations

import pytest

from podium.trainer import health
from podium.trainer.health import Pace


def test_one_slow_step_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 115.0, 215.0, 225.0])
    monkeypatch.setattr(health.time, "perf_counter", lambda: next(now))
    pace = Pace()
    pace.step_ended()
    assert pace.left(1, 10) is None, "the first step holds the proof"
    pace.step_ended()
    assert pace.left(2, 10) == pytest.approx(80)
    pace.interrupted()  # an evaluation of 5 s after two steps
    assert pace.left(2, 10) == pytest.approx(8 * 12.5)
    pace.step_ended()  # one step of 100 s
    pace.step_ended()
    assert pace.left(4, 10) == pytest.approx(6 * (10 + 5 / 4))

"""The way from `GRPOTrainer.train` to a sampled token is short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.engines.live import engine

PACKAGE = str(Path(podium.__file__).parent)
MOST = 11


def test_a_sampled_token_is_few_frames_away(make_trainer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of the package's own files, `train` and the drawing function included."""
    stacks: list[list[str]] = []
    drawing = engine.draw

    def draw(*given: Any) -> Any:
        frame, names = sys._getframe(1), [drawing.__qualname__]
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back
        stacks.append(names)
        return drawing(*given)

    monkeypatch.setattr(engine, "draw", draw)
    make_trainer(max_steps=1).train()
    deepest = max(stacks, key=len)
    assert len(deepest) <= MOST, f"{len(deepest)} frames: {' -> '.join(deepest)}"
    assert deepest[0] == "GRPOTrainer.train"

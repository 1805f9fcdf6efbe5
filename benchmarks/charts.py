"""Line charts as SVG, for the pictures in the documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#db2777")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line; lines of the same name have one entry in the legend."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False

    @property
    def style(self) -> str:
        """Attributes of its stroke."""
        return f'stroke="{self.colour}"' + ' stroke-dasharray="5 4"' * self.dashed


def line_chart(
    lines: Sequence[Line],
    *,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_title: str,
    y_format: str = "{:g}",
    width: int = 680,
    height: int = 320,
) -> str:
    """An SVG with both axes from 0 to their last ticks, and a legend on the right."""
    legend = {line.name: line for line in lines}
    left, top, right, bottom = 48, 16, width - 54 - 7 * max(map(len, legend)), height - 40

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / x_ticks[-1] * (right - left), bottom - y / y_ticks[-1] * (bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for tick in y_ticks:
        _, y = place(0, tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{y_format.format(tick)}</text>')
    parts += [
        f'<text x="{place(tick, 0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>' for tick in x_ticks
    ]
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 6}" text-anchor="middle">{x_title}</text>')
    for line in lines:
        points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line.points)
        parts.append(f'<polyline points="{points}" fill="none" {line.style} stroke-width="1.6"/>')
    for i, line in enumerate(legend.values()):
        y = top + 14 + 20 * i
        parts.append(f'<path d="M{right + 12} {y - 4}h16" {line.style} stroke-width="3"/>')
        parts.append(f'<text x="{right + 34}" y="{y}">{line.name}</text>')
    return "\n".join([*parts, "</svg>", ""])

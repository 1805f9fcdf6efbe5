"""A run as a page: `podium report` writes it into one file, `podium watch` serves it while the run goes on."""

from podium.runs.report.page import WITHOUT_CHARTS, has_charts, render, write_report

__all__ = ["WITHOUT_CHARTS", "has_charts", "render", "write_report"]

"""A run as a page: `podium report` writes it into one file, `podium watch` serves it while the run goes on."""

from podium.runs.report.page import render, write_report

__all__ = ["render", "write_report"]

"""A run as a page: `podium report` writes it into one file, `podium watch` serves it while the run goes on."""

from podium.report.page import render, write_report
from podium.report.source import Source, read_source

__all__ = ["Source", "read_source", "render", "write_report"]

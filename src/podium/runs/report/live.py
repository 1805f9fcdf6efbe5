"""The page of a run in progress: served on this machine, read-only, with news when the page polls.

Other pages in the same browser cannot read it: a request whose `Host` is not this server's is refused (DNS rebinding),
and no answer allows other origins. Beyond this machine nothing is served without a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from podium.errors import ConfigError
from podium.isolation.threads import BoundedServer
from podium.runs.report.page import policy_of, render, run_data
from podium.runs.run import RECORD, Run

SHARE = 0.1
"""Share of one processor core for reading the run's folder: training needs the rest."""

MIN_KEY = 16
"""Least length of a key that lets other machines read."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(slots=True)
class WatchedRuns:
    """Runs that are read again when their folders have changed, but not all the time."""

    folders: Sequence[Path]
    runs: list[Run] = field(default_factory=list)
    version: str = ""
    not_before: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def refresh(self) -> str:
        """Read changes; the version of the data."""
        with self.lock:
            begun = time.monotonic()
            if begun >= self.not_before and (now := signature(self.folders)) != self.version:
                self.runs = [Run.load(folder) for folder in self.folders]
                self.version = now
                done = time.monotonic()
                self.not_before = done + (done - begun) / SHARE
            return self.version

    def news(self, after: Sequence[int]) -> dict[str, Any]:
        """All data of the page, with completions of later steps only."""
        runs = [run_data(run, after_step=step) for run, step in zip(self.runs, after, strict=True)]
        return {"version": self.version, "runs": runs}


def signature(folders: Sequence[Path]) -> str:
    """A digest of names, sizes and times of the files that a page is made of."""
    every = [place for folder in folders for place in (folder, *(part.run.folder for part in Run(folder).parts))]
    seen = []
    for path in (folder / name for folder in every for name in RECORD):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):  # rollouts are merged into larger files now and then
                seen.append(f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}")
    return hashlib.sha256("\n".join(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class PageServer(BoundedServer):
    """Serves `/` (the page) and `/data` (news), GET alone.

    Args:
        folders: one run, or two.
        host: where to listen.
        port: 0 takes any free one.
        key: secret of the readers; needed when other machines can reach `host`.

    Raises:
        ConfigError: another machine could read, and there is no key, or a short one.
        DataError: a folder that holds no run.
    """

    def __init__(self, folders: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0, key: str = "") -> None:
        if not is_local(host) and len(key) < MIN_KEY:
            raise ConfigError(
                f"on `{host}` other machines could read this run.",
                fix=f"Give a key of at least {MIN_KEY} characters, which goes into the address: podium watch "
                f"RUN --host {host} --key SECRET. Or leave --host out.",
                host=host,
                min_key=MIN_KEY,
            )
        self.watched = WatchedRuns(folders)
        self.watched.refresh()
        self.key = key
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}.",
                fix="Choose another --port.",
                host=host,
                port=port,
                strerror=error.strerror,
            ) from None

    @property
    def url(self) -> str:
        """The address to open."""
        host = str(self.server_address[0])
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/" + (f"?key={self.key}" if self.key else "")


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0"), is_local("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "podium"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        if not self.server.key and self.headers.get("Host") not in hosts:  # a foreign name bound to this address
            return self._say(HTTPStatus.FORBIDDEN, "not the address of this server")
        if not hmac.compare_digest(query.get("key", "").encode(), self.server.key.encode()):
            return self._say(HTTPStatus.FORBIDDEN, "the key is missing or wrong")
        if (answer := PATHS.get(address.path)) is None:
            return self._say(HTTPStatus.NOT_FOUND, "nothing here")
        return answer(self, query)

    def page(self, query: dict[str, str]) -> None:
        """The page with the present data."""
        html = render(self.server.watched.runs, live=self.server.watched.refresh())
        policy = {"Content-Security-Policy": policy_of(live=True)}
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", html.encode(), policy)

    def news(self, query: dict[str, str]) -> None:
        """The data, if newer than `version`, with completions `after` these steps; else 204."""
        if self.server.watched.refresh() == query.get("version"):
            return self._send(HTTPStatus.NO_CONTENT, None, b"")
        try:
            content = self.server.watched.news([int(step) for step in query.get("after", "").split(",")])
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "`after` is a step for every run")
        return self._send(HTTPStatus.OK, "application/json", json.dumps(content, allow_nan=False).encode())

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, kind: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if kind:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: the terminal shows the run."""


PATHS: dict[str, Callable[[_Handler, dict[str, str]], None]] = {"/": _Handler.page, "/data": _Handler.news}

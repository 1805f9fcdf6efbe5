"""The endpoint of a round's programs: OpenAI's paths on 127.0.0.1, one path and one key for each session.

Whatever a program sends ends at its own connection: bodies are bounded, slow ones are given up, and so are connections
beyond a number. A request waits in a queue until the thread that owns the engine takes it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import unquote

from podium.agents.programs.dialects import (
    Responses,
    message_answer,
    message_chunks,
    message_error,
    message_request,
    response_answer,
    response_chunks,
    response_request,
)
from podium.agents.programs.wire import (
    FORMS,
    LONGEST_BODY,
    ApiError,
    Asked,
    Drawn,
    chat_answer,
    chat_chunks,
    chat_request,
    text_answer,
    text_chunks,
    text_request,
)
from podium.isolation.connections import BoundedServer
from podium.records import MOST_NESTED, is_too_deep

MOST_WAITING = 64
"""Requests of one session that wait at a time."""
MOST_GIVEN_UP = 100
"""Requests that the client of a session may give up; all further ones are refused, as it might never end."""
LONGEST_LINE = 1024
"""Bytes of a line between the chunks of a body."""
READ_SECONDS = 30.0
"""Within which a request must have come, and each part of an answer be taken."""


class _Path(NamedTuple):
    request: Callable[[Mapping[str, Any]], Asked]
    answer: Callable[[Asked, Drawn], dict[str, Any]]
    chunks: Callable[[Asked, Drawn], Iterator[dict[str, Any]]]
    error: Callable[[ApiError], dict[str, Any]] = lambda error: error.body
    last: bytes = b""
    """What ends a stream."""
    kept: bool = False
    """Whether a later request may continue an answer by its id."""


PATHS: Mapping[str, _Path] = {
    "chat/completions": _Path(chat_request, chat_answer, chat_chunks, last=b"data: [DONE]\n\n"),
    "completions": _Path(text_request, text_answer, text_chunks, last=b"data: [DONE]\n\n"),
    "responses": _Path(response_request, response_answer, response_chunks, kept=True),
    "messages": _Path(message_request, message_answer, message_chunks, message_error),
}


@dataclass(slots=True, eq=False)
class Seat:
    """The place of one program at the endpoint."""

    episode: int
    id: str = field(default_factory=partial(secrets.token_urlsafe, 12))
    key: str = field(default_factory=partial(secrets.token_urlsafe, 24))
    open: bool = True
    waiting: int = 0
    """Requests without an answer so far."""
    refusal: ApiError | None = None
    """The answer to all further requests, where the session has used what it may."""
    clock: tuple[float, float | None] = (0.0, None)
    """Seconds until the program last began to wait, and when it last went on by itself, by `time.monotonic`; None: it
    waits, has not begun or is over. One value, as other threads read it."""
    rejected: int = 0
    """Requests that were answered with an error, but for limits and the end of the session."""
    rejection: str = ""
    """The first of these errors."""
    asked: int = 0
    """Requests that came, but for those that were wrong in themselves."""
    given_up: int = 0
    """Requests whose client went before the answer."""
    given_up_after: float = 0.0
    """Seconds that the first of them had waited."""
    forms: set[str] = field(default_factory=set)
    """Arguments by which its requests prescribed the form of an answer."""
    responses: Responses = field(default_factory=Responses)

    def begin(self) -> None:
        """Let its time run."""
        self.clock = self.clock[0], time.monotonic()

    def pause(self) -> None:
        """It waits for an answer, or is over."""
        self.clock = self.own_seconds(), None

    def answered(self) -> None:
        """One of its requests was answered."""
        self.waiting -= 1
        if not self.waiting and self.open:
            self.begin()

    def own_seconds(self) -> float:
        """Seconds that the program has taken by itself."""
        spent, since = self.clock
        return spent + (0.0 if since is None else time.monotonic() - since)


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits for its answer."""

    seat: Seat
    asked: Asked
    came: float = field(default_factory=time.monotonic)
    own: float = 0.0
    """Seconds that its program had taken by itself."""
    answer: Future[Drawn] = field(default_factory=Future)
    gone: Callable[[], bool] = lambda: False
    """Whether its client has gone."""


class Inbox:
    """Requests between the threads of the endpoint and the one that owns the engine."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.jobs: list[Job] = []
        self.arrived = 0.0
        """When the last request came, by `time.monotonic`."""
        self.parallel = False
        """Whether a program has ever asked for two answers at a time."""

    def begin(self, seat: Seat) -> None:
        """Let the program's own time run, unless it asks or is over already."""
        with self.changed:
            if seat.open and not seat.waiting:
                seat.begin()

    def put(self, seat: Seat, asked: Asked, gone: Callable[[], bool]) -> Job:
        """Let a request wait. Raises `ApiError` where the session is over, or has too many already."""
        job = Job(seat, asked, gone=gone)
        with self.changed:
            seat.asked += 1
            if not seat.open:
                raise ApiError(404, "The session is over.", code="session_not_found")
            if seat.refusal is not None:
                raise seat.refusal
            if seat.waiting >= MOST_WAITING:
                what = f"Rate limit reached: {MOST_WAITING} requests of this session wait already"
                raise ApiError(429, what, code="rate_limit_exceeded")
            if not seat.waiting:
                seat.pause()
            job.own = seat.own_seconds()
            seat.waiting += 1
            seat.forms |= FORMS.keys() & set(asked.decided)
            self.parallel |= seat.waiting > 1
            self.jobs.append(job)
            self.arrived = time.monotonic()
            self.changed.notify_all()
        return job

    def drop(self) -> None:
        """Forget the waiting requests whose clients have gone."""
        with self.changed:
            self.jobs = [job for job in self.jobs if not self.cancel_if_gone(job)]

    def cancel_if_gone(self, job: Job) -> bool:
        """Cancel and count a request whose client has disconnected, as at its timeout. Return whether it has."""
        if not job.gone():
            return False
        with self.changed:
            seat = job.seat
            seat.given_up_after = seat.given_up_after or time.monotonic() - job.came
            seat.given_up += 1
            if seat.given_up >= MOST_GIVEN_UP:
                what = f"Rate limit reached: {MOST_GIVEN_UP} requests of this session were given up by the client"
                seat.refusal = ApiError(429, what, code="rate_limit_exceeded")
            seat.answered()
        return job.answer.cancel()

    def reject(self, seat: Seat, error: ApiError) -> None:
        """Count a request that was wrong in itself, as the program may hide the error; limits do not count."""
        if error.status in (429, 503) or error.code == "session_not_found":
            return
        with self.changed:
            seat.rejected += 1
            seat.rejection = seat.rejection or f"{error.status}: {error}"

    def close(self, seat: Seat) -> None:
        """Take no more requests of a session, and refuse those that wait."""
        with self.changed:
            seat.open = False
            seat.pause()
            refused, self.jobs = [x for x in self.jobs if x.seat is seat], [x for x in self.jobs if x.seat is not seat]
            self.changed.notify_all()
        for job in [each for each in refused if not self.cancel_if_gone(each)]:
            refuse(job, ApiError(404, "The session is over.", code="session_not_found"))


def refuse(job: Job, error: Exception) -> None:
    """Answer a job with an error, unless its client has gone."""
    with contextlib.suppress(Exception):
        job.answer.set_exception(error)


class Endpoint:
    """The server of a round; a context."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.seats: dict[str, Seat] = {}
        self._server = _Server(("127.0.0.1", 0), self)

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="podium-endpoint", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for seat in self.seats.values():
            self.inbox.close(seat)
        self._server.shutdown()
        self._server.server_close()
        self._server.drop()

    def seat(self, episode: int) -> Seat:
        """A new session, with a path and a key that nobody can guess."""
        seat = Seat(episode)
        self.seats[seat.id] = seat
        return seat

    def base_url(self, seat: Seat) -> str:
        """As an OpenAI client takes it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/sessions/{seat.id}/v1"

    def find(self, path: str, key: str) -> tuple[Seat, str]:
        """The seat and the rest of a path. Raises `ApiError` for another session or another key."""
        empty, sessions, id, version, *rest = [*path.partition("?")[0].split("/"), *[""] * 4]
        seat = self.seats.get(id) if (empty, sessions, version) == ("", "sessions", "v1") else None
        if seat is None:
            raise ApiError(404, "There is no such session.", code="session_not_found")
        if not hmac.compare_digest(key.encode(), seat.key.encode()):
            raise ApiError(
                401, "Incorrect API key provided: give the `api_key` of this session.", code="invalid_api_key"
            )
        return seat, _words("/".join(rest))


def _words(path: str) -> str:
    """A path without slashes that stand for nothing."""
    return "/".join(filter(None, path.split("/")))


def _bounded(length: int) -> int:
    if not 0 <= length <= LONGEST_BODY:
        raise ApiError(413, f"The request has {length:,} bytes; {LONGEST_BODY:,} are the most.")
    return length


class _Server(BoundedServer):
    def __init__(self, address: tuple[str, int], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    disable_nagle_algorithm = True
    """Else the body waits behind the headers until the client acknowledges them, which it delays by 40 ms."""
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing: paths have sessions in them."""

    def do_GET(self) -> None:
        """The list of models, which some frameworks ask for first, or one of them: any name is the policy's."""
        seat: Seat | None = None
        try:
            seat, rest = self._seat()
            kind, _, name = rest.partition("/")
            if kind != "models":
                raise ApiError(404, f"There is no path /v1/{rest[:80]} to GET; there is: models.")
            model = {"id": unquote(name) or "policy", "object": "model", "created": 0, "owned_by": "podium"}
            self._send(200, model if name else {"object": "list", "data": [model]})
        except ApiError as error:
            self._refuse(seat, error, error.body)

    def do_POST(self) -> None:
        """One request."""
        path = PATHS.get(_words(self.path.partition("?")[0].partition("/v1/")[2]))
        seat: Seat | None = None
        try:
            seat, rest = self._seat()
            if path is None:
                raise ApiError(404, f"There is no path /v1/{rest[:80]}; there are: {', '.join(PATHS)}.")
            body = seat.responses.continued(self._body()) if path.kept else self._body()
            asked = path.request(body)
            drawn = self.server.endpoint.inbox.put(seat, asked, self._is_gone).answer.result()
            if path.kept:
                seat.responses.keep(body, drawn)
            if asked.stream:
                self._stream(path, path.chunks(asked, drawn))
            else:
                self._send(200, path.answer(asked, drawn))
        except ApiError as error:
            self._refuse(seat, error, error.body if path is None else path.error(error))

    def _is_gone(self) -> bool:
        """Whether the client has closed its connection; nothing is read of it while an answer is waited for."""
        try:
            look = select.poll()
            look.register(self.connection, select.POLLIN)
            return bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _seat(self) -> tuple[Seat, str]:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else self.headers.get("x-api-key", "")
        return self.server.endpoint.find(self.path, given.strip())

    def _body(self) -> Mapping[str, Any]:
        """The JSON of a request. Raises `ApiError` for what is too long, too slow or no object."""
        deadline = time.monotonic() + READ_SECONDS
        try:
            body = json.loads(b"".join(self._parts(deadline)))
        except (ValueError, RecursionError):
            raise ApiError(400, "We could not parse the JSON body of your request.") from None
        if not isinstance(body, dict):
            raise ApiError(400, "The JSON body of your request is no object.")
        if is_too_deep(body):
            raise ApiError(400, f"The JSON body of your request is nested more than {MOST_NESTED} deep.")
        self.connection.settimeout(READ_SECONDS)
        return body

    def _parts(self, deadline: float) -> Iterator[bytes]:
        """The body in one part, or in the chunks of a client that does not know its length beforehand."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = self.headers.get("Content-Length", "")
            if not length.isascii() or not length.isdigit():
                raise ApiError(411, "The request has no Content-Length.")
            yield self._read(_bounded(int(length)), deadline)
            return
        total = 0
        while size := _bounded(int(self._line(deadline).partition(b";")[0], 16)):
            total = _bounded(total + size)
            yield self._read(size + 2, deadline)[:-2]
        while self._line(deadline).strip():  # trailers
            pass

    def _line(self, deadline: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            if len(line) == LONGEST_LINE:
                raise ApiError(400, "A line between the chunks of the body is too long.")
            line += self._read(1, deadline)
        return line

    def _read(self, length: int, deadline: float) -> bytes:
        parts = list[bytes]()
        while length > 0:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            part = self.rfile.read1(min(length, 1 << 16))
            if not part:
                raise ApiError(400, "The request ended early.")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _refuse(self, seat: Seat | None, error: ApiError, body: Mapping[str, Any]) -> None:
        """Answer with an error; the body that was not read goes with the connection."""
        if seat is not None:
            self.server.endpoint.inbox.reject(seat, error)
        self.close_connection = True
        retries = {"x-should-retry": "false"}  # which OpenAI's client would do, and wait in between
        self._send(error.status, body, retries)

    def _send(self, status: int, body: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(more or {})}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, path: _Path, chunks: Iterator[dict[str, Any]]) -> None:
        """Server-sent events, named by their types; the end of the connection is the end of the answer."""
        self.close_connection = True
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        for chunk in chunks:
            name = f"event: {chunk['type']}\n" if "type" in chunk else ""
            self.wfile.write(f"{name}data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(path.last)

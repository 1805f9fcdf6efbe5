"""The endpoint of a round's programs: OpenAI's paths on 127.0.0.1, one path and one key for each session.

Whatever a program sends ends at its own connection: bodies are bounded, slow ones are given up, and so are connections
beyond a number. A request waits at its client until the episode of the program takes it and answers it.
"""

from __future__ import annotations

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
    Answer,
    ApiError,
    Asked,
    chat_answer,
    chat_chunks,
    chat_request,
    text_answer,
    text_chunks,
    text_request,
)
from podium.isolation.threads import BoundedServer
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
    answer: Callable[[Asked, Answer], dict[str, Any]]
    chunks: Callable[[Asked, Answer], Iterator[dict[str, Any]]]
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


class Clock:
    """Seconds that a program has taken by itself. Some threads start and stop it while others read it."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)
        """Seconds until it was last stopped, and when it was last started, by `time.monotonic`; None: it stands."""

    def start(self) -> None:
        self._state = self._state[0], time.monotonic()

    def stop(self) -> None:
        self._state = self.seconds, None

    @property
    def seconds(self) -> float:
        passed, since = self._state
        return passed + (0.0 if since is None else time.monotonic() - since)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """A request that waits for its answer."""

    asked: Asked
    has_left: Callable[[], bool]
    """Whether the connection that it came by has been closed at the other end."""
    own: float
    """Seconds that its program had taken by itself."""
    came: float = field(default_factory=time.monotonic)
    answer: Future[Answer] = field(default_factory=Future)


class Client:
    """One program at the endpoint: its path, its key and its requests.

    Threads of connections `put` requests, the thread of its episode takes and answers them. The program's own time runs
    while none of them waits.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.id = secrets.token_urlsafe(12)
        self.key = secrets.token_urlsafe(24)
        self.changed = threading.Condition()
        """Notified when a request comes, and when it is closed."""
        self.is_open = True
        self.waiting: list[PendingRequest] = []
        """Requests without an answer so far."""
        self.new: list[PendingRequest] = []
        """Those of them that were not taken."""
        self.arrived = 0.0
        """When the last request came, by `time.monotonic`."""
        self.refusal: ApiError | None = None
        """The answer to all further requests, where the session has used what it may."""
        self.clock = Clock()
        self.asked = 0
        """Requests that came, but for those that were wrong in themselves."""
        self.rejected = 0
        """Requests that were answered with an error, but for limits and the end of the session."""
        self.rejection = ""
        """The first of these errors."""
        self.given_up = 0
        """Requests whose connection was closed before the answer."""
        self.given_up_after = 0.0
        """Seconds that the first of them had waited."""
        self.forms: set[str] = set()
        """Arguments by which its requests prescribed the form of an answer."""
        self.responses = Responses()

    @property
    def base_url(self) -> str:
        """As an OpenAI client takes it."""
        return f"{self.endpoint.url}/sessions/{self.id}/v1"

    def begin(self) -> None:
        """Let the program's own time run, unless it asks or is over already."""
        with self.changed:
            if self.is_open and not self.waiting:
                self.clock.start()

    def put(self, asked: Asked, has_left: Callable[[], bool]) -> PendingRequest:
        """Let a request wait. Raises `ApiError` where the session is over, or has too many already."""
        with self.changed:
            self.asked += 1
            if not self.is_open:
                raise session_over()
            if self.refusal is not None:
                raise self.refusal
            if len(self.waiting) >= MOST_WAITING:
                what = f"Rate limit reached: {MOST_WAITING} requests of this session wait already"
                raise ApiError(429, what, code="rate_limit_exceeded")
            if not self.waiting:
                self.clock.stop()
            self.forms |= FORMS.keys() & set(asked.decided)
            request = PendingRequest(asked=asked, has_left=has_left, own=self.clock.seconds)
            self.waiting.append(request)
            self.new.append(request)
            self.arrived = request.came
            self.endpoint.arrived = request.came
            self.endpoint.is_parallel |= len(self.waiting) > 1
            self.changed.notify_all()
        return request

    def take(self) -> list[PendingRequest]:
        """The new requests that still wait, in an order that does not depend on when they came."""
        with self.changed:
            new = self.new
            self.new = []
            return sorted(
                (request for request in new if not self.is_given_up(request)), key=lambda request: request.asked.key
            )

    def is_given_up(self, request: PendingRequest) -> bool:
        """Whether nobody waits for a request's answer any more.

        One whose connection was closed, as at a client's timeout, is counted and forgotten.
        """
        with self.changed:
            if request not in self.waiting:
                return True
            if not request.has_left():
                return False
            self.given_up_after = self.given_up_after or time.monotonic() - request.came
            self.given_up += 1
            if self.given_up >= MOST_GIVEN_UP:
                what = f"Rate limit reached: {MOST_GIVEN_UP} requests of this session were given up by the client"
                self.refusal = ApiError(429, what, code="rate_limit_exceeded")
            self.refuse(request, ConnectionAbortedError())  # which ends the thread of the connection
            return True

    def answer(self, request: PendingRequest, answer: Answer) -> None:
        """Answer a request, unless it was refused meanwhile; the program goes on by itself if it has no others."""
        with self.changed:
            if self._ends(request):
                request.answer.set_result(answer)

    def refuse(self, request: PendingRequest, error: Exception) -> None:
        """The same with an error."""
        with self.changed:
            if self._ends(request):
                request.answer.set_exception(error)

    def _ends(self, request: PendingRequest) -> bool:
        """Have a request wait no longer, and return whether it did."""
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        if self.is_open and not self.waiting:
            self.clock.start()
        return True

    def reject(self, error: ApiError) -> None:
        """Count a request that was wrong in itself, as the program may hide the error; limits do not count."""
        if error.status in (429, 503) or error.code == "session_not_found":
            return
        with self.changed:
            self.rejected += 1
            self.rejection = self.rejection or f"{error.status}: {error}"

    def close(self, error: ApiError) -> None:
        """Take no more requests, and refuse those that wait with `error`."""
        with self.changed:
            self.is_open = False
            self.clock.stop()
            for request in [pending for pending in self.waiting.copy() if not self.is_given_up(pending)]:
                self.refuse(request, error)
            self.changed.notify_all()


def session_over() -> ApiError:
    """The answer to requests of a program that has ended."""
    return ApiError(404, "The session is over.", code="session_not_found")


class Endpoint:
    """The server of a round; a context."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.is_parallel = False
        """Whether a program has ever asked for two answers at a time."""
        self.arrived = 0.0
        """When the last request of any program came."""
        self._server = _Server(("127.0.0.1", 0), self)

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="podium-endpoint", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.close(session_over())
        self._server.shutdown()
        self._server.server_close()
        self._server.drop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def register(self) -> Client:
        """A new session, with a path and a key that nobody can guess."""
        client = Client(self)
        self.clients[client.id] = client
        return client

    def find(self, path: str, key: str) -> tuple[Client, str]:
        """The client and the rest of a path. Raises `ApiError` for another session or another key."""
        empty, sessions, id, version, *rest = [*path.partition("?")[0].split("/"), *[""] * 4]
        client = self.clients.get(id) if (empty, sessions, version) == ("", "sessions", "v1") else None
        if client is None:
            raise ApiError(404, "There is no such session.", code="session_not_found")
        if not hmac.compare_digest(key.encode(), client.key.encode()):
            raise ApiError(
                401, "Incorrect API key provided: give the `api_key` of this session.", code="invalid_api_key"
            )
        return client, _words("/".join(rest))


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
        super().__init__(address, _EndpointHandler)


class _EndpointHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    disable_nagle_algorithm = True
    """Else the body waits behind the headers until the client acknowledges them, which it delays by 40 ms."""
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing: paths have sessions in them."""

    def do_GET(self) -> None:
        """The list of models, which some frameworks ask for first, or one of them: any name is the policy's."""
        client: Client | None = None
        try:
            client, rest = self._client()
            kind, _, name = rest.partition("/")
            if kind != "models":
                raise ApiError(404, f"There is no path /v1/{rest[:80]} to GET; there is: models.")
            model = {"id": unquote(name) or "policy", "object": "model", "created": 0, "owned_by": "podium"}
            self._send(200, model if name else {"object": "list", "data": [model]})
        except ApiError as error:
            self._refuse(client, error, error.body)

    def do_POST(self) -> None:
        """One request."""
        path = PATHS.get(_words(self.path.partition("?")[0].partition("/v1/")[2]))
        client: Client | None = None
        try:
            client, rest = self._client()
            if path is None:
                raise ApiError(404, f"There is no path /v1/{rest[:80]}; there are: {', '.join(PATHS)}.")
            body = client.responses.continued(self._body()) if path.kept else self._body()
            asked = path.request(body)
            answer = client.put(asked, self._has_left).answer.result()
            if path.kept:
                client.responses.keep(body, answer)
            if asked.stream:
                self._stream(path, path.chunks(asked, answer))
            else:
                self._send(200, path.answer(asked, answer))
        except ApiError as error:
            self._refuse(client, error, error.body if path is None else path.error(error))

    def _has_left(self) -> bool:
        """Whether the client has closed its connection; nothing is read of it while an answer is waited for."""
        try:
            look = select.poll()
            look.register(self.connection, select.POLLIN)
            return bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _client(self) -> tuple[Client, str]:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        sent = key if scheme.lower() == "bearer" else self.headers.get("x-api-key", "")
        return self.server.endpoint.find(self.path, sent.strip())

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
        parts: list[bytes] = []
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

    def _refuse(self, client: Client | None, error: ApiError, body: Mapping[str, Any]) -> None:
        """Answer with an error; the body that was not read goes with the connection."""
        if client is not None:
            client.reject(error)
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

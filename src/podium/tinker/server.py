"""Tinker's routes on 127.0.0.1. What computes waits in a queue, and its client asks for the answer until it is there.

Requests of training are answered in the order in which they come; requests for completions that wait together are
sampled together.
"""

from __future__ import annotations

import collections
import hmac
import json
import re
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote

from podium.errors import PodiumError
from podium.isolation.threads import BoundedServer
from podium.records import MOST_NESTED, is_too_deep
from podium.tinker import wire
from podium.tinker.policy import SamplingRequest, TinkerPolicy

LONGEST_BODY = 64 << 20
READ_SECONDS = 60.0
"""Within which each part of a request must come."""
WAIT_SECONDS = 20.0
"""For which a client that asks for an answer is let wait; its own limit is 45."""
GATHER_SECONDS = 0.03
MOST_GATHER_SECONDS = 1.0
"""Without a new request, after which sampling begins, and the longest that the first one is held back."""
KEPT = 4096
"""Answers that are kept, for clients that lost theirs."""
CONFIG = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False, "sample_enable_stuck_detection": False}
"""The client's settings for this server: data in order, HTTP/1.1, and no alarm when sampling is slow."""

Answer = Mapping[str, Any] | bytes


class _PolicyJob(NamedTuple):
    """A request that waits for its answer; `call` gives the answers of this job and of all that are alike."""

    alike: Any
    asked: Any
    call: Callable[[list[Any]], Sequence[Answer]]
    answer: Future[Answer]


class TinkerServer:
    """Requests between the threads of connections and the one that owns the policy."""

    def __init__(self, policy: TinkerPolicy, key: str, port: int) -> None:
        self.policy = policy
        self.key = key
        self._jobs: collections.deque[_PolicyJob] = collections.deque()
        self._changed = threading.Condition()
        self._answers: dict[str, Future[Answer]] = {}
        self._http = BoundedServer(("127.0.0.1", port), partial(_TinkerHandler, self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def run(self) -> None:
        """Answer requests until Ctrl-C."""
        threading.Thread(target=self._http.serve_forever, name="podium-tinker", daemon=True).start()
        try:
            while True:
                for _, jobs in groupby(self._next(), key=lambda job: job.alike):
                    _settle(list(jobs))
        finally:
            self._http.shutdown()
            self._http.server_close()
            self.policy.forget_unnamed(0)

    def put(self, id: str, asked: Any, call: Callable[[list[Any]], Sequence[Answer]], alike: Any = None) -> None:
        """Let a request wait; one that came before under the same id is not answered twice."""
        with self._changed:
            if id not in self._answers:
                self._answers[id] = Future()
                self._jobs.append(_PolicyJob(alike or id, asked, call, self._answers[id]))
                for old in list(self._answers)[:-KEPT]:
                    del self._answers[old]
                self._changed.notify_all()

    def answer(self, id: str) -> Answer:
        """The answer of a request. Raises `Refused` while it is not there, and where there is no such request."""
        if (future := self._answers.get(id)) is None:
            raise Refused(404, "There is no such request here.")
        try:
            return future.result(timeout=WAIT_SECONDS)
        except NotYet:
            raise Refused(408, "It is still being computed.") from None

    def _next(self) -> list[_PolicyJob]:
        """The first request that waits; where it is for completions, with all of those that follow, like with like."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs)
            jobs = [self._jobs.popleft()]
            if isinstance(jobs[0].asked, SamplingRequest):
                last = time.monotonic() + MOST_GATHER_SECONDS
                while self._changed.wait(GATHER_SECONDS) and time.monotonic() < last:
                    pass
                while self._jobs and isinstance(self._jobs[0].asked, SamplingRequest):
                    jobs.append(self._jobs.popleft())
            return sorted(jobs, key=lambda job: job.alike)


def _settle(jobs: list[_PolicyJob]) -> None:
    """Give jobs that are alike their answers, or the error as the client reads it."""
    try:
        answers = jobs[0].call([job.asked for job in jobs])
    except PodiumError as error:
        answers = [{"error": str(error), "category": "user"}] * len(jobs)
    except Exception as error:  # noqa: BLE001  a client must not wait for an answer that never comes
        traceback.print_exc()
        answers = [{"error": f"{type(error).__name__}: {error}", "category": "server"}] * len(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        job.answer.set_result(answer)


class Refused(Exception):
    """A status and what is wrong, for the client's exceptions of that status."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class _TinkerHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS

    def __init__(self, owner: TinkerServer, *given: Any) -> None:
        self.owner = owner
        super().__init__(*given)

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Answer a request, or say what is wrong with it."""
        try:
            if not hmac.compare_digest(self.headers.get("X-API-Key", "").encode(), self.owner.key.encode()):
                raise Refused(401, "This is not the key that the server printed when it started.")
            self._send(200, self._answer(f"{self.command} {unquote(self.path).removeprefix('/api/v1/')}"))
        except Refused as error:
            self._send(error.status, {"detail": str(error)})
        except PodiumError as error:
            self._send(422, {"detail": str(error)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._send(400, {"detail": f"The request is not as Tinker's client writes it: {error!r}"})

    do_POST = do_GET

    def _answer(self, line: str) -> Answer:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= LONGEST_BODY:
            raise Refused(413, f"The request has {length:,} bytes; {LONGEST_BODY:,} are the most.")
        content = self.rfile.read(length)
        for pattern, route in ROUTES.items():
            if match := re.fullmatch(pattern, line.partition("?")[0]):
                proto = "x-protobuf" in self.headers.get("Content-Type", "")
                body = wire.read_data(content) if proto else json.loads(content or "{}")
                if is_too_deep(body):
                    raise ValueError(f"JSON nested more than {MOST_NESTED} deep")
                return route(self.owner, body, *match.groups())
        raise Refused(404, f"This server has no {line[:80]}.")

    def _send(self, status: int, answer: Answer) -> None:
        kind, content = ("x-protobuf", answer) if isinstance(answer, bytes) else ("json", json.dumps(answer).encode())
        self.send_response(status)
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(content)))
        if status >= 400:  # what was not read of the request goes with the connection
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


# ---- routes: what a server answers to a body and the part of a path ----


def _trained(server: TinkerServer, body: Any, name: str) -> Answer:
    """A request that waits for the policy's method of that name."""
    mapped = isinstance(body, dict)
    run = body.get("model_id") or f"{body['session_id']}:{body['model_seq_id']}" if mapped else body.model_id
    id = f"{run}:{name}:{body.get('seq_id') if mapped else body.seq_id}"
    server.put(id, body, lambda asked: [getattr(server.policy, name)(asked[0])])
    return {"request_id": id}


def _sampled(server: TinkerServer, body: Any) -> Answer:
    id = f"{body['sampling_session_id']}:{body['seq_id']}"
    asked = server.policy.asked(body)
    server.put(id, asked, server.policy.sample, asked.alike)
    return {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(body["num_samples"])]}


def _info(server: TinkerServer, body: Any) -> Answer:
    record = server.policy.info(body["model_id"])
    model = {"model_name": record["base_model"], "tokenizer_id": server.policy.names[-1]}
    return {"model_id": body["model_id"], "model_data": model, **record}


def _capabilities(server: TinkerServer, body: Any) -> Answer:
    return {"supported_models": [{"model_name": name, "trainable": True} for name in server.policy.names]}


def _told(**answer: Any) -> Callable[..., Answer]:
    return lambda server, body, *parts: answer


_TRAINED = "create_model|load_weights|forward_backward|optim_step|save_weights|save_weights_for_sampler"
ROUTES: Mapping[str, Callable[..., Answer]] = {
    "POST client/config": _told(**CONFIG),
    "POST create_session": lambda server, body: {"session_id": secrets.token_hex(6)},
    "POST telemetry": _told(status="accepted"),
    "POST (client/dynamic_config|session_heartbeat|sessions/.+/finish)": _told(),
    f"POST ({_TRAINED})": _trained,
    "POST asample": _sampled,
    "POST retrieve_future": lambda server, body: server.answer(body["request_id"]),
    "POST get_info": _info,
    "GET get_server_capabilities": _capabilities,
    r"GET training_runs/(.+)": lambda server, body, run: server.policy.info(run),
    "POST create_sampling_session": lambda server, body: {"sampling_session_id": server.policy.open_sampler(body)},
    "GET samplers/(.+)": lambda server, body, id: {"sampler_id": id, "base_model": server.policy.names[0]},
}

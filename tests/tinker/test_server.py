"""`podium tinker` against what is not its client: no request ends the server. Without Tinker's client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.isolation import threads
from podium.isolation.threads import BoundedServer
from podium.tinker.policy import TinkerPolicy
from podium.tinker.server import TinkerServer

KEY = "tml-a-key-of-this-test"


class Counting(TinkerPolicy):
    """Answers without a model: with the number of requests that were sampled together."""

    def __init__(self) -> None:
        self.names, self.folder, self.samplers = ["tiny"], Path("nowhere"), {"s": None}
        self._context, self._vocabulary, self._unnamed = 64, 100, []
        self.run = "base"

    def sample(self, requests: Any) -> Any:
        return [json.dumps(len(requests)).encode()] * len(requests)


@pytest.fixture
def server() -> Iterator[TinkerServer]:
    server = TinkerServer(Counting(), KEY, 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server
    assert thread.is_alive()
    server._http.shutdown()
    server._http.server_close()


def posted(server: TinkerServer, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*server._http.server_address[:2], timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"/api/v1/{path}", data, {"X-API-Key": KEY, "Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    return answer.status, json.loads(content)


def asked(**changes: Any) -> dict[str, Any]:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4, "stop": None, "seed": None}
    params |= {name: changes.pop(name) for name in list(changes) if name in params}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    body = {"sampling_session_id": "s", "seq_id": 0, "num_samples": 2, "prompt": prompt, "sampling_params": params}
    return {**body, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": "2"},
        {"num_samples": [2]},
        {"num_samples": None},
        {"num_samples": 0},
        {"num_samples": 10**12},
        {"sampling_session_id": 3},
        {"sampling_session_id": None},
        {"stop": [[1]]},
        {"stop": [None]},
    ],
)
def test_requests_of_other_types_are_refused_and_the_server_goes_on(
    server: TinkerServer, changes: dict[str, Any]
) -> None:
    """They were sorted with the others, which ended the thread that owns the policy."""
    threads = [threading.Thread(target=posted, args=(server, "asample", asked(seq_id=i))) for i in range(1, 4)]
    for each in threads:
        each.start()
    status, answer = posted(server, "asample", asked(**changes))
    for each in threads:
        each.join()
    assert status in (400, 422), answer
    assert posted(server, "retrieve_future", {"request_id": "s:1"})[0] == 200


def test_json_nested_deep_is_answered(server: TinkerServer) -> None:
    for body in (
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        {"session_id": [[[]]] * 3, "x": nested(65)},
    ):
        assert posted(server, "create_session", body)[0] == 400
    assert posted(server, "create_session", {"user_metadata": nested(60)})[0] == 200


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


def test_connections_beyond_the_most_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every server of ours; those that are over make room."""
    monkeypatch.setattr(threads, "MOST_CONNECTIONS", 3)
    server = TinkerServer(Counting(), KEY, 0)
    threading.Thread(target=server.run, daemon=True).start()
    address = server._http.server_address[:2]
    kept = [socket.create_connection(address, timeout=10) for _ in range(3)]
    try:
        more = socket.create_connection(address, timeout=10)
        assert more.recv(1) == b""
        for each in kept:
            each.close()
        for _ in range(100):
            try:
                assert posted(server, "create_session", {})[0] == 200
                break
            except (http.client.RemoteDisconnected, ConnectionError):
                threading.Event().wait(0.1)  # a thread has not seen its end
        else:
            raise AssertionError
    finally:
        server._http.shutdown()
        server._http.server_close()


def test_every_server_of_ours_bounds_its_connections() -> None:
    from podium.agents.programs.server import Endpoint
    from podium.runs.report.live import PageServer

    assert issubclass(PageServer, BoundedServer)
    with Endpoint() as endpoint:
        assert isinstance(endpoint._server, BoundedServer)

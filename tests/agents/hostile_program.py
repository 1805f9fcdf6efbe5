"""A program that does what the row's column `act` says: one honest way to play, and many that are not."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


class Client:
    """Requests without a library, so that they can be wrong."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.url, self.key = urllib.parse.urlsplit(base_url), api_key
        self.address = (self.url.hostname or "", self.url.port or 0)

    def post(self, body: Any, *, key: str = "", path: str = "", headers: Any = ()) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json", **dict(headers)}
        connection.request("POST", f"{path or self.url.path}/chat/completions", data, given)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ask(self, text: str = "hello") -> str:
        status, answer = self.post({"messages": [{"role": "user", "content": text}]})
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    def raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(data)
        return connection


def honest(client: Client, row: Any) -> Any:
    text = client.ask(f"row {row['n']}")
    return float(len(client.ask(f"row {row['n']} {text}")))


def raises(client: Client, row: Any) -> Any:
    client.ask()
    raise RuntimeError("by itself")


def leaves(client: Client, row: Any) -> Any:
    sys.exit("good bye")


def leaves_at_once(client: Client, row: Any) -> Any:
    client.ask()
    os._exit(3)


def kills_itself(client: Client, row: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_group(client: Client, row: Any) -> Any:
    os.killpg(0, signal.SIGKILL)


def crashes(client: Client, row: Any) -> Any:
    ctypes.string_at(0)


def hangs(client: Client, row: Any) -> Any:
    client.ask()
    time.sleep(1000)


def loops(client: Client, row: Any) -> Any:
    while True:
        pass


def ignores_signals(client: Client, row: Any) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def ten_thousand_requests(client: Client, row: Any) -> Any:
    statuses = {client.post({"messages": [{"role": "user", "content": "x"}]})[0] for _ in range(10_000)}
    return float(statuses == {200, 429})


def wrong_session(client: Client, row: Any) -> Any:
    status, _ = client.post({"messages": []}, path="/sessions/AAAAAAAAAAAAAAAA/v1")
    return float(status)


def wrong_token(client: Client, row: Any) -> Any:
    status, body = client.post({"messages": []}, key="sk-guess")
    return float(status) if body["error"]["code"] == "invalid_api_key" else 0.0


def huge_promise(client: Client, row: Any) -> Any:
    head = f"POST {client.url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n"
    connection = client.raw(f"{head}Content-Length: 10000000000000\r\n\r\n".encode())
    return float(connection.recv(100).split()[1])


def huge_body(client: Client, row: Any) -> Any:
    try:
        return float(client.post(b"[" + b"1," * 20_000_000 + b"1]")[0])
    except OSError:  # it is refused before all of it was sent
        return 413.0


def deep_body(client: Client, row: Any) -> Any:
    return float(client.post(b"[" * 100_000)[0])


def odd_bodies(client: Client, row: Any) -> Any:
    bodies: list[Any] = [[], 3, None, {}, {"messages": 3}, {"messages": [3]}, {"messages": [{"role": "king"}]}]
    message = [{"role": "user", "content": "x"}]
    bodies += [{"messages": message, name: value} for name, value in (("n", 2), ("max_tokens", "9"), ("bogus", 1))]
    bodies += [{"messages": message, "stop": 3}, {"messages": message, "tools": [{"type": "x"}]}]
    bodies += [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, b"\xff\xfe", b""]
    statuses = {client.post(each)[0] for each in bodies}
    return 400.0 if statuses == {400} else sum(statuses)


def slow_sender(client: Client, row: Any) -> Any:
    head = f"POST {client.url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n"
    connection = client.raw(f"{head}Content-Length: 1000\r\n\r\n".encode())
    while True:
        connection.sendall(b" ")
        time.sleep(0.1)


def slow_reader(client: Client, row: Any) -> Any:
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "x"}]})
    head = f"POST {client.url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n"
    client.raw(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    time.sleep(1000)


def no_http(client: Client, row: Any) -> Any:
    connection = client.raw(b"\x16\x03\x01" + os.urandom(10_000) + b"\r\n\r\n")
    connection.settimeout(5)
    connection.recv(100)
    return honest(client, row)


def many_connections(client: Client, row: Any) -> Any:
    kept = [socket.create_connection(client.address, timeout=5) for _ in range(300)]
    return honest(client, row) if kept else None


def many_at_a_time(client: Client, row: Any) -> Any:
    statuses: list[int] = []

    def ask(i: int) -> None:
        statuses.append(client.post({"messages": [{"role": "user", "content": str(i)}], "max_tokens": 1})[0])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(100)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return float(set(statuses) <= {200, 429})


def goes_away(client: Client, row: Any) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    head = f"POST {client.url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n"
    client.raw(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()).close()
    return honest(client, row)


def leaves_a_child(client: Client, row: Any) -> Any:
    subprocess.Popen(SLEEPER)
    return honest(client, row)


def leaves_a_daemon(client: Client, row: Any) -> Any:
    subprocess.Popen(SLEEPER, start_new_session=True)
    return honest(client, row)


def forks(client: Client, row: Any) -> Any:
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
    time.sleep(1000)


def leaves_a_thread(client: Client, row: Any) -> Any:
    def later() -> None:
        while True:
            time.sleep(0.05)
            client.post({"messages": [{"role": "user", "content": "x"}]})

    reward = honest(client, row)
    threading.Thread(target=later, daemon=True).start()
    return reward


def writes_a_lot(client: Client, row: Any) -> Any:
    for _ in range(50):
        sys.stdout.write("x" * 1_000_000)
    return honest(client, row)


def closes_its_output(client: Client, row: Any) -> Any:
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    return honest(client, row)


def writes_into_the_runs_folder(client: Client, row: Any) -> Any:
    for name in ("metrics.jsonl", "checkpoint-1", "proof.json"):
        with open(os.path.join(row["folder"], name), "a", encoding="utf-8") as file:
            file.write("nonsense\n")
    return honest(client, row)


def returns_nan(client: Client, row: Any) -> Any:
    return float("nan")


def returns_an_object(client: Client, row: Any) -> Any:
    return {"reward": Client}


ACTS: dict[str, Callable[[Client, Any], Any]] = {
    name: each for name, each in list(globals().items()) if callable(each) and name.islower() and name != "run"
}
"""By name."""


def run(base_url: str, api_key: str, row: Any) -> Any:
    """The row's act."""
    return ACTS[row["act"]](Client(base_url, api_key), row)

"""A running `vllm serve`, seen through HTTP. Needs no vLLM here.

    server = VllmServer("http://127.0.0.1:8000", seconds=240)
    first_up([server], 240)
    server.weight_version()

Besides OpenAI's routes it uses those that vLLM has for reinforcement learning (`VLLM_SERVER_DEV_MODE=1`): weights carry
a version there, a word that the server keeps with them and forgets when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import urlparse

import httpx

from podium.engines.vllm.requests import COMPLETIONS
from podium.errors import EngineError
from podium.errors.texts import listed

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Between two looks at a server that does not answer."""
CONNECT_SECONDS = 10.0
"""For a connection alone: a machine that is there answers in less, however busy."""
MOST_CONNECTIONS = 256
"""Requests at once; each is a prompt with all its completions, and the server schedules them."""
LONGEST_EXCERPT = 300
"""Characters of a server's answer that a message repeats."""
REFRESH = "podium_refresh"
"""The method of our extension of vLLM's workers."""
NEEDS_TOP_K = (
    "was started with --return-sampling-mask, and vLLM then refuses requests without top_k.",
    "Set top_k, or start it again without that flag",
)
"""The message for a server that is asked without `top_k`, and its fix."""
KEY_VARIABLE = "VLLM_API_KEY"
"""As for `vllm serve` itself; read at every request and kept nowhere."""

Send = Callable[[str, Mapping[str, Any]], "Future[dict[str, Any]]"]
"""Posts a body to a route."""


def is_here(url: str) -> bool:
    """Whether an address is this machine's own.

    >>> is_here("http://0.0.0.0:8000"), is_here("http://localhost:8000"), is_here("http://192.0.2.1:8000")
    (True, True, False)
    """
    host = urlparse(url).hostname or ""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError:
        return False
    return address.is_loopback or address.is_unspecified


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's, read once: it takes longer than a request."""
    return httpx.create_ssl_context()


async def _given_up(client: httpx.AsyncClient) -> None:
    """Cancel the other tasks of this loop, and close their client."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.aclose()


class ServerGone(EngineError):
    """The address does not answer, or the engine behind it has died."""

    fix_in_a_run = "Its own last lines say why; start it again."


class ServerSlow(EngineError):
    """It is there and does not answer in time."""

    fix_in_a_run = "Raise vllm_server_timeout, or ask for shorter or fewer completions."


class ServerRefused(EngineError):
    """An answer that says no."""

    fix_in_a_run = "Does it serve the model that is trained, and see the same files? Its own last lines say more."
    status = 0
    """HTTP status."""


def first_up(servers: Sequence[VllmServer], seconds: float) -> VllmServer:
    """Return the first of the servers that can be asked, when there is one. Raises `ServerGone` after `seconds`."""
    end = time.monotonic() + seconds
    urls = listed([server.url for server in servers])
    logged = False
    while (found := next((server for server in servers if server.is_up()), None)) is None:
        if time.monotonic() >= end:
            waited = f", for {seconds:g} s now" if seconds else ""
            raise ServerGone(f"No vLLM server answers at {urls}{waited}.")
        if not logged:
            logger.warning("No vLLM server answers at %s; waiting up to %g s for one.", urls, seconds)
            logged = True
        time.sleep(min(PAUSE_SECONDS, seconds))
    return found


class VllmServer:
    """One address. `seconds`: how long it may be silent."""

    def __init__(self, url: str, *, seconds: float) -> None:
        self.url = url.rstrip("/")
        self.seconds = seconds
        self.refreshes_head = False
        """Whether its head has to be told of new weights: see `worker.podium_worker`."""
        self.returns_masks = False
        """Whether it is asked for the tokens that filters left."""
        self.needs_top_k = False
        """Whether it refuses requests without `top_k`, greedy ones among them, as one does that can say so."""
        self.keeps_images = False
        """Whether it was tried with images and takes them; it keeps what its encoder has made of them."""
        self._by_proxy = not is_here(url)

    def is_up(self) -> bool:
        """Whether it is there, with an engine that lives."""
        try:
            with httpx.Client(timeout=CONNECT_SECONDS, **self._connection()) as client:
                return client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def info(self) -> dict[str, Any]:
        """Its whole configuration, as vLLM's `VllmConfig`."""
        return dict(self.call("/server_info?config_format=json")["vllm_config"])

    def weight_version(self) -> str:
        """The word that came with its weights; `default` for those that it loaded itself."""
        return str(self.call("/weight_info")["weight_version"])

    def set_weight_version(self, word: str) -> None:
        """Say what its weights are."""
        self.call("/update_weight_version", {"new_version": word})

    def reload_weights(self, folder: str) -> None:
        """Read a checkpoint, which the server must see under the same path."""
        self.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self.refresh_head()

    def refresh_head(self) -> None:
        """Tell its head of new weights, where it has to be told."""
        if self.refreshes_head:
            self.call("/collective_rpc", {"method": REFRESH})

    def takes_adapters(self) -> bool:
        """Return whether it loads adapters while it runs: the route is there, if only for another method."""
        try:
            return self._request("/v1/load_lora_adapter", None).status_code == 405
        except ServerSlow:
            return False

    def adapters(self) -> list[str]:
        """Return the names of the adapters that it serves."""
        return [str(card["id"]) for card in self.call("/v1/models")["data"] if card.get("parent")]

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve an adapter, from a folder that the server must see under the same path."""
        self._check(self._request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}))

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer."""
        self._check(self._request("/v1/unload_lora_adapter", {"lora_name": name}))

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier weights, and what their encoder made of images."""
        if self.keeps_images:
            self.call("/reset_encoder_cache", {})
        end = time.monotonic() + self.seconds
        while self.call("/reset_prefix_cache", {}).get("success") is False:
            if time.monotonic() >= end:
                raise ServerSlow(f"The vLLM server at {self.url} keeps its prefix cache: requests are still running.")
            time.sleep(PAUSE_SECONDS / 10)

    def call(self, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JSON object, by GET without a body and else by POST; an empty one for an empty answer."""
        return self._read(self._request(route, body))

    def _request(self, route: str, body: Mapping[str, Any] | None) -> httpx.Response:
        timeout = httpx.Timeout(self.seconds, connect=CONNECT_SECONDS)
        try:
            with httpx.Client(timeout=timeout, **self._connection()) as client:
                return client.request("GET" if body is None else "POST", route, json=body)
        except httpx.HTTPError as error:
            raise self._failure(error, route) from error

    def complete(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers of `/v1/completions`, in order; all requests are sent at once.

        Raises:
            ServerSlow: for `seconds` no request was answered.
            ServerGone, ServerRefused: one of the requests failed so.
        """
        with self.completing() as send:
            sent = [send(COMPLETIONS, body) for body in bodies]
            waiting = set(sent)
            while waiting:
                done, waiting = wait(waiting, timeout=self.seconds, return_when=FIRST_COMPLETED)
                for answer in done:
                    answer.result()
                if not done:
                    raise self.silent(len(waiting))
            return [answer.result() for answer in sent]

    def silent(self, count: int) -> ServerSlow:
        """The error of `count` requests of which none was answered for `seconds`."""
        return ServerSlow(f"The vLLM server at {self.url} answered none of {count} requests for {self.seconds:g} s.")

    @contextlib.contextmanager
    def completing(self) -> Iterator[Send]:
        """A function that posts a body to a route and returns at once with the answer to come.

        An answer that is cancelled, or has not come at the end of the context, is no longer computed.
        """
        limits = httpx.Limits(max_connections=MOST_CONNECTIONS)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        client = httpx.AsyncClient(timeout=timeout, limits=limits, **self._connection())
        # A thread of its own: in a notebook this one has an event loop already.
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="podium-vllm", daemon=True)
        thread.start()
        try:
            yield lambda route, body: asyncio.run_coroutine_threadsafe(self._one(client, route, body), loop)
        finally:
            asyncio.run_coroutine_threadsafe(_given_up(client), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _one(self, client: httpx.AsyncClient, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await client.post(route, json=body)
        except httpx.HTTPError as error:
            raise self._failure(error, route) from error
        return self._read(response)

    def _connection(self) -> dict[str, Any]:
        """Arguments of all clients; requests to a server on this machine bypass proxies."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return {"base_url": self.url, "headers": headers, "trust_env": self._by_proxy, "verify": _certificates()}

    def _failure(self, error: httpx.HTTPError, route: str) -> EngineError:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return ServerSlow(f"The vLLM server at {self.url} did not answer {route} within {self.seconds:g} s.")
        return ServerGone(f"The vLLM server at {self.url} is gone: {type(error).__name__} at {route}.")

    def _check(self, response: httpx.Response) -> None:
        """Raise the error of an answer that says no."""
        if response.status_code == 200:
            return
        route = response.url.path
        excerpt = " ".join(response.text.split())[:LONGEST_EXCERPT]
        if "EngineDead" in excerpt or "EngineCore encountered an issue" in excerpt:
            raise ServerGone(f"The engine of the vLLM server at {self.url} has died: {excerpt}")
        status = response.status_code
        refused = ServerRefused(f"The vLLM server at {self.url} answers {route} with HTTP {status}: {excerpt}")
        refused.status = status
        raise refused

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        self._check(response)
        try:
            read = response.json() if response.content else {}
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise ServerRefused(f"What answers {response.url.path} at {self.url} is no vLLM server.")
        return read

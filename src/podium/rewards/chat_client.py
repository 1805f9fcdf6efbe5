"""Requests to a chat model behind an OpenAI-compatible address: in time, tried again where that may help, many at once.

    client = ChatClient(url="http://127.0.0.1:8000/v1/chat/completions", key_variable=None)
    replies = await client.ask_all([{"model": "m", "messages": [...]}])

The server's replies are not trusted: their size and time are bounded, and a key that it sends back is blanked out.
Redirects are not followed, so the key goes nowhere else. Retries are our own, since httpx's are for connections that
fail, not for a busy server's 429 and 503.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST_REPLY = 1 << 20
"""Bytes."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; twice as long before every further one."""
LONGEST_PAUSE_SECONDS = 10.0

_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_SETTINGS_ARE_WRONG = frozenset({400, 401, 403, 404, 405, 422})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The text of a reply, or why there is none."""

    text: str | None = None
    reason: str = ""
    settings_are_wrong: bool = False
    """Whether the server refused what would be refused every time: the key, the model, the address."""


@dataclass(slots=True, kw_only=True)
class ChatClient:
    """An address, with how requests are sent to it."""

    url: str
    key_variable: str | None
    """The environment variable with the key, which is read at every call and kept nowhere."""
    attempt_seconds: float = 20.0
    call_seconds: float = 50.0
    retries: int = 2
    max_parallel: int = 8
    _jitter: random.Random = field(default_factory=random.Random)  # the global one belongs to the training run

    async def ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """One reply for each body, in their order; those that have none after `call_seconds` go without."""
        import httpx

        if not bodies:
            return []
        gate = asyncio.Semaphore(self.max_parallel)
        async with httpx.AsyncClient(
            timeout=self.attempt_seconds,
            limits=httpx.Limits(max_connections=self.max_parallel),
            headers={"Authorization": f"Bearer {key}"} if (key := self._key()) else {},
            verify=_trusted(is_tls=self.url.startswith("https:")),
        ) as client:
            tasks = [asyncio.ensure_future(self._ask(client, gate, body)) for body in bodies]
            try:
                await asyncio.wait(tasks, timeout=self.call_seconds)
            finally:
                for task in tasks:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
        late = Reply(reason=f"no reply within the {self.call_seconds:g} s of the whole call")
        return [each if isinstance(each, Reply) else late for each in done]

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    async def _ask(self, client: Any, gate: asyncio.Semaphore, body: Mapping[str, Any]) -> Reply:
        async with gate:
            for attempt in range(self.retries + 1):
                reply, pause = await self._attempt(client, body)
                if pause is None or attempt == self.retries:
                    return reply
                backoff = FIRST_PAUSE_SECONDS * 2**attempt * self._jitter.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(pause, backoff), LONGEST_PAUSE_SECONDS))
        raise AssertionError

    async def _attempt(self, client: Any, body: Mapping[str, Any]) -> tuple[Reply, float | None]:
        """The reply, and the seconds to wait before another try; None: no further try."""
        import httpx

        try:
            async with asyncio.timeout(self.attempt_seconds):  # of the whole attempt: a server may send a byte a second
                async with client.stream("POST", self.url, json=body) as response:
                    content = await _read(response)
        except TimeoutError:
            return Reply(reason=f"no reply within {self.attempt_seconds:g} s"), 0.0
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Reply(reason=self._blanked(f"{type(error).__name__}: {error}")), 0.0
        if (status := response.status_code) != 200:
            excerpt = " ".join(content.decode(errors="replace").split())[:200]
            reason = self._blanked(f"HTTP {status}: {excerpt}")
            pause = response.headers.get("retry-after", "0")  # seconds; a date is not read
            seconds = float(pause) if pause.replace(".", "", 1).isdecimal() else 0.0
            reply = Reply(reason=reason, settings_are_wrong=status in _SETTINGS_ARE_WRONG)
            return reply, seconds if status in _WORTH_ANOTHER_TRY else None
        text = _text(content)
        return (Reply(text=text), None) if text is not None else (Reply(reason="a reply that is no chat message"), 0.0)

    def _blanked(self, text: str) -> str:
        key = self._key()
        return text.replace(key, "***") if key else text


@functools.cache
def _trusted(*, is_tls: bool) -> ssl.SSLContext:
    """The TLS context, cached: loading the authorities takes half a second. For plain HTTP an empty one."""
    import httpx

    return httpx.create_ssl_context() if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def _read(response: Any) -> bytes:
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > LARGEST_REPLY:
            return b""
    return content


def _text(content: bytes) -> str | None:
    """The message in a reply.

    >>> _text(b'{"choices": [{"message": {"content": "7"}}]}'), _text(b'{"choices": []}'), _text(b"<html>")
    ('7', None, None)
    """
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None

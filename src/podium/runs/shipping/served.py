"""`transformers serve`, which by itself takes fields that it does not support and ignores them.

    python -m podium.runs.shipping.served serve MODEL --host 127.0.0.1 --port 8000

A request with such a field is refused as by OpenAI, with status 400; `/v1/models` names the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0, 0.0),
    "max_completion_tokens": (),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}
"""Fields that change an answer and that the server ignores, with the values (besides null) that ask for nothing."""


def refusal(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """OpenAI's error for the first field that would be ignored; None: there is none.

    >>> refusal({"messages": [], "n": 1, "response_format": {"type": "text"}, "logprobs": None})
    >>> refusal({"n": 2})["error"]["message"]
    '`n` is not supported by `transformers serve`, which would ignore it: take it out, or serve with --engine vllm.'
    """
    for name, neutral in NO_EFFECT.items():
        if body.get(name) is None or any(type(body[name]) is type(x) and body[name] == x for x in neutral):
            continue
        way = "write `max_tokens`" if name == "max_completion_tokens" else "take it out"
        what = f"`{name}` is not supported by `transformers serve`, which would ignore it: {way}, or serve with"
        about = {"type": "invalid_request_error", "param": name, "code": "unsupported_parameter"}
        return {"error": {"message": f"{what} --engine vllm.", **about}}
    return None


def main() -> None:
    """Run the server with these checks in front of it."""
    from fastapi import Request  # type: ignore[import-not-found,unused-ignore]
    from fastapi.responses import JSONResponse  # type: ignore[import-not-found,unused-ignore]
    from transformers.cli.serving import server
    from transformers.cli.transformers import main as transformers

    model = sys.argv[2]
    build = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Any:
            if request.url.path == "/v1/models":
                known = {"id": model, "object": "model", "created": 0, "owned_by": "podium"}
                return JSONResponse({"object": "list", "data": [known]})
            if request.url.path in ("/v1/chat/completions", "/v1/completions"):
                try:
                    body = await request.json()
                except ValueError:  # the server says so
                    body = None
                if isinstance(body, dict) and (error := refusal(body)):
                    return JSONResponse(error, status_code=400)
            return await call_next(request)

        return app

    server.build_server = build_server
    transformers()


if __name__ == "__main__":
    main()

"""`/v1/responses` of OpenAI and `/v1/messages` of Anthropic: their requests as those of a chat, and their answers.

As far as the official clients need them: text, calls of functions and their results, streamed or not.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.agents.programs.wire import DECIDED, UNUSED, Answer, ApiError, Asked, calls_of, chat_request, decided

RESPONSES = {
    "max_output_tokens": "max_tokens",
    **{name: name for name in ("model", "stream", "tool_choice", "top_logprobs", "background")},
}
MESSAGES = {"max_tokens": "max_tokens", "model": "model", "stream": "stream", "stop_sequences": "stop"}
"""Arguments under the names that a chat has for them."""

IDLE: Mapping[str, Sequence[str]] = {
    "responses": (
        *UNUSED,
        *("truncation", "include", "text", "stream_options"),
    ),
    "messages": ("metadata", "service_tier", "cache_control"),
}
"""Arguments that change nothing here."""

KEPT_BYTES = 4_000_000
"""JSON of the conversations of a session that `previous_response_id` may name; the oldest go first."""

Items = list[dict[str, Any]]


class Responses:
    """The conversations of one session that a request may continue by `previous_response_id`, each as its items.

    As at OpenAI, `instructions` and `tools` do not go on with them, and `store: false` keeps nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Items, int]] = {}
        """By the id of a response: its input and output, and the bytes of both."""

    def continued(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with its whole conversation as `input`. Raises `ApiError` where the id is not known."""
        if (previous := body.get("previous_response_id")) is None:
            return body
        with self._lock:
            before, _ = self._kept.get(str(previous), (None, 0))
        if before is None:
            what = f"Previous response with id '{str(previous)[:80]}' not found."
            raise ApiError(400, what, param="previous_response_id", code="previous_response_not_found")
        new = _input(body)
        return {**body, "input": [*before, *new]} if isinstance(new, list) and new else body

    def keep(self, body: Mapping[str, Any], answer: Answer) -> None:
        """Keep the answer to a body that has its whole conversation, unless it says `store: false`."""
        if body.get("store") is False:
            return
        items = [*_input(body), *_output(answer)]
        with self._lock:
            self._kept[response_id(answer)] = items, len(json.dumps(items))
            while sum(size for _, size in self._kept.values()) > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]


# ---- requests ----


def _input(body: Mapping[str, Any]) -> Any:
    """The items of a response's input; whatever else was given as it is."""
    asked = body.get("input")
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def response_request(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/responses` as a chat. Raises `ApiError`."""
    chat = _renamed(body, RESPONSES, "responses", ("input", "instructions", "tools", "previous_response_id"))
    items = _input(body)
    form = text.get("format") if isinstance(text := body.get("text"), dict) else None
    if not isinstance(items, list) or not items:
        raise ApiError(400, "'input' must be a text, or a list with at least one item", param="input")
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    tools = body.get("tools") or []
    chat["tools"] = [{"type": "function", "function": function} for function in _functions(tools, "function")]
    chat["response_format"] = form
    messages = [*system, *_joined(_of_item(item) for item in _dicts(items, "input"))]
    asked = chat_request({**chat, "messages": messages})
    return replace(asked, previous=body.get("previous_response_id"), instructions=body.get("instructions"))


def message_request(body: Mapping[str, Any]) -> Asked:
    """A body of `/v1/messages` as a chat. Raises `ApiError`."""
    chat = _renamed(body, MESSAGES, "messages", ("messages", "system", "tools", "tool_choice"))
    if type(body.get("max_tokens")) is not int:
        raise ApiError(400, "max_tokens: Field required", param="max_tokens")
    system = body.get("system")
    messages: Items = [{"role": "system", "content": system}] if system else []
    for message in _dicts(body.get("messages"), "messages"):
        messages += _of_message(message)
    if messages and messages[-1].get("role") == "assistant":
        what = "the last message is the assistant's, and this model begins its answers itself: leave it out (prefill)"
        raise ApiError(400, what, param="messages", code="unsupported_value")
    choice = body.get("tool_choice") or {"type": "auto"}
    chat["tool_choice"] = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    tools = _functions(body.get("tools") or [], "custom")
    chat["tools"] = [
        {"type": "function", "function": {**tool, "parameters": tool.get("input_schema")}} for tool in tools
    ]
    return chat_request({**chat, "messages": messages})


def _renamed(body: Mapping[str, Any], names: Mapping[str, str], dialect: str, read: Sequence[str]) -> dict[str, Any]:
    """The arguments under a chat's names. Raises `ApiError` for one that is not known."""
    for name, value in body.items():
        if name not in (*names, *read, *DECIDED, *IDLE[dialect]) and value is not None:
            raise ApiError(400, f"Unrecognized request argument supplied: {name[:80]}", param=name[:80])
    made = {chat: body[name] for name, chat in names.items() if body.get(name) is not None}
    return {**made, **{name: body[name] for name in DECIDED if body.get(name) is not None}}


def _dicts(value: Any, name: str) -> Items:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ApiError(400, f"'{name}' must be a list of objects", param=name)
    return value


def _functions(tools: Any, kind: str) -> Items:
    """Tools, which must be functions of the program's own: of that type, or without one."""
    if any((tool.get("type") or kind) != kind for tool in _dicts(tools, "tools")):
        raise ApiError(400, "'tools' can only be functions here", param="tools", code="unsupported_value")
    return list(tools)


def _of_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """One item of a response's input as a message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _parts(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}
    if kind == "reasoning":
        texts = [part.get("text", "") for part in _dicts(item.get("content") or [], "input")]
        return {"role": "assistant", "content": "", "reasoning_content": "".join(map(str, texts))}
    raise ApiError(400, f"'input' has an item of type {str(kind)[:40]!r}", param="input", code="unsupported_value")


def _parts(content: Any) -> Any:
    """Content with the parts of responses under the names of a chat's."""
    if not isinstance(content, list):
        return content
    renamed = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
    return [
        {**part, "type": renamed.get(str(part.get("type")), part.get("type"))} if isinstance(part, dict) else part
        for part in content
    ]


def _joined(messages: Iterator[dict[str, Any]]) -> Items:
    """Messages in which reasoning, text and calls of one turn are one message."""
    made: Items = []
    for message in messages:
        last = made[-1] if made else {}
        both = message["role"] == last.get("role") == "assistant"
        thought_alone = "reasoning_content" in last and not (last["content"] or last.get("tool_calls"))
        if not both or not (thought_alone or message.get("tool_calls")):
            made.append(message)
            continue
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        thoughts = last.get("reasoning_content", "") + message.get("reasoning_content", "")
        texts = {"content": last["content"] or message["content"], "reasoning_content": thoughts}
        made[-1] = {"role": "assistant", **texts, **({"tool_calls": calls} if calls else {})}
    return made


def _of_message(message: Mapping[str, Any]) -> Items:
    """A message of Anthropic's as those of a chat: results of tools are messages there."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results: Items = []
    text = []
    calls: Items = []
    thought = ""
    for block in _dicts(content, "messages"):
        kind = block.get("type")
        if kind == "tool_result":
            own = block.get("content") or ""
            own = [_with_url(part) for part in own] if isinstance(own, list) else own
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": own})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thought += str(block.get("thinking", ""))
        else:
            text.append(_with_url(block))
    if results and not (text or calls or thought):
        return results
    more = {"tool_calls": calls} if calls else {}
    return [*results, {"role": message.get("role"), "content": text, "reasoning_content": thought, **more}]


def _with_url(block: Any) -> Any:
    """A block; an image of Anthropic's as a chat's."""
    source = block.get("source") if isinstance(block, dict) and block.get("type") == "image" else None
    if not isinstance(source, dict):
        return block
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": data if source.get("type") == "base64" else source.get("url")}


# ---- answers of /v1/responses ----


def response_id(answer: Answer) -> str:
    """The id of a response."""
    return f"resp_{answer.id}"


def response_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of a `response`."""
    cut = answer.finish == "length"
    count = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    functions = [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools]
    return {
        "id": response_id(answer),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": asked.instructions,
        "metadata": {},
        "model": asked.model,
        "output": _output(answer),
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous,
        "temperature": answer.applied["temperature"],
        "max_output_tokens": answer.applied["max_tokens"],
        "tool_choice": "auto",
        "tools": functions,
        "top_p": answer.applied["top_p"],
        "usage": {**count, **details, "total_tokens": sum(count.values())},
        "podium": decided(asked, answer),
    }


def _output(answer: Answer) -> Items:
    made: Items = []
    if thought := answer.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        made.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    if answer.message["content"] or not answer.message.get("tool_calls"):
        part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        status = "incomplete" if answer.finish == "length" else "completed"
        head = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        made.append({**head, "content": [part]})
    for call in calls_of(answer):
        own = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        made.append({"type": "function_call", **own, **call["function"]})
    return made


def response_chunks(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The events of a streamed `response`."""
    whole = response_answer(asked, answer)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: Items = [{"type": f"response.{status}", "response": begun} for status in ("created", "in_progress")]
    for i, item in enumerate(whole["output"]):
        events += _item_events(i, item)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _item_events(index: int, item: dict[str, Any]) -> Items:
    where = {"output_index": index, "item_id": item["id"]}
    begun: dict[str, Any] = {**item, "status": "in_progress"}
    inside: Items = []
    if item["type"] == "message":
        [part] = item["content"]
        begun["content"] = []
        at = {**where, "content_index": 0}
        inside = [
            {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    elif item["type"] == "function_call":
        begun["arguments"] = ""
        kind = "response.function_call_arguments"
        inside = [
            {"type": f"{kind}.delta", **where, "delta": item["arguments"]},
            {"type": f"{kind}.done", **where, "name": item["name"], "arguments": item["arguments"]},
        ]
    first = {"type": "response.output_item.added", "output_index": index, "item": begun}
    last = {"type": "response.output_item.done", "output_index": index, "item": item}
    return [first, *inside, last]


# ---- answers of /v1/messages ----

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_answer(asked: Asked, answer: Answer) -> dict[str, Any]:
    """The body of a `message`."""
    blocks: Items = []
    if thought := answer.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if answer.message["content"]:
        blocks.append({"type": "text", "text": answer.message["content"], "citations": None})
    for call in calls_of(answer):
        arguments = answer.message["tool_calls"][int(call["id"].rpartition("_")[2])]["function"]["arguments"]
        own = arguments if isinstance(arguments, dict) else {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": own})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": blocks,
        "stop_reason": "stop_sequence" if answer.stop else STOPS[answer.finish],
        "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)},
        "podium": decided(asked, answer),
    }


def message_chunks(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    """The events of a streamed `message`."""
    whole = message_answer(asked, answer)
    usage = {**whole["usage"], "output_tokens": 0}
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**whole, **begun, "usage": usage}}
    for i, block in enumerate(whole["content"]):
        kind, name, text = _BLOCKS[block["type"]](block)
        empty = {**block, **({"input": {}} if block["type"] == "tool_use" else {name: ""})}
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": {"type": kind, _DELTAS[kind]: text}}
        yield {"type": "content_block_stop", "index": i}
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_BLOCKS: Mapping[str, Callable[[dict[str, Any]], tuple[str, str, str]]] = {
    "text": lambda block: ("text_delta", "text", block["text"]),
    "thinking": lambda block: ("thinking_delta", "thinking", block["thinking"]),
    "tool_use": lambda block: ("input_json_delta", "input", json.dumps(block["input"])),
}


def message_error(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}

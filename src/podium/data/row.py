"""Problems of one row: of its prompt, plain or a conversation; messages about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.data.columns import QUESTIONS, RESERVED, likely, names_or_none
from podium.errors import Finding
from podium.errors.texts import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Known to the templates of common models. A role that the chat template itself names is accepted too."""

_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_LISTED = 20  # problems written out in one message; the rest is counted

UNWRITTEN = frozenset({"D001", "D003", "D005"})
"""Codes of problems that a row has where an environment is to write its prompt."""

LEAVE_OUT = "leave such rows out, for example with `dataset.filter(...)`"
TEXT_ONLY = "Podium trains on text only; remove the images, or train this dataset with TRL"


def check_row(row: Any, index: int, *, chat_template: str | None = None) -> Finding | None:
    """The problem of one row's prompt, or None. A role that `chat_template` names is accepted."""
    if not isinstance(row, Mapping):
        return row_problem("D006", index, f"the row is {shown(row)}", 'a row is a dict: {"prompt": ...}')
    if "prompt" not in row:
        fix = rename(row) if likely(list(row))[0] in (*QUESTIONS, *RESERVED) else LEAVE_OUT
        return row_problem("D001", index, f"no `prompt`; the row has {names_or_none(row)}", fix)
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return _check_text(prompt, index)
    if isinstance(prompt, (list, tuple)):
        return _check_conversation(prompt, index, chat_template)
    if prompt is None:
        return row_problem("D005", index, "prompt is null", LEAVE_OUT)
    fix = "a prompt is a string or a list of messages"
    if isinstance(prompt, Mapping):
        fix = f"{fix}; put the message into a list"
    return row_problem("D006", index, f"prompt is {shown(prompt)}", fix)


def no_template(row: int) -> Finding:
    """Chat rows, and a tokenizer without a chat template."""
    fix = (
        "use an instruct model, or set `tokenizer.chat_template` (that of the instruct model of the same family fits) "
        "and pass the tokenizer as `processing_class`, or write the prompts as plain strings"
    )
    return row_problem("M004", row, "the prompt is a conversation, but the tokenizer has no chat template", fix)


def _check_text(text: str, index: int) -> Finding | None:
    if not text or text.isspace():
        code, how = ("D003", "only whitespace") if text else ("D002", "empty")
        return row_problem(code, index, f"prompt is {how}", LEAVE_OUT)
    return _surrogate(text, index, "the prompt")


def _surrogate(text: str, index: int, where: str) -> Finding | None:
    """Half of a character, as a cut through UTF-16 leaves it: no tokenizer takes it."""
    if text.isascii() or (found := _SURROGATE.search(text)) is None:
        return None
    what = f"{where} has half a character (U+{ord(found[0]):04X}) at offset {found.start()}, which is not text"
    return row_problem("D033", index, what, LEAVE_OUT)


def _check_conversation(messages: Sequence[Any], index: int, chat_template: str | None) -> Finding | None:
    if not messages:
        return row_problem("D007", index, "the conversation has no messages", LEAVE_OUT)
    for number, message in enumerate(messages, start=1):
        if problem := _check_message(message, chat_template):
            code, what, fix = problem
            return row_problem(code, index, f"message {number}{what}", fix)
    if not any(text_of(message).strip() for message in messages):
        return row_problem("D003", index, "the conversation has no text in any message", LEAVE_OUT)
    texts = ((n, text_of(m)) for n, m in enumerate(messages, start=1))
    return next((bad for n, text in texts if (bad := _surrogate(text, index, f"message {n}"))), None)


def _check_message(message: Any, chat_template: str | None) -> tuple[str, str, str] | None:
    """Code, what and fix of the first thing wrong with a message."""
    shape = 'a message is {"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        return "D009", f" is {shown(message)}", shape
    if message.get("role") is None:
        cure = "; rename `from` to `role` and `value` to `content`" if "from" in message else ""
        cure += ", and `human` to `user`, `gpt` to `assistant`" if message.get("from") in ("human", "gpt") else ""
        return "D009", f": `role` missing; it has {names_or_none(message)}", shape + cure
    role = message["role"]
    if role not in ROLES and not any(f"{mark}{role}{mark}" in (chat_template or "") for mark in "'\""):
        return "D010", f': unknown role "{role}"', f"roles are {', '.join(ROLES)}. {did_you_mean(role, ROLES)}".rstrip()
    if role == "assistant" and message.get("tool_calls"):
        return None
    return _check_content(message, shape)


def _check_content(message: Mapping[str, Any], shape: str) -> tuple[str, str, str] | None:
    role = f" ({message['role']})"
    if "content" not in message:
        return "D009", f"{role}: `content` missing; it has {names_or_none(message)}", shape
    content = message["content"]
    if content is None:
        return "D008", f"{role}: content is null", LEAVE_OUT
    if isinstance(content, str):
        return None
    is_parts = isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and (part.get("type") != "text" or isinstance(part.get("text"), str))
        for part in content
    )
    if not is_parts:
        return "D009", f"{role}: content is {shown(content)}", shape
    kinds = {str(part.get("type")) for part in content} - {"text"}
    return ("D036", f"{role}: content of type {', '.join(sorted(kinds))}", TEXT_ONLY) if kinds else None


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text; parts of text are joined.

    >>> text_of({"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]})
    '1+1'
    """
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


def row_problem(code: str, row: int | None, what: str, fix: str) -> Finding:
    """An error of one row; None: of the dataset."""
    where = "" if row is None else f"row {row}: "
    return Finding(code=code, severity="error", what=where + what, fix=fix, facts={"leave_out": fix == LEAVE_OUT})


def problems_text(name: str, findings: Sequence[Finding]) -> str:
    """One message of many problems; each fix is written once.

    >>> print(problems_text("train_dataset", [row_problem("D005", 8, "prompt is null", "drop it")]))
    train_dataset, row 8: prompt is null [D005]
      fix: drop it
    """
    if len(findings) == 1:
        lines = [f"{name}, {findings[0].what} [{findings[0].code}]"]
    else:
        lines = [f"{name} has {len(findings)} problems:"]
        lines += [f"  {finding.what} [{finding.code}]" for finding in findings[:MAX_LISTED]]
        if len(findings) > MAX_LISTED:
            lines.append(f"  and {len(findings) - MAX_LISTED} more")
    codes_by_fix: dict[str, dict[str, None]] = {}
    for finding in findings[:MAX_LISTED]:
        if finding.fix:
            codes_by_fix.setdefault(finding.fix, {})[finding.code] = None
    coded = len(codes_by_fix) > 1
    for fix, codes in codes_by_fix.items():
        lines.append(f"  fix{' (' + ', '.join(codes) + ')' if coded else ''}: {fix}")
    return "\n".join(lines)


def rename(columns: Iterable[str], name: str = "dataset") -> str:
    """The call that gives the column with the question the name `prompt`."""
    question, answer = likely(list(columns))
    told = {question: "prompt", **({answer: "answer"} if answer in RESERVED else {})}
    name = name if name.isidentifier() else "dataset"
    one = f'rename_column("{question}", "prompt")' if len(told) == 1 else f"rename_columns({told})".replace("'", '"')
    return f"GRPO needs a column `prompt`: {name} = {name}.{one}"


def shown(value: Any) -> str:
    """A value for a message, with its type."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"

"""What an event says, read as a client: text, reasoning, end, error, usage, in nine dialects.

The same word "Two", as the streams of the field carry it:

    native         {"text": "Two"}                                          [DONE]
    named          event: token    {"text": "Two"}                          event: done
    bare           "Two"                                                    [DONE]
    openai         {"choices": [{"delta": {"content": "Two"}}]}             [DONE]
    completions    {"choices": [{"text": "Two"}]}                           [DONE]
    responses      {"type": "response.output_text.delta", "delta": "Two"}   response.completed
    anthropic      {"type": "content_block_delta", "delta": {"text": ...}}  message_stop
    ollama         {"message": {"content": "Two"}, "done": false}           "done": true
    plain          Two                                                      the end of the message

A dialect is a function from an event's type and data to a `Meaning`, and never to half of one: a
role, a heartbeat, usage, `null` and `""` have no text, so they can't be taken for a first token.
*Reasoning* is what the model generated that is not the reply: its thoughts, a call's arguments.

`Reader("auto")` finds the dialect by the shape of the events and keeps it from the first text on.
`auto` also takes what some servers stream raw, data that is no JSON, as text.

Not here: how events were cut out of bytes (`contents.py`). This is a reader that believes whoever
wrote; `dialects.py` is the writer, and stricter. Read next: `contents.py`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one event says, in whichever dialect it said it."""

    text: str = ""
    reasoning: str = ""  # generated, but no part of the reply: thoughts, a call's arguments
    end: bool = False
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    heartbeat: bool = False


class DialectError(ValueError):
    """An event is not what its dialect allows there."""


Reading = Callable[[str, str], Meaning]

NOTHING = Meaning()
THE_END = Meaning(end=True)


# The project's own


def read_native(event_type: str, data: str) -> Meaning:
    """Return the meaning of an event of `/stream` (plain, named, bare) or a message of `/ws`.

    Events of unknown types mean nothing, as `EventSource` has it. Usage ends nothing: some servers
    send it with every piece.
    """
    if event_type not in ("message", "token", "done", "error"):
        return NOTHING
    if data == DONE:
        return THE_END
    if event_type == "error":
        return Meaning(end=True, error=error_words(data))
    if event_type == "message" and data.startswith('"'):
        return Meaning(text=_parse(data))
    record = _parse_object(data)
    if record.get("error") is not None:
        return Meaning(end=True, error=error_words(data))
    return Meaning(
        text=_text(record, "text", data),
        end=event_type == "done" or record.get("done") is True,
        finish_reason=_string(record, "finish_reason"),
        usage=_object(record, "usage"),
        timings=_object(record, "timings"),
    )


# The providers'


def read_openai(event_type: str, data: str) -> Meaning:
    """Return the meaning of a chunk of OpenAI's chat completions; of several choices the first."""
    return _read_choices(data, lambda choice: _read_delta(_object(choice, "delta") or {}, data))


def read_completions(event_type: str, data: str) -> Meaning:
    """Return the meaning of a chunk of OpenAI's (older) completions."""
    return _read_choices(data, lambda choice: (_text(choice, "text", data), ""))


def _read_choices(
    data: str, read_choice: Callable[[Mapping[str, Any]], tuple[str, str]]
) -> Meaning:
    """Return a chunk's meaning; `read_choice` finds text and reasoning in its choice."""
    if data == DONE:
        return THE_END
    record = _parse_object(data)
    if record.get("error") is not None:
        return Meaning(end=True, error=error_words(data))
    choices = record.get("choices")
    # The chunk of usage has no choice at all, and some servers begin with such a one.
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict) or choice.get("index") not in (None, 0):
        return Meaning(usage=_object(record, "usage"))
    text, reasoning = read_choice(choice)
    return Meaning(
        text=text,
        reasoning=reasoning,
        finish_reason=_string(choice, "finish_reason"),
        usage=_object(record, "usage"),
    )


def _read_delta(delta: Mapping[str, Any], data: str) -> tuple[str, str]:
    """Return the text and the reasoning of a chat chunk's delta, or of a whole message."""
    text = _text(delta, "content", data) or _text(delta, "refusal", data)
    thoughts = _text(delta, "reasoning_content", data) or _text(delta, "reasoning", data)
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = _object(call, "function") if isinstance(call, dict) else None
        thoughts += (_string(function, "name") or "") if function else ""
        thoughts += (_string(function, "arguments") or "") if function else ""
    return text, thoughts


_RESPONSE_TEXT = ("response.output_text.delta", "response.refusal.delta")
_RESPONSE_REASONING = (
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
)


def read_responses(event_type: str, data: str) -> Meaning:
    """Return the meaning of an event of OpenAI's responses."""
    if data == DONE:
        return NOTHING  # some servers add it; the end is `response.completed`
    record = _parse_object(data)
    kind = _string(record, "type") or event_type
    if kind in _RESPONSE_TEXT:
        return Meaning(text=_text(record, "delta", data))
    if kind in _RESPONSE_REASONING:
        return Meaning(reasoning=_text(record, "delta", data))
    if kind == "error":
        return Meaning(end=True, error=error_words(data))
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        response = _object(record, "response") or {}
        why = _object(response, "incomplete_details") or {}
        error = error_words(json.dumps(response)) if kind == "response.failed" else None
        return Meaning(
            end=True,
            error=error,
            finish_reason=_string(why, "reason") or _string(response, "status"),
            usage=_object(response, "usage"),
        )
    return NOTHING


_ANTHROPIC_TYPES = (
    *("message_start", "message_delta", "message_stop", "ping"),
    *("content_block_start", "content_block_delta", "content_block_stop"),
)
_BLOCK_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def read_anthropic(event_type: str, data: str) -> Meaning:
    """Return the meaning of an event of Anthropic's messages."""
    record = _parse_object(data)
    kind = _string(record, "type") or event_type
    delta = _object(record, "delta") or {}
    if kind == "content_block_delta":
        what = _string(delta, "type") or ""
        told = _text(delta, _BLOCK_DELTAS.get(what, ""), data)
        return Meaning(text=told) if what == "text_delta" else Meaning(reasoning=told)
    if kind == "message_start":
        return Meaning(usage=_object(_object(record, "message") or {}, "usage"))
    if kind == "message_delta":
        return Meaning(finish_reason=_string(delta, "stop_reason"), usage=_object(record, "usage"))
    if kind == "message_stop":
        return THE_END
    if kind == "error":
        return Meaning(end=True, error=error_words(data))
    return Meaning(heartbeat=kind == "ping")


def read_ollama(event_type: str, data: str) -> Meaning:
    """Return the meaning of a line of Ollama's `/api/chat` or `/api/generate`."""
    record = _parse_object(data)
    if record.get("error") is not None:
        return Meaning(end=True, error=error_words(data))
    message = _object(record, "message") or {}
    counts = {"prompt_tokens": "prompt_eval_count", "completion_tokens": "eval_count"}
    usage = {name: record[theirs] for name, theirs in counts.items() if theirs in record}
    return Meaning(
        text=_text(message, "content", data) or _text(record, "response", data),
        reasoning=_text(message, "thinking", data) or _text(record, "thinking", data),
        end=record.get("done") is True,
        finish_reason=_string(record, "done_reason"),
        usage=usage or None,
    )


def read_plain(event_type: str, data: str) -> Meaning:
    """Return data as the text it is, unless the event has a type that says otherwise."""
    if event_type in ("message", "token"):
        return THE_END if data == DONE else Meaning(text=data)
    if event_type == "error":
        return Meaning(end=True, error=error_words(data))
    return THE_END if event_type == "done" else NOTHING


READINGS: dict[str, Reading] = {
    "native": read_native,
    "named": read_native,
    "bare": read_native,
    "openai": read_openai,
    "completions": read_completions,
    "responses": read_responses,
    "anthropic": read_anthropic,
    "ollama": read_ollama,
    "plain": read_plain,
}
DIALECTS = ("auto", *READINGS)


class Reader:
    """Reads the events of one reply; `dialect` tells which it is, "auto" until that is known."""

    def __init__(self, dialect: str = "auto") -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"no dialect {dialect!r}: choose from {', '.join(DIALECTS)}")
        self.dialect = dialect

    def read(self, event_type: str, data: str) -> Meaning:
        """Return what an event says; DialectError where its dialect has no such event."""
        if self.dialect != "auto":
            return READINGS[self.dialect](event_type, data)
        if data == DONE or (event_type == "done" and not data.startswith("{")):
            return THE_END
        dialect = detect(event_type, data)
        meaning = READINGS[dialect](event_type, data)
        if meaning.text or meaning.reasoning:
            self.dialect = dialect
        return meaning

    def read_body(self, content: bytes) -> Meaning:
        """Return what a whole JSON reply says; DialectError when it is none."""
        data = content.decode("utf-8", "replace")
        record = _parse_object(data)
        if record.get("error") is not None:
            return Meaning(end=True, error=error_words(data))
        if self.dialect == "auto":
            self.dialect = _detect_body(record)
        return replace(_BODIES[self.dialect](record, data), end=True)


def detect(event_type: str, data: str) -> str:
    """Return the dialect that an event is shaped like; of two that say the same, the first."""
    if event_type == "error":
        return "native"
    try:
        record = _parse(data)
    except DialectError:
        return "plain" if event_type in ("message", "token") else "native"
    if isinstance(record, str):
        return "bare"
    if not isinstance(record, dict):
        return "plain"
    if event_type in ("token", "done"):
        return "named"
    kind = record.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        return "responses"
    if kind in _ANTHROPIC_TYPES or kind == "error":
        return "anthropic"
    choices = record.get("choices")
    if isinstance(choices, list):
        first = choices[0] if choices else None
        return "completions" if isinstance(first, dict) and "text" in first else "openai"
    return "ollama" if "message" in record or "response" in record else "native"


# Whole replies


def _detect_body(record: Mapping[str, Any]) -> str:
    choices = record.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return "openai" if "message" in choices[0] else "completions"
    if "output" in record:
        return "responses"
    if isinstance(record.get("content"), list):
        return "anthropic"
    return "ollama" if "message" in record or "response" in record else "native"


def _native_body(record: Mapping[str, Any], data: str) -> Meaning:
    if not isinstance(record.get("text"), str):
        raise DialectError(f"no text in it: {data}")
    return read_native("message", data)


def _choices_body(record: Mapping[str, Any], data: str) -> Meaning:
    choices = record.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise DialectError(f"no choices in it: {data}")
    choice = choices[0]
    message = _object(choice, "message")
    text, reasoning = _read_delta(message, data) if message else (_text(choice, "text", data), "")
    return Meaning(
        text=text,
        reasoning=reasoning,
        finish_reason=_string(choice, "finish_reason"),
        usage=_object(record, "usage"),
    )


def _blocks_body(record: Mapping[str, Any], data: str) -> Meaning:
    """Of Anthropic's messages: `content`; of OpenAI's responses: `output`, each with `content`."""
    blocks = record.get("content", record.get("output"))
    if not isinstance(blocks, list):
        raise DialectError(f"no content in it: {data}")
    texts, thoughts = [], []
    for item in (b for b in blocks if isinstance(b, dict)):
        parts = item.get("content")
        for part in parts if isinstance(parts, list) else [item]:
            if isinstance(part, dict):
                texts.append(_string(part, "text") or "")
                thoughts.append(_string(part, "thinking") or _string(part, "arguments") or "")
    why = _string(record, "stop_reason") or _string(record, "status")
    return Meaning(
        text="".join(texts),
        reasoning="".join(thoughts),
        finish_reason=why,
        usage=_object(record, "usage"),
    )


_BODIES: dict[str, Callable[[Mapping[str, Any], str], Meaning]] = {
    "native": _native_body,
    "named": _native_body,
    "bare": _native_body,
    "openai": _choices_body,
    "completions": _choices_body,
    "responses": _blocks_body,
    "anthropic": _blocks_body,
    "ollama": lambda record, data: read_ollama("message", data),
    "plain": _native_body,
}


# JSON that others wrote


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float | None:
    """Return a number, None for one that JSON can spell and a float can't hold (1e999)."""
    number = float(digits)
    return number if math.isfinite(number) else None


# Made once: `json.loads` would make one each.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _parse(data: str) -> Any:
    try:
        return _DECODER.decode(data)
    except (ValueError, RecursionError) as exc:
        raise DialectError(f"not JSON ({exc}): {data}") from None


def _parse_object(data: str) -> dict[str, Any]:
    value = _parse(data)
    if not isinstance(value, dict):
        raise DialectError(f"not a JSON object: {data}")
    return value


def _object(record: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = record.get(name)
    return value if isinstance(value, dict) else None


def _string(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    return value if isinstance(value, str) else None


def _text(record: Mapping[str, Any], name: str, data: str) -> str:
    """Return a member that holds text: absent, null and "" are none."""
    value = record.get(name)
    if not isinstance(value, str | None):
        raise DialectError(f"{name} is not a string: {data}")
    return value or ""


def error_words(data: str) -> str:
    """Return the message of an error, wherever common dialects put it; else all of it."""
    try:
        record = _parse_object(data)
    except DialectError:
        return data
    error = record.get("error", record)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else data

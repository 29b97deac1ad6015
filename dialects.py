"""What a request, a piece, an end and an error look like on the wire.

The server makes one reply; a dialect is how it is asked for and how it is told. The native one
comes in four forms, chosen by the route and the request's `events` field. For the reply "Two":

    plain    data: {"text": "Two"}          ... data: [DONE]
    named    event: token                   ... event: done
             data: {"text": "Two"}              data: {"finish_reason": ...}
    bare     data: "Two"                    ... data: [DONE]
    frames   {"text": "Two"}                ... {"done": true, ...}     (WebSocket messages)

With `usage` asked for, plain and bare send one more event before `[DONE]`. An error is
`event: error` and nothing after it, so it can't be taken for an end. Each class below has the
same three methods, each returning what to write: `piece`, `end`, `error`.

JSON is UTF-8, with the default separators. U+0085, U+2028 and U+2029 are escaped: they may stand
in JSON strings, but many clients split lines on them.

Not here: when to send what (`server.py`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import sse
from generation import BadRequest, Generation, SamplingParams

_LINE_ENDS_ELSEWHERE = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def to_json(value: object) -> str:
    """Encode as JSON that every line-based client keeps in one piece."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.translate(_LINE_ENDS_ELSEWHERE)


# --- What is asked for -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that was understood: what to continue, how to sample, how to tell it."""

    prompt: str | list[dict[str, Any]]
    params: SamplingParams
    events: str = "plain"
    usage: bool = False
    flush_ms: float | None = None
    flush_tokens: int | None = None
    hold_back: int = 0
    resume: bool = False
    faults: Mapping[str, int] | None = None


_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_DELIVERY = ("events", "usage", "flush_ms", "flush_tokens", "hold_back", "resume")
_NATIVE = ("prompt", "messages", *_SAMPLING, *_DELIVERY)
# Longer than this is not streaming any more.
MAX_FLUSH_MS = 10_000
MAX_FLUSH_TOKENS = MAX_HOLD_BACK = 1000


def parse_content(content: bytes) -> dict[str, Any]:
    """Parse a request's JSON object; `BadRequest` for all that is none."""
    try:
        body = _parse_json(content.decode())
    except UnicodeError as error:
        raise BadRequest("the content is not valid Unicode") from error
    if not isinstance(body, dict):
        raise BadRequest("the content must be a JSON object")
    return body


def _parse_json(text: str) -> Any:
    """Also refuse what Python's parser lets through and JSON does not, or nobody could use: NaN,
    a name twice in one object, half a surrogate pair, numbers and depths without end."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
        if "\\u" in text:  # the only way for half a surrogate pair to get in
            json.dumps(value, ensure_ascii=False).encode()
    except (BadRequest, UnicodeError):
        raise
    except RecursionError as error:
        raise BadRequest("the content is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the content is not valid JSON: {error}") from error
    except ValueError as error:  # Python's bound on the digits of an integer
        raise BadRequest("the content holds a number with too many digits") from error
    return value


def _refuse_constant(name: str) -> object:
    raise BadRequest(f"{name} is not a JSON number")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        raise BadRequest("a name occurs twice in one object")
    return body


def parse_native(body: Mapping[str, Any], fault_names: tuple[str, ...] = ()) -> Ask:
    """Check a native request; `BadRequest` names the field. Unknown fields are refused."""
    for name in body:
        if name not in _NATIVE and name not in fault_names:
            raise BadRequest(f"unknown field {name[:100]!r}", name[:100])
    body = {name: value for name, value in body.items() if value is not None}  # null: absent
    given = {name: body[name] for name in _SAMPLING if name in body}
    if "stop" in given:
        given["stop"] = _stops(given["stop"])
    return Ask(
        _prompt(body),
        SamplingParams(**given),
        _choice(body, "events", ("plain", "named", "bare")),
        _flag(body, "usage"),
        _milliseconds(body, "flush_ms"),
        _count(body, "flush_tokens", 1, MAX_FLUSH_TOKENS) if "flush_tokens" in body else None,
        _count(body, "hold_back", 0, MAX_HOLD_BACK) if "hold_back" in body else 0,
        _flag(body, "resume"),
        {name: _count(body, name) for name in fault_names if name in body},
    )


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise BadRequest("stop must be a string or a list of strings", "stop")


def _prompt(body: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("give either prompt or messages", "prompt")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest("prompt must be a string that is not empty", "prompt")
        return prompt
    return _messages(messages)


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", "messages")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise BadRequest("each message must have a role and a content", "messages")
        if message["role"] not in ("system", "user", "assistant"):
            raise BadRequest("each role must be system, user or assistant", "messages")
        if not isinstance(message["content"], str):
            raise BadRequest("each content must be a string", "messages")
    return messages


def _choice(body: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = body.get(name, choices[0])
    if value not in choices:
        raise BadRequest(f"{name} must be one of {', '.join(choices)}", name)
    return str(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", name)
    return value


def _count(body: Mapping[str, Any], name: str, low: int = 0, high: int = 10**9) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}", name)
    return value


def _milliseconds(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= MAX_FLUSH_MS
    ):
        raise BadRequest(f"{name} must be above 0 and at most {MAX_FLUSH_MS}", name)
    return float(value)


def parse_query(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Turn a query's pairs into what the JSON body would say; `BadRequest` names the field.

    `stop` may be repeated; numbers and true/false are read by the type of their field.
    """
    body: dict[str, Any] = {}
    for name, text in pairs:
        if name == "stop":
            body.setdefault("stop", []).append(text)
        elif name in body:
            raise BadRequest(f"{name[:100]} occurs twice", name[:100])
        else:
            body[name] = _query_value(name, text)
    return body


def _query_value(name: str, text: str) -> Any:
    if name in ("prompt", "events"):
        return text
    try:
        # JSON's numbers, true and false: never int(), which takes "1_0" and other scripts' digits.
        return _parse_json(text)
    except ValueError:  # of any kind
        return text  # which the field's own check then refuses by name


# --- What is told ------------------------------------------------------------------------------


class Events(Protocol):
    """How a streamed reply is written: as bytes, or as the text of a message.

    `id` is the event's id where events are numbered.
    """

    def piece(self, text: str, id: str | None) -> bytes | str:
        """One piece of text."""

    def end(self, generation: Generation, id: str | None) -> bytes | str:
        """The end of a complete reply."""

    def error(self, message: str, type: str, id: str | None) -> bytes | str:
        """The end of a reply that failed: words, and no end marker."""


def _summary(generation: Generation) -> dict[str, Any]:
    return {
        "finish_reason": generation.finish_reason,
        "usage": generation.usage,
        "timings": generation.timings.as_dict(),
    }


class Plain:
    """One unnamed event a piece, and `[DONE]`."""

    heartbeat = sse.encode_comment("")

    def __init__(self, usage: bool = False) -> None:
        self._usage = usage

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`data: {"text": "Two"}`."""
        return sse.encode(to_json({"text": text}), id=id)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """The usage if it was asked for, then `[DONE]`.

        Only `[DONE]` has the id: a client that has it has all.
        """
        usage = sse.encode(to_json(_summary(generation))) if self._usage else b""
        return usage + sse.encode("[DONE]", id=id)

    def error(self, message: str, type: str, id: str | None = None) -> bytes:
        """`event: error`."""
        return sse.encode(to_json({"message": message, "type": type}), event="error", id=id)


class Bare(Plain):
    """Each event a JSON string: the fewest bytes."""

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`data: "Two"`."""
        return sse.encode(to_json(text), id=id)


class Named(Plain):
    """Every event says what it is."""

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`event: token`."""
        return sse.encode(to_json({"text": text}), event="token", id=id)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """`event: done`."""
        return sse.encode(to_json(_summary(generation)), event="done", id=id)


def events(ask: Ask) -> Events:
    """The form of events that a request asks for."""
    forms: dict[str, Callable[[bool], Events]] = {"plain": Plain, "named": Named, "bare": Bare}
    return forms[ask.events](ask.usage)


def reply_json(generation: Generation, text: str) -> dict[str, Any]:
    """A buffered reply."""
    summary = _summary(generation)
    del summary["timings"]
    return {"text": text, **summary}


class Frames:
    """The native messages of a WebSocket."""

    def piece(self, text: str, id: str | None = None) -> str:
        """`{"text": "Two"}`."""
        return to_json({"text": text})

    def end(self, generation: Generation, id: str | None = None) -> str:
        """`{"done": true, ...}`."""
        return to_json({"done": True, **_summary(generation)})

    def error(self, message: str, type: str, id: str | None = None) -> str:
        """`{"error": {...}}`."""
        return to_json({"error": {"message": message, "type": type}})

    def refusal(self, message: str, type: str, field: str | None) -> str:
        """An error that says which field of the request is wrong."""
        return to_json({"error": {"message": message, "type": type, "field": field}})

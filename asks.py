"""What is asked for: a request's JSON or query, checked field by field, becomes an `Ask`.

    content or query --> parse_content, parse_query --> a dictionary
    dictionary       --> a dialect's parse          --> Ask: prompt, SamplingParams, how to tell it

Everything that can be known to be wrong with a request is found here, before a stream begins, and
`BadRequest` names the field. This file has what all dialects need, and the native request; what
the providers' requests look like stands with their formats (`completions.py` and its neighbours).

Not here: tokens. Whether the prompt fits the context is known after tokenization, to the engine.
Read next: `dialects.py`, what is told.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine import Prompt, Turns
from generation import BadRequest, SamplingParams

# What a template writes around each message, about: many empty ones are work, too.
TURN_CHARACTERS = 50

# Objects and lists within each other. No request needs as many; what is told of a request, or to a
# template, a grammar or another server, is written by code that calls itself for each.
MAX_DEPTH = 200
# An hour: the simulated clock keeps a word for so long even when nobody waits for it any more.
LONGEST_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that was understood: what to continue, how to sample, how to tell it."""

    prompt: Prompt
    params: SamplingParams
    stream: bool = True
    model: str = ""
    events: str = "plain"
    usage: bool = False
    flush_ms: float | None = None
    flush_tokens: int | None = None
    hold_back: int = 0
    resume: bool = False
    simulated: bool = False  # by words on a schedule, where the server has a model too
    simulation: Mapping[str, int] | None = None  # schedule and faults of the simulated engine
    tool: str | None = None  # the function whose arguments the reply is
    schema_field: str = "schema"  # where the request has it
    prompts: tuple[Prompt, ...] = ()  # where one request asks for several replies
    pad: bool = False  # with a field that hides the length of each piece
    echo: bool = False  # the reply begins with its prompt
    background: bool = False  # the reply belongs to no connection
    repeated: Mapping[str, Any] = field(default_factory=dict)  # what the reply says of its request


def length(prompt: Prompt) -> int:
    """How much there is to tokenize, in characters or ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(
        TURN_CHARACTERS + len(item["content"]) if isinstance(item, dict) else 1 for item in prompt
    )


# Not logprobs: the native forms have no place to tell them.
_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "logprobs")
_DELIVERY = ("events", "usage", "flush_ms", "flush_tokens", "hold_back", "resume")
_NATIVE = ("model", "prompt", "messages", *_SAMPLING, *_DELIVERY)
STAND_IN = "simulated"  # the model's name for the words on a schedule beside the one served
# Of the faults on demand, those that a single JSON body can't have.
FOR_STREAMS = ("garbage_after", "split_at")
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
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_refuse_repeats,
        )
        if "\\u" in text:  # the only way for half a surrogate pair to get in
            json.dumps(value, ensure_ascii=False).encode()
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
            raise RecursionError
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


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # there is no way to write it in JSON, should a reply repeat it
        raise BadRequest("the content holds a number that is too large")
    return number


def _is_deep(value: object) -> bool:
    """Whether there are more than `MAX_DEPTH` objects and lists within each other."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        raise BadRequest("a name occurs twice in one object")
    return body


def parse_native(
    body: Mapping[str, Any], simulation_names: tuple[str, ...] = (), *, stream: bool = True
) -> Ask:
    """Check a native request; `BadRequest` names the field. Unknown fields are refused."""
    for name in body:
        if name not in _NATIVE and name not in simulation_names:
            raise BadRequest(f"unknown field {name[:100]!r}", name[:100])
    body = without_nulls(body)
    # What the other fields of delivery ask for a whole reply has: its usage, and one group.
    for name in () if stream else ("events", "resume", *FOR_STREAMS):
        if body.get(name) not in (None, False, "plain", "bare"):
            raise BadRequest(f"{name} is for streams", name)
    given = {name: body[name] for name in _SAMPLING if name in body}
    if "stop" in given:
        given["stop"] = stops(given["stop"])
    return Ask(
        _prompt(body),
        SamplingParams(**given),
        stream,
        events=choice(body, "events", ("plain", "named", "bare")),
        usage=flag(body, "usage"),
        flush_ms=_milliseconds(body, "flush_ms") if "flush_ms" in body else None,
        flush_tokens=count(body, "flush_tokens", 1, MAX_FLUSH_TOKENS)
        if "flush_tokens" in body
        else None,
        hold_back=count(body, "hold_back", 0, MAX_HOLD_BACK) if "hold_back" in body else 0,
        resume=flag(body, "resume"),
        simulated=choice(body, "model", ("default", STAND_IN)) == STAND_IN,
        simulation=simulation_in(body, simulation_names),
    )


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """A field that is null is absent, in every dialect."""
    return {name: value for name, value in body.items() if value is not None}


def simulation_in(body: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """What is asked of the simulated engine, where that answers (see `simulated.py`)."""
    return {
        name: count(body, name, high=LONGEST_MS if name.endswith("_ms") else 10**9)
        for name in names
        if name in body
    }


def stops(value: object) -> tuple[str, ...]:
    """Read a stop string, or a list of them; `SamplingParams` checks each."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise BadRequest("stop must be a string or a list of strings", "stop")


def _prompt(body: Mapping[str, Any]) -> str | Turns:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRequest("give either prompt or messages", "prompt")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest("prompt must be a string that is not empty", "prompt")
        return prompt
    return _messages(messages)


def _messages(messages: object) -> Turns:
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


def choice(body: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    """Read a field that is one of these words, by default the first."""
    value = body.get(name, choices[0])
    if value not in choices:
        raise BadRequest(f"{name} must be one of {', '.join(choices)}", name)
    return str(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Read true or false, by default false."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", name)
    return value


def count(body: Mapping[str, Any], name: str, low: int = 0, high: int = 10**9) -> int:
    """Read a whole number that is there."""
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}", name)
    return value


def _milliseconds(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_FLUSH_MS:
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
    if name in ("model", "prompt", "events"):
        return text
    try:
        # JSON's numbers, true and false: never int(), which takes "1_0" and other scripts' digits.
        return _parse_json(text)
    except ValueError:  # of any kind
        return text  # which the field's own check then refuses by name

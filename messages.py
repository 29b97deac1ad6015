"""Anthropic's dialect: messages, and the count of a prompt's tokens (`/v1/messages/count_tokens`).

    {"model": "default", "max_tokens": 20, "stream": true,
     "system": "Be brief.", "messages": [{"role": "user", "content": "Count."}]}

POST /v1/messages
        event: message_start
        data: {"type": "message_start", "message": {... "content": [], ... "usage": {...}}}
        event: content_block_start
        data: {"type": "content_block_start", "index": 0, "content_block": {...}}
        event: ping
        data: {"type": "ping"}
        event: content_block_delta
        data: {"type": "content_block_delta", "index": 0, "delta": {... "text": "Two"}}
        event: content_block_stop
        data: {"type": "content_block_stop", "index": 0}
        event: message_delta
        data: {"type": "message_delta", "delta": {"stop_reason": "end_turn", ...}, "usage": {...}}
        event: message_stop
        data: {"type": "message_stop"}
    or  event: error
        data: {"type": "error", "error": {"type": "api_error", "message": "the model failed"}}

`message_start` has the tokens of the prompt, `message_delta` those of the reply. Block 0 is a text,
or a `tool_use` where a tool was chosen: its pieces are `input_json_delta`s. A ping also breaks a
silence.

Each `data` says its `type` once more, and clients go by the `event` line. A last message of the
assistant's is continued: the reply is what follows it.

Not here: images, documents and thinking, server tools, prompt caching: refused by name, except for
`cache_control`, which asks for nothing that a reader could see.

Anthropic API reference: Messages, Streaming messages, Errors.
Read next: `outbound.py`.
"""

import json
from collections.abc import Mapping
from typing import Any

import sse
from asks import Ask, flag, simulation_in, without_nulls
from chats import (
    Tool,
    calling,
    chosen_tool,
    format_schema,
    given_tools,
    objects,
    parse_sampling,
    part_text,
    refuse,
    text_of,
    tool_of,
)
from dialects import to_json
from generation import BadRequest, Generation
from models import Served

# Known, and not to be had here; with the value that asks for nothing, where there is one.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
}
SAMPLING = {
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",  # not the provider's: so that a reply can be had again
}
FORMAT_SCHEMA = "output_config.format.schema"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
REFUSAL: dict[str, str | None] = {"stop_reason": "refusal", "stop_sequence": None}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _event(type: str, **fields: Any) -> bytes:
    return sse.encode(to_json({"type": type, **fields}), event=type)


PING = _event("ping")


class Messages:
    """The dialect of `/v1/messages`."""

    filter_is_an_end = True

    def __init__(self, served: Served) -> None:
        self._served = served

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; fields that nobody knows are ignored."""
        body = without_nulls(body)
        if "max_tokens" not in body:
            raise BadRequest("max_tokens is required", "max_tokens")
        body["max_tokens"] = self._served.max_tokens(body["max_tokens"])
        refuse(body, UNSUPPORTED)
        tool = chosen_tool(given_tools(body, _tool), *_tool_choice(body))
        chat = _chat(body)
        schema = _schema(body)
        if schema is not None and chat[-1]["role"] == "assistant":
            message = "output_config.format is not for a message that is continued"
            raise BadRequest(message, "output_config.format")
        params = parse_sampling(body, SAMPLING, tool.schema if tool else schema)
        if params.temperature > 1:
            raise BadRequest("temperature must be a number from 0 to 1", "temperature")
        return Ask(
            calling(chat, tool),
            params,
            flag(body, "stream"),
            self._served.model(body),
            simulation=simulation_in(body, self._served.simulation_names),
            tool=tool.name if tool else None,
            schema_field=tool.where if tool else FORMAT_SCHEMA,
        )

    def prompt(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a request would have the model read, to be counted."""
        body = without_nulls(body)
        self._served.model(body)
        refuse(body, UNSUPPORTED)
        return calling(_chat(body), chosen_tool(given_tools(body, _tool), *_tool_choice(body)))

    def events(self, ask: Ask, generation: Generation) -> "MessageEvents":
        """What tells one streamed reply."""
        return MessageEvents(ask, generation)

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """A whole message."""
        block = _block(ask, generation)
        block.update({"input": _arguments(text)} if ask.tool else {"text": text})
        return _message(ask, generation, [block], **_stop(ask, generation))

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """`{"type": "error", ...}`."""
        other = "invalid_request_error" if status < 500 else "api_error"
        return _error(ERROR_TYPES.get(status, other), message)


def _text_delta(text: str) -> bytes:
    return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _argument_delta(text: str) -> bytes:
    delta = {"type": "input_json_delta", "partial_json": text}
    return _event("content_block_delta", index=0, delta=delta)


class MessageEvents:
    """One message as events."""

    heartbeat = PING

    def __init__(self, ask: Ask, generation: Generation) -> None:
        self._ask = ask
        self.unnumbered = _argument_delta if ask.tool else _text_delta
        self._generation = generation

    def begin(self) -> bytes:
        """Everything that is known before the first piece."""
        message = _message(self._ask, self._generation, [], stop_reason=None, stop_sequence=None)
        block = _block(self._ask, self._generation)
        return (
            _event("message_start", message=message)
            + _event("content_block_start", index=0, content_block=block)
            + PING
        )

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`content_block_delta`."""
        return self.unnumbered(text)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """The three events of every end; an error when somebody else had it cancelled."""
        if generation.finish_reason == "cancelled":
            return self.error("the reply was cancelled", "cancelled")
        return self._end(_stop(self._ask, generation))

    def error(self, message: str, type: str, id: str | None = None) -> bytes:
        """`event: error`; for a filter the provider has a stop reason."""
        if type == "content_filter":
            return self._end(REFUSAL)
        error = "overloaded_error" if type == "unavailable" else "api_error"
        return sse.encode(to_json(_error(error, message)), event="error")

    def _end(self, stop: dict[str, str | None]) -> bytes:
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=stop, usage=_usage(self._generation))
            + _event("message_stop")
        )


def _error(type: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": type, "message": message}}


def _hex(generation: Generation) -> str:
    return generation.id.removeprefix("reply-")


def _message(
    ask: Ask, generation: Generation, content: list[dict[str, Any]], **stop: Any
) -> dict[str, Any]:
    return {
        "id": f"msg_{_hex(generation)}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": content,
        **stop,
        "usage": _usage(generation),
    }


def _usage(generation: Generation) -> dict[str, int]:
    return {
        "input_tokens": generation.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
    }


def _block(ask: Ask, generation: Generation) -> dict[str, Any]:
    """The one block of a reply, still empty."""
    if ask.tool:
        id = f"toolu_{_hex(generation)}"
        return {"type": "tool_use", "id": id, "name": ask.tool, "input": {}}
    return {"type": "text", "text": ""}


def _arguments(text: str) -> object:
    """A tool's input; empty when it was cut short, since half an object can't be told."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _stop(ask: Ask, generation: Generation) -> dict[str, str | None]:
    """Why the reply ended. `BadRequest` when there is no word for it: somebody cancelled it."""
    if generation.filtered:
        return REFUSAL
    if generation.finish_reason not in STOP_REASONS:
        raise BadRequest("the reply was cancelled", type="cancelled")
    reason = STOP_REASONS[generation.finish_reason]
    if generation.matched_stop is not None:
        reason = "stop_sequence"
    elif reason == "end_turn" and ask.tool:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": generation.matched_stop}


# --- What is asked for -------------------------------------------------------------------------


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    chat = []
    if body.get("system", []) != []:
        chat.append({"role": "system", "content": text_of(body["system"], "system")})
    for where, message in objects(body, "messages"):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role must be user, assistant or system", f"{where}.role")
        chat += _turn(role, message.get("content"), f"{where}.content")
    return chat


def _turn(role: str, content: object, where: str) -> list[dict[str, Any]]:
    """One message of theirs: a message for each tool result, and one for its text and calls."""
    if not isinstance(content, list) or not content:
        return [{"role": role, "content": text_of(content, where)}]
    results, said = [], []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        match role, block:
            case "user", {"type": "tool_result"}:
                text = text_of(block.get("content") or "", f"{at}.content")
                results.append({"role": "tool", "content": text})
            case "assistant", {"type": "tool_use"}:
                said.append(to_json({"name": block.get("name"), "arguments": block.get("input")}))
            case _:
                said.append(part_text(block, at))
    return [*results, {"role": role, "content": "\n".join(said)}] if said else results


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{where}: tools of this type are not supported", f"{where}.type")
    return tool_of(tool, where, "input_schema", None)


def _tool_choice(body: Mapping[str, Any]) -> tuple[str, object]:
    """The kind of tool choice in the words of `chosen_tool`, and the tool's name."""
    match body.get("tool_choice", {"type": "auto"}):
        case {"type": "auto" | "none" as kind}:
            return kind, None
        case {"type": "any"}:
            return "required", None
        case {"type": "tool", "name": name}:
            return "named", name
    raise BadRequest("tool_choice must be auto, any, tool with a name, or none", "tool_choice")


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    config = body.get("output_config", {})
    if not isinstance(config, dict):
        raise BadRequest("output_config must be an object", "output_config")
    if config.get("effort") is not None:
        raise BadRequest("output_config.effort is not supported here", "output_config.effort")
    # `output_format` is what it was called at first, and still is by clients of that time.
    format = config.get("format") or body.get("output_format")
    return format_schema(format, "output_config.format", FORMAT_SCHEMA)

"""OpenAI's newer dialect: responses, and replies in the background.

    {"model": "default", "input": "Count.", "stream": true}

POST /v1/responses
        event: response.created
        data: {"type": "response.created", "sequence_number": 0, "response": {...}}
        event: response.in_progress
        data: {"type": "response.in_progress", "sequence_number": 1, "response": {...}}
        event: response.output_item.added
        data: {"type": "response.output_item.added", "sequence_number": 2, ... "item": {...}}
        event: response.content_part.added
        data: {"type": "response.content_part.added", "sequence_number": 3, ... "part": {...}}
        event: response.output_text.delta
        data: {"type": "response.output_text.delta", "sequence_number": 4, ... "delta": "Two", ...}
        event: response.output_text.done
        data: {"type": "response.output_text.done", "sequence_number": 5, ... "text": "Two", ...}
        event: response.content_part.done
        data: {"type": "response.content_part.done", "sequence_number": 6, ... "part": {...}}
        event: response.output_item.done
        data: {"type": "response.output_item.done", "sequence_number": 7, ... "item": {...}}
        event: response.completed
        data: {"type": "response.completed", "sequence_number": 8, "response": {...}}
    or  event: error
        data: {"type": "error", "sequence_number": 5, ... "message": "the model failed", ...}
        event: response.failed
        data: {"type": "response.failed", "sequence_number": 6, "response": {...}}

`response` is the whole object as it is then: at `created` what was asked for and nothing made yet,
at `completed` all of it, with usage. It ends with `response.incomplete` instead at
`max_output_tokens`, by a filter, or cancelled. Item 0 is a message with one part, or a
`function_call` where a tool was chosen, which has no parts: its pieces are
`response.function_call_arguments.delta`, then `.done`.

Every event has a `sequence_number`, 0, 1, 2 ... without a gap, and its `event` line is its `type`.
There is no `[DONE]`.

With `background: true` the reply belongs to no connection: its events are kept, so that event n is
number n of a `Replay`, and can be read again after any of them.

    POST /v1/responses                                {"background": true, ...}
    GET  /v1/responses/ID                             the response object as it is now
    GET  /v1/responses/ID?stream=true&starting_after=N     the events after number N
    POST /v1/responses/ID/cancel

Not here: images, files and audio, built-in tools, reasoning, conversations that the server
remembers (send the turns again): refused by name.

OpenAI API reference: Responses, Streaming events, Background mode.
Read next: `background.py`.
"""

import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import sse
from asks import Ask, flag, simulation_in, without_nulls
from chats import (
    ANY_OBJECT,
    Tool,
    calling,
    chosen_tool,
    format_schema,
    given_tools,
    objects,
    parse_sampling,
    refuse,
    text_of,
    tool_of,
)
from completions import COMMENT, asks_padding, obfuscation, openai_error, stream_options
from dialects import to_json
from generation import BadRequest, Generation, SamplingParams
from models import Served

# Known, and not to be had here; with the values that ask for nothing, where there are any.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),  # there is no reasoning
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
SAMPLING = {
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",  # this and seed are not the provider's: so that a reply can be had again
    "seed": "seed",
}
# Fields of the request that the response object repeats: of which type, and what by default.
REPEATED: dict[str, tuple[type, Any]] = {
    "background": (bool, False),
    "instructions": (str, None),
    "max_output_tokens": (int, None),
    "max_tool_calls": (int, None),
    "metadata": (dict, {}),
    "parallel_tool_calls": (bool, True),
    "previous_response_id": (str, None),
    "prompt_cache_key": (str, None),
    "reasoning": (dict, {"effort": None, "summary": None}),
    "safety_identifier": (str, None),
    "text": (dict, {}),
    "top_logprobs": (int, 0),
    "truncation": (str, "disabled"),
    "user": (str, None),
}
# The parts of a message: of what was asked, and of what was answered to it.
PARTS = ("input_text", "output_text", "refusal")
FORMAT_SCHEMA = "text.format.schema"
STATUS = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}


class Responses:
    """The dialect of `/v1/responses`."""

    filter_is_an_end = True

    def __init__(self, served: Served) -> None:
        self._served = served

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; fields that nobody knows are ignored."""
        body = without_nulls(body)
        refuse(body, UNSUPPORTED)
        background = flag(body, "background")
        if background and body.get("store") is False:
            raise BadRequest("a reply in the background has to be stored", "store")
        tools = given_tools(body, _tool)
        tool = chosen_tool(tools, *_tool_choice(body))
        format = format_schema(_format(body), "text.format", FORMAT_SCHEMA)
        schema = tool.schema if tool else format
        tokens = self._served.max_tokens(body.get("max_output_tokens"))
        params = parse_sampling({**body, "max_output_tokens": tokens}, SAMPLING, schema)
        return Ask(
            calling(_chat(body), tool),
            params,
            flag(body, "stream"),
            self._served.model(body),
            pad=asks_padding(stream_options(body), self._served),
            simulation=simulation_in(body, self._served.simulation_names),
            tool=tool.name if tool else None,
            schema_field=tool.where if tool else FORMAT_SCHEMA,
            resume=background,
            background=background,
            repeated=_repeated(body, params, tools),
        )

    def events(self, ask: Ask, generation: Generation) -> "ResponseEvents":
        """What tells one streamed reply."""
        return ResponseEvents(ask, generation)

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """A whole response."""
        reason = "content_filter" if generation.filtered else None
        return ResponseObject(ask, generation).ended(text, reason)

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """`{"error": {...}}`, as on the other routes of this provider."""
        # What the engine refuses of the prompt came as this.
        of_input = field == "messages" or type == "context_length_exceeded"
        return openai_error(status, message, type, "input" if of_input else field)


class ResponseObject:
    """The response as JSON, at each moment of its life."""

    def __init__(self, ask: Ask, generation: Generation) -> None:
        self._ask = ask
        self._generation = generation
        self._hex = generation.id.removeprefix("reply-")
        self._created_at = int(time.time())

    @property
    def item_id(self) -> str:
        """The id of the one output item."""
        return f"{'fc' if self._ask.tool else 'msg'}_{self._hex}"

    def begun(self) -> dict[str, Any]:
        """Nothing made yet."""
        return self._object("in_progress", [])

    def ended(self, text: str, reason: str | None = None) -> dict[str, Any]:
        """However it ended; `reason` when that was a filter."""
        status = "incomplete" if reason else STATUS[self._generation.finish_reason or ""]
        if status == "incomplete":
            reason = reason or "max_output_tokens"
        output = [self.item("completed" if status == "completed" else "incomplete", text)]
        more = {"incomplete_details": {"reason": reason}} if reason else {}
        return self._object(status, output, **more)

    def failed(self, text: str, message: str) -> dict[str, Any]:
        """With what there was until then."""
        error = {"code": "server_error", "message": message}
        return self._object("failed", [self.item("incomplete", text)], error=error)

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        """The output item: a message or a call; None: without its content yet."""
        if self._ask.tool:
            return {
                "id": self.item_id,
                "type": "function_call",
                "call_id": f"call_{self._hex}",
                "name": self._ask.tool,
                "arguments": text or "",
                "status": status,
            }
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "content": [] if text is None else [text_part(text)],
            "status": status,
        }

    def _object(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        ended = status != "in_progress"
        return {
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._ask.model,
            "output": output,
            "usage": self._usage() if ended else None,
            **self._ask.repeated,
            **more,
        }

    def _usage(self) -> dict[str, Any]:
        read, made = self._generation.prompt_tokens, self._generation.completion_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + made,
        }


def text_part(text: str) -> dict[str, Any]:
    """The one content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """One response as events."""

    heartbeat = COMMENT
    unnumbered = None  # each has a sequence number

    def __init__(self, ask: Ask, generation: Generation) -> None:
        self._pad = ask.pad
        self._tool = ask.tool  # whose arguments the reply is; None: it is a text
        self._object = ResponseObject(ask, generation)
        self._numbers = itertools.count()
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        """Everything that is known before the first piece."""
        begun = self._object.begun()
        item = self._object.item("in_progress", None)
        events = (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
        )
        if self._tool:
            return events
        return events + self._in_item("content_part.added", content_index=0, part=text_part(""))

    def piece(self, text: str, id: str | None = None) -> bytes:
        """A delta."""
        self._pieces.append(text)
        pad = {"obfuscation": obfuscation()} if self._pad else {}
        if self._tool:
            return self._in_item("function_call_arguments.delta", delta=text, **pad)
        return self._in_item("output_text.delta", content_index=0, delta=text, logprobs=[], **pad)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """The events that close what is open, then the whole response."""
        return self._end(None)

    def error(self, message: str, type: str, id: str | None = None) -> bytes:
        """An error in words, then the response as far as it came; a filter only cuts it short."""
        if type == "content_filter":
            return self._end("content_filter")
        failed = self._object.failed(self._text, message)
        error = self._event("error", code=type, message=message, param=None)
        return error + self._event("response.failed", response=failed)

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _end(self, reason: str | None) -> bytes:
        response = self._object.ended(self._text, reason)
        # There is no event for "cancelled": that response is incomplete, and its status says why.
        name = "completed" if response["status"] == "completed" else "incomplete"
        item = response["output"][0]
        return (
            (self._call_done() if self._tool else self._text_done())
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{name}", response=response)
        )

    def _text_done(self) -> bytes:
        text = self._text
        done = self._in_item("output_text.done", content_index=0, text=text, logprobs=[])
        return done + self._in_item("content_part.done", content_index=0, part=text_part(text))

    def _call_done(self) -> bytes:
        type, arguments = "function_call_arguments.done", self._text
        return self._in_item(type, name=self._tool, arguments=arguments)

    def _in_item(self, type: str, **fields: Any) -> bytes:
        item_id = self._object.item_id
        return self._event(f"response.{type}", item_id=item_id, output_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        data = {"type": type, "sequence_number": next(self._numbers), **fields}
        return sse.encode(to_json(data), event=type)


# --- What is asked for -------------------------------------------------------------------------


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    chat = []
    if "instructions" in body:
        chat.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    if isinstance(body.get("input"), str):
        return [*chat, {"role": "user", "content": body["input"]}]
    return chat + [_turn(item, where) for where, item in objects(body, "input")]


def _turn(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    match item:
        case {"type": "function_call"}:
            call = {"name": item.get("name"), "arguments": _arguments(item, where)}
            return {"role": "assistant", "content": to_json(call)}
        case {"type": "function_call_output"}:
            content = text_of(item.get("output"), f"{where}.output", ("input_text",))
            return {"role": "tool", "content": content}
        case {"type": kind} if kind != "message":
            raise BadRequest(f"{where}: items of this type are not supported", f"{where}.type")
        case {"role": "user" | "assistant" | "system" | "developer" as role}:
            content = text_of(item.get("content"), f"{where}.content", PARTS)
            return {"role": "system" if role == "developer" else role, "content": content}
    message = f"{where}.role must be user, assistant, system or developer"
    raise BadRequest(message, f"{where}.role")


def _arguments(item: Mapping[str, Any], where: str) -> Any:
    try:
        return json.loads(item.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):
        where = f"{where}.arguments"
        raise BadRequest(f"{where} must be JSON in a string", where) from None


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise BadRequest(f"{where}: only functions are supported", f"{where}.type")
    return tool_of(tool, where, "parameters", ANY_OBJECT)


def _tool_choice(body: Mapping[str, Any]) -> tuple[str, object]:
    """The kind of tool choice in the words of `chosen_tool`, and the function's name."""
    match body.get("tool_choice", "auto"):
        case "auto" | "none" | "required" as kind:
            return kind, None
        case {"type": "function", "name": name}:
            return "named", name
    message = "tool_choice must be auto, none, required or a function's name"
    raise BadRequest(message, "tool_choice")


def _repeated(body: Mapping[str, Any], params: SamplingParams, tools: list[Tool]) -> dict[str, Any]:
    """What the response object says of its request."""
    for name, (kind, _) in REPEATED.items():
        if name in body and type(body[name]) is not kind:  # True is an int to isinstance
            raise BadRequest(f"{name} must be a {kind.__name__}", name)
    text = body.get("text", {})
    return {
        **{name: body.get(name, default) for name, (_, default) in REPEATED.items()},
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [{"parameters": None, "strict": True, **tool.given} for tool in tools],
        "top_p": body.get("top_p", params.top_p),
    }


def _format(body: Mapping[str, Any]) -> object:
    match body.get("text", {}):
        case {"format": {"type": "json_schema", "name": str()} as format}:
            return format
        case {"format": {"type": "json_schema"}}:
            raise BadRequest("text.format.name must be a string", "text.format.name")
        case {"verbosity": verbosity} if verbosity not in (None, "medium"):
            raise BadRequest("text.verbosity is not supported here", "text.verbosity")
        case dict() as text:
            return text.get("format")
    raise BadRequest("text must be an object", "text")

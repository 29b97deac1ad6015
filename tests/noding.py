"""The clients for Node as `node/clients.mjs` has them: how each is asked, and what it was told.

They take what comes, so what they were told is checked here, event by event, against the strict
types of the providers' clients for Python.
"""

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatting import checked, choices, reason_of, text_of
from require import absent, require, require_program
from serving import PATIENCE_S, Running

openai_types = require("openai.types")
responses = require("openai.types.responses")
anthropic_types = require("anthropic.types")

from strict import strictly  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "node"

SDKS = ("chat", "completions", "responses", "messages")
AI = ("ai chat", "ai completions", "ai responses", "ai messages")
WAYS = (*SDKS, *AI)
# `ai` writes a prompt of its own for completions; there are no tools and no formats there either.
CHATS = tuple(way for way in WAYS if way != "ai completions")
CALLERS = tuple(way for way in CHATS if way != "completions")

METHODS = {
    "chat": ("openai", "chat.completions.create"),
    "completions": ("openai", "completions.create"),
    "responses": ("openai", "responses.create"),
    "messages": ("anthropic", "messages.create"),
}
# What each calls a limit of tokens, and strings to stop at.
NAMES = {
    "chat": ("max_tokens", "stop"),
    "completions": ("max_tokens", "stop"),
    "responses": ("max_output_tokens", None),
    "messages": ("max_tokens", "stop_sequences"),
}
HI = [{"role": "user", "content": "Count."}]


class Node:
    """The one process that makes all calls."""

    def __init__(self) -> None:
        program = require_program("node")
        if not (FOLDER / "node_modules" / "ai").exists():
            absent("the clients for Node are not installed: run `npm ci` in tests/node")
        self._process = subprocess.Popen(
            [program, str(FOLDER / "clients.mjs")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    async def call(self, running: Running, *calls: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What comes of these calls, made side by side."""
        base = f"http://127.0.0.1:{running.port}"
        line = json.dumps([{"base": base, **call} for call in calls])
        patience = asyncio.get_running_loop().call_later(5 * PATIENCE_S, self._process.kill)
        told = json.loads(await asyncio.to_thread(self._exchange, line))
        patience.cancel()
        assert len(told) == len(calls)
        return list(told)

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def close(self) -> None:
        """It ends with its input."""
        try:
            self._process.communicate(timeout=20)
        finally:
            self._process.kill()


def asking(
    way: str,
    *,
    stream: bool = True,
    tokens: int | None = 99,
    stop: Sequence[str] = (),
    abort_after: int | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A call for a reply to "Count."; `fields` are in the words of the way."""
    more = {} if abort_after is None else {"abortAfter": abort_after}
    if way in AI:
        ask = {"model": "default", "prompt": "Count.", "maxOutputTokens": tokens, **fields}
        if stop:
            ask["stopSequences"] = stop
        method = "streamText" if stream else "generateText"
        return {"client": way, "method": method, "args": [ask], **more}
    client, method = METHODS[way]
    of_tokens, of_stop = NAMES[way]
    ask = {"model": "default", "stream": stream, of_tokens: tokens, **prompt_of(way), **fields}
    if stop:
        ask[of_stop] = stop
    if stream and way in ("chat", "completions"):
        ask.setdefault("stream_options", {"include_usage": True})
    return {"client": client, "method": method, "args": [ask], **more}


def prompt_of(way: str) -> dict[str, Any]:
    if way in ("chat", "messages"):
        return {"messages": HI}
    return {"input" if way == "responses" else "prompt": "Count."}


def with_tool(way: str, schema: Any, named: bool = True) -> dict[str, Any]:
    """The fields that have the model call `look`: by its name, or as the only one."""
    if way in AI:
        choice: Any = {"type": "tool", "toolName": "look"} if named else "required"
        return {"tools": {"look": schema}, "toolChoice": choice}
    if way == "messages":
        choice = {"type": "tool", "name": "look"} if named else {"type": "any"}
        return {"tools": [{"name": "look", "input_schema": schema}], "tool_choice": choice}
    function = {"name": "look", "parameters": schema}
    if way == "responses":
        choice = {"type": "function", "name": "look"} if named else "required"
        return {"tools": [{"type": "function", **function}], "tool_choice": choice}
    choice = {"type": "function", "function": {"name": "look"}} if named else "required"
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def with_format(way: str, schema: Any) -> dict[str, Any]:
    """The fields that keep the text to a schema."""
    if way in AI:
        return {"output": schema}
    if way == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if way == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "it", "schema": schema}}}
    inner = {"name": "it", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


class Told:
    """What a way was told of a reply: its events or body checked strictly, and in common words."""

    text: str
    arguments = ""
    reason: str | None = None
    usage: tuple[int | None, int | None] = (None, None)

    def __init__(self, way: str, told: Mapping[str, Any], error: bool = False) -> None:
        assert (told["error"] is not None) == error, told["error"]
        self.error = told["error"]
        events, value = told["events"], told["value"]
        self.route = way.removeprefix("ai ")
        if way in AI:
            self._of_ai(events, value)
        elif value is not None:
            self._body(value)
        else:
            self._events(events)

    def _of_ai(self, events: list[Any], value: Any) -> None:
        if value is not None:
            self._body(value["body"])
            called, finish, usage = value["toolCalls"], value["finishReason"], value["usage"]
            text = value["text"]
        else:
            self._events([event["rawValue"] for event in events if event["type"] == "raw"])
            text = "".join(event["text"] for event in events if event["type"] == "text-delta")
            called = [event for event in events if event["type"] == "tool-call"]
            ends = [event for event in events if event["type"] == "finish"]
            finish = ends[0]["finishReason"] if ends else None
            usage = ends[0]["totalUsage"] if ends else {}
        # What it makes of what it was told is what it was told; except that for a format it asks
        # Anthropic's route for a call, and makes a text of that.
        if self.arguments and not called:
            assert json.loads(text) == json.loads(self.arguments)
        else:
            assert text == self.text
            assert json.dumps([call["input"] for call in called]) == f"[{self.arguments}]"
        self.reason = finish
        self.usage = (usage.get("inputTokens"), usage.get("outputTokens"))

    def _body(self, body: Any) -> None:
        getattr(self, f"_{self.route}")(body)

    def _events(self, events: list[Any]) -> None:
        getattr(self, f"_{self.route}_events")(events)

    # One pair of methods a route.

    def _chat(self, body: Any) -> None:
        reply = strictly(openai_types.chat.ChatCompletion, body)
        (choice,) = reply.choices
        self.text, self.reason = choice.message.content or "", choice.finish_reason
        calls = choice.message.tool_calls or []
        self.arguments = "".join(call.function.arguments for call in calls)
        self.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)

    def _chat_events(self, events: list[Any]) -> None:
        self._chunks(events)
        calls = [call for c in choices(events) for call in c["delta"].get("tool_calls", ())]
        self.arguments = "".join(call["function"]["arguments"] for call in calls)

    def _completions(self, body: Any) -> None:
        reply = strictly(openai_types.Completion, body)
        (choice,) = reply.choices
        self.text, self.reason = choice.text, choice.finish_reason
        self.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)

    def _completions_events(self, events: list[Any]) -> None:
        self._chunks(events)

    def _chunks(self, events: list[Any]) -> None:
        checked(events)
        self.text = text_of(events)
        usage = events[-1].get("usage")
        if usage:
            self.reason = reason_of(events)
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])

    def _responses(self, body: Any) -> None:
        # `output_text` is the SDK's own addition.
        known = {name: value for name, value in body.items() if name != "output_text"}
        reply = strictly(responses.Response, known)
        (item,) = reply.output
        self.text = reply.output_text
        self.arguments = item.arguments if item.type == "function_call" else ""
        details = reply.incomplete_details
        self.reason = details.reason if details else reply.status
        self.usage = (reply.usage.input_tokens, reply.usage.output_tokens)

    def _responses_events(self, events: list[Any]) -> None:
        for number, event in enumerate(events):
            known = event
            if event["type"] == "response.function_call_arguments.done":
                # In the reference and in some SDKs' types, required; not in others.
                known = {name: value for name, value in event.items() if name != "name"}
            assert strictly(responses.ResponseStreamEvent, known).type == event["type"]
            assert event["sequence_number"] == number
        if "response" in events[-1]:
            self._responses(events[-1]["response"])
        told = {"output_text": "", "function_call_arguments": ""}
        for event in events:
            if event["type"].endswith(".delta"):
                told[event["type"].split(".")[1]] += event["delta"]
        self.text, self.arguments = told.values()

    def _messages(self, body: Any) -> None:
        reply = strictly(anthropic_types.Message, body)
        (block,) = reply.content
        self.text = block.text if block.type == "text" else ""
        self.arguments = json.dumps(block.input) if block.type == "tool_use" else ""
        self.reason = reply.stop_reason
        self.usage = (reply.usage.input_tokens, reply.usage.output_tokens)

    def _messages_events(self, events: list[Any]) -> None:
        events = [event for event in events if event["type"] != "ping"]
        failure = events.pop() if events[-1]["type"] == "error" else None
        assert failure is None or strictly(anthropic_types.shared.ErrorResponse, failure)
        for event in events:
            assert strictly(anthropic_types.RawMessageStreamEvent, event).type == event["type"]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        self.text = "".join(delta.get("text", "") for delta in deltas)
        self.arguments = "".join(delta.get("partial_json", "") for delta in deltas)
        ends = [event for event in events if event["type"] == "message_delta"]
        self.reason = ends[0]["delta"]["stop_reason"] if ends else None
        usage = ends[0]["usage"] if ends else {}
        self.usage = (usage.get("input_tokens"), usage.get("output_tokens"))


# What each way says of an end.
REASONS: dict[str, dict[str, str]] = {
    "chat": {"stop": "stop", "length": "length", "call": "tool_calls"},
    "completions": {"stop": "stop", "length": "length"},
    "responses": {"stop": "completed", "length": "max_output_tokens", "call": "completed"},
    "messages": {
        "stop": "end_turn", "length": "max_tokens", "call": "tool_use", "string": "stop_sequence",
    },
    **{way: {"stop": "stop", "length": "length", "call": "tool-calls"} for way in AI},
}  # fmt: skip


def reason_for(way: str, why: str) -> str:
    return REASONS[way].get(why, REASONS[way]["stop"])


def error_of(way: str, told: Any) -> Any:
    """The error that a way raised or, where errors are among the events, told of."""
    among = [event for event in told["events"] if event.get("type") == "error"]
    if told["error"] is not None:
        assert not among
        return told["error"]
    assert way in AI or way == "responses"
    return among[0]["error"] if way in AI else among[0]

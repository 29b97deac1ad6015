"""OpenAI's dialect that everybody speaks: chat completions.

    {"model": "default", "stream": true, "messages": [{"role": "user", "content": "Count."}]}

POST /v1/chat/completions
        data: {"id": ..., "choices": [{"index": 0, "delta": {"role": "assistant", ...}, ...}]}
        data: {"id": ..., "choices": [{"index": 0, "delta": {"content": "Two"}, ... null}]}
        data: {"id": ..., "choices": [{"index": 0, "delta": {}, ... "finish_reason": "stop"}]}
        data: [DONE]
    or  data: {"error": {"message": "the model failed", "type": "server_error", ...}}

With usage asked for, `data: {"id": ..., "choices": [], "usage": {...}}` comes before `[DONE]`.
Every chunk has the same `id`, `created` and `model`, and a `finish_reason`, which is null in all
but one. The arguments of a function that has to be called come as pieces of `tool_calls` in place
of `content`. The older dialect, which shares what it can with this one, is `legacy.py`'s.

A reply that fails ends with its error and no `[DONE]`: clients raise it, and keep what came before.
No event has an `id` line: the SDK for Python hands out an empty event for every comment that comes
after one.

The model decides nothing by itself: with `tool_choice` "auto" it answers in words, as with "none".

Not here: images and audio, `n`, penalties other than `repetition_penalty`, `logit_bias`: refused
by name. Other fields that the model has no use for (`user`, `metadata`, ...) are ignored.

OpenAI API reference: Chat completions, Streaming.
Read next: `legacy.py`.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import sse
from asks import Ask, count, flag, simulation_in, without_nulls
from chats import (
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
from dialects import to_json
from generation import BadRequest, Generation, SamplingParams, TokenLogprob
from models import Served

COMMENT = sse.encode_comment("")
DONE = sse.encode("[DONE]")

# Known, and not to be had here; with the values that ask for nothing, where there are any.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
UNSUPPORTED_CHAT: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "modalities": (["text"], []),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# The provider's names for ours; the last two are not the provider's, but widely sent.
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
}
MAX_TOP_LOGPROBS = {"top_logprobs": 20, "logprobs": 5}  # as the reference has it
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FORMAT_SCHEMA = "response_format.json_schema.schema"
FILTERED = "content_filter"


# --- What is asked for -------------------------------------------------------------------------


def told_with(body: Mapping[str, Any], served: Served, stream: bool) -> dict[str, Any]:
    """What `stream_options` say of how to tell the reply, as fields of `Ask`."""
    options = stream_options(body)
    if body.get("stream_options") and not stream:
        raise BadRequest("stream_options is for requests with stream", "stream_options")
    return {
        "usage": flag(options, "include_usage"),
        "pad": asks_padding(options, served),
        "simulation": simulation_in(body, served.simulation_names),
    }


def stream_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The object of this name, empty where there is none."""
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return without_nulls(options)


def asks_padding(options: Mapping[str, Any], served: Served) -> bool:
    """Whether each event shall hide its piece's length: see `obfuscation`."""
    return flag({"include_obfuscation": served.pad, **options}, "include_obfuscation")


def sampling_of(
    body: Mapping[str, Any], served: Served, logprobs: str, **fixed: Any
) -> SamplingParams:
    """The sampling fields; `logprobs` is the field that says how many likely tokens to tell."""
    tokens = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    names = {tokens: "max_tokens", logprobs: "logprobs", **SAMPLING}
    if logprobs in body:
        count(body, logprobs, 0, MAX_TOP_LOGPROBS[logprobs])
    body = {**body, tokens: served.max_tokens(body.get(tokens))}
    return parse_sampling(body, names, **fixed)


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_turn(message, where) for where, message in objects(body, "messages")]


def _turn(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    roles = ("user", "system", "developer", "assistant", "tool")
    if message.get("role") not in roles:
        raise BadRequest(f"{where}.role must be one of {', '.join(roles)}", f"{where}.role")
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if role != "assistant":
        return {"role": role, "content": text_of(content, f"{where}.content")}
    if message.get("audio") is not None:
        raise BadRequest(f"{where}.audio is not supported here", f"{where}.audio")
    if content is None:
        content = message.get("refusal")  # of a model that said nothing else
    said = [] if content is None else [text_of(content, f"{where}.content", ("text", "refusal"))]
    if message.get("tool_calls") not in (None, []):  # vLLM tells an empty list where there are none
        calls = objects(message, "tool_calls", f"{where}.")
        said += [_call(call, place) for place, call in calls]
    if not said:
        raise BadRequest(f"{where}.content must be a string or a list of parts", f"{where}.content")
    return {"role": role, "content": "\n".join(said)}


def _call(call: Mapping[str, Any], where: str) -> str:
    """A call that the assistant made, in the words in which most templates tell it."""
    function = call.get("function")
    if call.get("type") != "function" or not isinstance(function, dict):
        raise BadRequest(f"{where} must be the call of a function", where)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise BadRequest(f"{where}.function must have a name and arguments", f"{where}.function")
    return f'{{"name": {to_json(name)}, "arguments": {arguments or "{}"}}}'


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise BadRequest(f"{where} must be of type function", where)
    return tool_of(function, f"{where}.function", "parameters", NO_PARAMETERS)


def _tool_choice(body: Mapping[str, Any]) -> tuple[str, object]:
    """The kind of tool choice in the words of `chosen_tool`, and the function's name."""
    choice = body.get("tool_choice", "auto")
    if choice in ("auto", "none", "required"):
        return choice, None
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type") != "function":
        raise BadRequest("tool_choice must be auto, none, required or a function", "tool_choice")
    return "named", function.get("name")


def _format(body: Mapping[str, Any]) -> object:
    """`response_format`, with what this dialect has one level deeper brought up."""
    format = body.get("response_format")
    match format:
        case {"type": "json_schema", "json_schema": dict() as inner}:
            return {**inner, "type": "json_schema"}
    return format


# --- What is told ------------------------------------------------------------------------------


def openai_error(status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
    """`{"error": {...}}`, before the head."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    code: str | None = "invalid_api_key" if status == 401 else type
    if code in (kind, "not_found", "forbidden"):  # which says no more than the type does
        code = None
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def error_event(message: str, type: str) -> bytes:
    """The end of a stream that failed."""
    error = {"message": message, "type": "server_error", "param": None, "code": type}
    return sse.encode(to_json({"error": error}))


def usage_of(generations: Sequence[Generation]) -> dict[str, int]:
    """The tokens of one reply, or of several together."""
    usages = [generation.usage for generation in generations]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    completion = sum(usage["completion_tokens"] for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def obfuscation() -> str:
    """Characters without meaning, of random number: up to twice as many as a piece may have.

    Who watches an encrypted stream sees the size of each event, and could tell from it the length
    of each token, and from those the text.
    """
    return secrets.token_urlsafe(24)[: secrets.randbelow(32)]


class Chunks:
    """What the events of both dialects have in common. `lead` names the reply."""

    kind: str
    prefix: str
    unnumbered = None  # each names its reply

    def __init__(self, served: Served, ask: Ask, lead: Generation) -> None:
        self._ask = ask
        self._generation = lead
        self._same = {
            "id": lead.id.replace("reply-", self.prefix),
            "object": self.kind,
            "created": int(time.time()),
            "model": ask.model,
            "system_fingerprint": served.fingerprint,
        }
        self._usage: dict[str, Any] = {"usage": None} if ask.usage else {}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._same, "choices": [choice], **self._usage}
        if self._ask.pad:
            chunk["obfuscation"] = obfuscation()
        return sse.encode(to_json(chunk))

    def _finish(self, reason: str) -> bytes:
        raise NotImplementedError

    def closing(self, generations: Sequence[Generation]) -> bytes:
        """What follows the last finish: the usage if it was asked for, then `[DONE]`."""
        if not self._ask.usage:
            return DONE
        last = {**self._same, "choices": [], "usage": usage_of(generations)}
        return sse.encode(to_json(last)) + DONE

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """The finish, then what closes the stream."""
        if generation.finish_reason == "cancelled":
            return self.error("the reply was cancelled", "cancelled")
        return self._finish(finish_reason(self._ask, generation)) + self.closing([generation])

    def error(self, message: str, type: str, id: str | None = None) -> bytes:
        """The error in place of an end; but a filter only cuts the reply short."""
        if type == FILTERED:
            return self._finish(FILTERED) + self.closing([self._generation])
        return error_event(message, type)


def finish_reason(ask: Ask, generation: Generation) -> str:
    """Why the reply ended. `BadRequest` when there is no word for it: somebody cancelled it."""
    if generation.filtered:
        return FILTERED
    if generation.finish_reason == "stop":
        # A stop string cuts the arguments short: that is no call.
        return "tool_calls" if ask.tool and generation.matched_stop is None else "stop"
    if generation.finish_reason == "length":
        return "length"
    raise BadRequest("the reply was cancelled", type="cancelled")


# Chat.


class ChatChunks(Chunks):
    """The chunks of a chat completion."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, served: Served, ask: Ask, generation: Generation) -> None:
        super().__init__(served, ask, generation)
        self.heartbeat = self._delta({}) if served.heartbeat_events else COMMENT

    def begin(self) -> bytes:
        """The role, and the call's name if there is one."""
        if not self._ask.tool:
            return self._delta({"role": "assistant", "content": "", "refusal": None})
        calls = [{"index": 0, **_tool_call(self._ask, self._generation, "")}]
        return self._delta({"role": "assistant", "content": None, "tool_calls": calls})

    def piece(self, text: str, id: str | None = None) -> bytes:
        """A piece of the content, or of the call's arguments."""
        if not self._ask.tool:
            return self._delta({"content": text})
        return self._delta({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})

    def _finish(self, reason: str) -> bytes:
        return self._delta({}, reason)

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return self._chunk(
            {
                "index": 0,
                "delta": delta,
                "logprobs": _logprobs(self._ask, self._generation),
                "finish_reason": reason,
            }
        )


def _tool_call(ask: Ask, generation: Generation, arguments: str) -> dict[str, Any]:
    return {
        "id": generation.id.replace("reply-", "call_"),
        "type": "function",
        "function": {"name": ask.tool, "arguments": arguments},
    }


def _logprobs(ask: Ask, generation: Generation) -> dict[str, Any] | None:
    """The log probabilities of the tokens that came since the last call, if they were asked for."""
    if ask.params.logprobs is None:
        return None
    told = [
        {**_token(token), "top_logprobs": [_token(other) for other in token.top]}
        for token in generation.take_logprobs()
    ]
    return {"content": told, "refusal": None} if told else None


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.raw)}


class Chat:
    """The dialect of `/v1/chat/completions`."""

    filter_is_an_end = True

    def __init__(self, served: Served) -> None:
        self._served = served

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; fields that nobody knows are ignored."""
        body = without_nulls(body)
        model = self._served.model(body)
        refuse(body, UNSUPPORTED_CHAT)
        stream = flag(body, "stream")
        tool = chosen_tool(given_tools(body, _tool), *_tool_choice(body))
        schema = format_schema(_format(body), "response_format", FORMAT_SCHEMA)
        if flag(body, "logprobs"):
            body.setdefault("top_logprobs", 0)
        elif body.pop("top_logprobs", 0) != 0:
            raise BadRequest("top_logprobs is for requests with logprobs", "top_logprobs")
        return Ask(
            calling(_chat(body), tool),
            sampling_of(body, self._served, "top_logprobs", schema=tool.schema if tool else schema),
            stream,
            model,
            tool=tool.name if tool else None,
            schema_field=tool.where if tool else FORMAT_SCHEMA,
            **told_with(body, self._served, stream),
        )

    def events(self, ask: Ask, generation: Generation) -> ChatChunks:
        """What tells one streamed reply."""
        return ChatChunks(self._served, ask, generation)

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """A whole chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if ask.tool:
            message |= {"content": None, "tool_calls": [_tool_call(ask, generation, text)]}
        return {
            "id": generation.id.replace("reply-", "chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": ask.model,
            "system_fingerprint": self._served.fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": _logprobs(ask, generation),
                    "finish_reason": finish_reason(ask, generation),
                }
            ],
            "usage": usage_of([generation]),
        }

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return openai_error(status, message, type, field)

"""What the tests of OpenAI's routes share: requests, and answers checked chunk by chunk."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from fakes import EOS, FakeModel
from require import require
from serving import Running

import sse
from engine import Engine

openai = require("openai")
types = require("openai.types")
chats = require("openai.types.chat")

from strict import strictly  # noqa: E402

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Count."}]
ASK: dict[str, Any] = {"model": "default", "messages": HI, "max_tokens": 5, "seed": 7}
TEXT_ASK: dict[str, Any] = {"model": "default", "prompt": "Count.", "max_tokens": 5, "seed": 7}
BODY: dict[str, Any] = {"model": "default", "messages": HI}
USAGE = {"stream_options": {"include_usage": True}}
LOOK = {"name": "look", "parameters": {"const": {"city": "Paris"}}}
TOOL = {"type": "function", "function": LOOK}
NAMED = {"type": "function", "function": {"name": "look"}}
FORCED = {"tools": [TOOL], "tool_choice": NAMED}
ARGUMENTS = '{"city": "Paris"}'


def saying(text: str, prompt: str = "Count.") -> Engine:
    """An engine whose model says this, and that it is done."""
    said = [*text.encode(), EOS]

    def script(history: Sequence[int]) -> int:
        return said[len(history) - len(prompt)]

    return Engine(FakeModel(script=script))


def chunks_of(content: bytes, ended: bool = True) -> list[dict[str, Any]]:
    """The chunks of a stream, each checked by itself; `[DONE]` is there, and last."""
    *data, last = [event.data for event in sse.Parser().feed(content)]
    assert (last == "[DONE]") == ended
    return checked([json.loads(text) for text in (data if ended else [*data, last])])


def checked(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These chunks of one stream, each checked by itself, and against the others."""
    for chunk in chunks:
        if "error" in chunk:
            error = chunk["error"]
            assert set(chunk) == {"error"}
            assert set(error) == {"message", "type", "param", "code"}
            continue
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
        if chunk["object"] == "chat.completion.chunk":
            strictly(chats.ChatCompletionChunk, _known(chunk))
        else:
            # The SDK has no type of a chunk here, and that of a whole reply has no null.
            whole = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
            strictly(types.Completion, {**_known(chunk), "choices": whole})
    told = [chunk for chunk in chunks if "error" not in chunk]
    for name in ("id", "created", "model", "object", "system_fingerprint"):  # field report 116
        assert len({chunk[name] for chunk in told}) == 1
    return chunks


def _known(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk without the one field that the SDK knows no type of."""
    return {name: value for name, value in chunk.items() if name != "obfuscation"}


async def stream(running: Running, route: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    body = {**(ASK if route == CHAT else TEXT_ASK), "stream": True, **fields}
    answer = await running.ask("POST", route, body)
    assert answer.status == 200, answer.content
    assert answer.fields.get("content-type") == "text/event-stream; charset=utf-8"
    assert answer.fields.get_all("x-accel-buffering") == ["no"]
    for line in (b"\nid:", b"\nretry:", b"\n:", b"\nevent:"):  # field report 27
        assert line not in b"\n" + answer.content
    return chunks_of(answer.content, answer.content.endswith(b"data: [DONE]\n\n"))


async def whole(running: Running, route: str = CHAT, **fields: Any) -> Any:
    body = {**(ASK if route == CHAT else TEXT_ASK), **fields}
    answer = await running.ask("POST", route, body)
    assert answer.status == 200, answer.content
    kind = chats.ChatCompletion if route == CHAT else types.Completion
    return strictly(kind, answer.json())


async def refused(running: Running, body: Any, route: str = CHAT, **fields: str) -> Any:
    """The status and the error of a request that is refused, streamed or not."""
    answers = []
    for streamed in (False, True):
        asked = {**body, "stream": streamed} if isinstance(body, dict) else body
        answer = await running.ask("POST", route, asked, **fields)
        assert answer.fields.get("content-type") == "application/json"
        assert set(answer.json()) == {"error"}
        strictly(openai.types.shared.ErrorObject, answer.json()["error"])
        answers.append((answer.status, answer.json()["error"]))
    assert answers[0] == answers[1]
    return answers[0]


def choices(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [c for chunk in chunks for c in chunk.get("choices", ()) if c["index"] == index]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of a choice, in either dialect."""
    told = choices(chunks, index)
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in told)


def reason_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The one finish reason of a choice: it is in the last chunk, and null in the others."""
    *others, last = [choice["finish_reason"] for choice in choices(chunks, index)]
    assert others == [None] * len(others)
    return last


def client(running: Running, kind: Any = None, **options: Any) -> Any:
    kind = kind or openai.AsyncOpenAI
    base = f"http://127.0.0.1:{running.port}/v1"
    return kind(base_url=base, max_retries=0, timeout=30, **{"api_key": "none", **options})


async def of_sdk(running: Running, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the SDK's blocking client, in a thread."""

    def run() -> Any:
        with client(running, openai.OpenAI) as sdk:
            return use(sdk)

    return await asyncio.to_thread(run)

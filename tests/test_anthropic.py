"""Anthropic's messages: every event against the SDK's own types, and the SDK itself as client."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import EOS, FakeModel
from require import require
from serving import Running, eventually, serving

import sse
from delivery import Policy
from engine import Engine
from pieces import Banned
from simulated import SimulatedEngine

anthropic = require("anthropic")
types = require("anthropic.types")
shared = require("anthropic.types.shared")

from strict import strictly  # noqa: E402

HI = [{"role": "user", "content": "Count."}]
ASK: dict[str, Any] = {"model": "default", "messages": HI, "max_tokens": 5, "seed": 7}
HEAD = ["message_start", "content_block_start", "ping"]
TAIL = ["content_block_stop", "message_delta", "message_stop"]
TOOL = {"name": "look", "input_schema": {"const": {"city": "Paris"}}}
BODY: dict[str, Any] = {"model": "default", "messages": HI, "max_tokens": 99}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}
ARGUMENTS = '{"city": "Paris"}'
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def saying(text: str, prompt: str = "Count.") -> Engine:
    """An engine whose model says this, and that it is done."""
    said = [*text.encode(), EOS]

    def script(history: Sequence[int]) -> int:
        return said[len(history) - len(prompt)]

    return Engine(FakeModel(script=script))


def events_of(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked by itself."""
    told = []
    for event in sse.Parser().feed(content):
        data = json.loads(event.data)
        assert event.type == data["type"]
        if event.type == "error":
            strictly(shared.ErrorResponse, data)
        elif event.type == "ping":
            assert data == {"type": "ping"}
        else:
            assert strictly(types.RawMessageStreamEvent, data).type == data["type"]
        told.append(data)
    return told


async def stream(running: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = await running.ask("POST", "/v1/messages", {**ASK, "stream": True, **fields})
    assert answer.status == 200, answer.content
    assert answer.fields.get("content-type") == "text/event-stream; charset=utf-8"
    assert answer.fields.get_all("x-accel-buffering") == ["no"]
    for line in (b"\nid:", b"\nretry:", b"\n:"):
        assert line not in answer.content
    return events_of(answer.content)


async def whole(running: Running, **fields: Any) -> Any:
    answer = await running.ask("POST", "/v1/messages", {**ASK, **fields})
    assert answer.status == 200, answer.content
    assert {"stop_reason", "stop_sequence"} <= set(answer.json())
    return strictly(types.Message, answer.json())


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in told]


def text_of(told: list[dict[str, Any]]) -> str:
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    return "".join(delta.get("text", delta.get("partial_json")) for delta in deltas)


def client(running: Running, kind: Any = None, **options: Any) -> Any:
    kind = kind or anthropic.AsyncAnthropic
    base = f"http://127.0.0.1:{running.port}"
    return kind(base_url=base, max_retries=0, timeout=30, **{"api_key": "none", **options})


async def of_sdk(running: Running, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the SDK's blocking client, in a thread."""

    def run() -> Any:
        with client(running, anthropic.Anthropic) as sdk:
            return use(sdk)

    return await asyncio.to_thread(run)


# How a reply can end: what the model says, what is asked for, what it is called.
ENDS = [
    pytest.param("One, two.", {}, "One, two.", "end_turn", None, id="end_turn"),
    pytest.param("", {}, "", "end_turn", None, id="empty"),
    pytest.param("x", {}, "x", "end_turn", None, id="one token"),
    pytest.param("One, two.", {"max_tokens": 3}, "One", "max_tokens", None, id="max_tokens"),
    pytest.param("One, two.", {"max_tokens": 1}, "O", "max_tokens", None, id="max_tokens 1"),
    pytest.param("x", {"max_tokens": 2}, "x", "end_turn", None, id="end at the last token"),
    pytest.param(
        "1,2,3,4",
        {"stop_sequences": ["5", "4"]},
        "1,2,3,",
        "stop_sequence",
        "4",
        id="stop_sequence",
    ),
    pytest.param("4", {"stop_sequences": ["4"]}, "", "stop_sequence", "4", id="nothing but stop"),
    pytest.param("é 你 😀 \u2028", {}, "é 你 😀 \u2028", "end_turn", None, id="characters"),
]


@pytest.mark.parametrize(("said", "fields", "text", "reason", "sequence"), ENDS)
class TestEveryEnd:
    """Field reports 107, 111, 125, 126."""

    async def test_of_a_stream(
        self, said: str, fields: Any, text: str, reason: str, sequence: str | None
    ) -> None:
        async with serving(saying(said)) as running:
            told = await stream(running, **{"max_tokens": 99, **fields})
        middle = kinds(told)[3:-3]
        assert kinds(told) == [*HEAD, *middle, *TAIL]
        assert set(middle) <= {"content_block_delta"}
        assert text_of(told) == text
        assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}

    async def test_of_a_whole_message(
        self, said: str, fields: Any, text: str, reason: str, sequence: str | None
    ) -> None:
        async with serving(saying(said)) as running:
            message = await whole(running, **{"max_tokens": 99, **fields})
        assert [block.text for block in message.content] == [text]
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)

    async def test_to_the_sdk(
        self, said: str, fields: Any, text: str, reason: str, sequence: str | None
    ) -> None:
        body = {"model": "default", "messages": HI, "max_tokens": 99, **fields}
        async with serving(saying(said)) as running, client(running) as sdk:
            async with sdk.messages.stream(**body) as events:
                message = await events.get_final_message()
            plain = await sdk.messages.create(**body)
        assert [block.text for block in message.content] == [text]
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert message.usage == plain.usage
        assert message.usage.input_tokens == len("Count.")


class TestEvents:
    async def test_message_start_knows_the_prompt(self) -> None:
        """Field report 123."""
        async with serving(saying("One.")) as running:
            told = await stream(running, max_tokens=99)
        message = told[0]["message"]
        assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (
            [], None, None,
        )  # fmt: skip
        assert message["usage"]["input_tokens"] == len("Count.")
        assert message["usage"]["output_tokens"] >= 0
        assert told[1]["content_block"] == {"type": "text", "text": ""}
        assert told[-2]["usage"]["output_tokens"] == len("One.") + 1

    async def test_ids_differ_between_replies(self) -> None:
        async with serving() as running:
            messages = [await whole(running), await whole(running)]
            told = await stream(running)
        ids = {*(message.id for message in messages), told[0]["message"]["id"]}
        assert len(ids) == 3
        assert all(id.startswith("msg_") for id in ids)

    async def test_of_a_tool(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            told = await stream(running, **FORCED, max_tokens=99)
        block = told[1]["content_block"]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {})
        assert {e["delta"]["type"] for e in told[3:-3]} == {"input_json_delta"}
        assert text_of(told) == ARGUMENTS
        assert told[-2]["delta"]["stop_reason"] == "tool_use"

    async def test_a_failure_is_told_in_words_and_keeps_what_came(self) -> None:
        """Field report 33: and never looks like an end."""
        async with serving() as running:
            told = await stream(running, fail_after=3)
        assert kinds(told) == [*HEAD, *["content_block_delta"] * 3, "error"]
        assert told[-1]["error"]["type"] == "api_error"
        assert told[-1]["error"]["message"]

    async def test_shutdown_is_told_in_words(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/v1/messages", {**ASK, "stream": True, "stall_after": 2})
            await peer.until(b"delta")
            await running.server.stop(goodbye_s=1)
            await peer.until(b"event: error")
        error = events_of(peer.content)[-1]["error"]
        assert error == {"type": "overloaded_error", "message": "the server is shutting down"}

    async def test_cancelled_by_its_id(self) -> None:
        for streamed in (True, False):
            async with serving() as running, running.connect() as peer:
                body = {**ASK, "stream": streamed, "stall_after": 2}
                peer.request("POST", "/v1/messages", body)
                await eventually(lambda: running.server.engine.running)
                (entry,) = running.server.entries
                await running.ask("POST", f"/cancel/{entry.generation.id}")
                answer = await peer.answer()
            error = events_of(answer.content)[-1] if streamed else answer.json()
            strictly(shared.ErrorResponse, error)
            assert error["error"]["message"] == "the reply was cancelled"
            assert answer.status == (200 if streamed else 400)

    async def test_a_filter_is_a_refusal(self) -> None:
        policy = Policy(banned=Banned(["two"]))
        async with serving(saying("One, two."), policy=policy) as running:
            told = await stream(running, max_tokens=99)
            message = await whole(running, max_tokens=99)
        assert kinds(told)[-3:] == TAIL
        assert told[-2]["delta"]["stop_reason"] == message.stop_reason == "refusal"
        assert message.content[0].text == text_of(told)
        assert "two" not in text_of(told)

    async def test_a_client_that_leaves_ends_its_generation(self) -> None:
        """Field report 87."""
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/v1/messages", {**ASK, "stream": True, "max_tokens": 10**6})
            await peer.until(b"delta")
            peer.close()
            await eventually(lambda: not running.server.engine.running)
            assert running.server.entries[0].client_left


class TestTools:
    async def test_whole(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            message = await whole(running, **FORCED, max_tokens=99)
        (block,) = message.content
        assert (block.type, block.name, block.input) == ("tool_use", "look", {"city": "Paris"})
        assert message.stop_reason == "tool_use"

    async def test_cut_short(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            message = await whole(running, **FORCED, max_tokens=4)
        assert (message.content[0].input, message.stop_reason) == ({}, "max_tokens")

    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
    async def test_to_the_sdk(self, choice: Any) -> None:
        body = {"model": "default", "messages": HI, "max_tokens": 99, "tools": [TOOL]}
        async with serving(Engine(FakeModel())) as running, client(running) as sdk:
            async with sdk.messages.stream(**body, tool_choice=choice) as events:
                message = await events.get_final_message()
        assert message.content[0].input == {"city": "Paris"}

    @pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}])
    async def test_not_chosen(self, choice: Any) -> None:
        async with serving() as running:
            message = await whole(running, tools=[TOOL], tool_choice=choice)
        assert message.content[0].type == "text"

    async def test_output_format(self) -> None:
        schema = {"const": {"n": 1}}
        config = {"format": {"type": "json_schema", "schema": schema}}
        async with serving(Engine(FakeModel())) as running:
            message = await whole(running, output_config=config, max_tokens=99)
        assert json.loads(message.content[0].text) == {"n": 1}


class Recorder(FakeModel):
    """Keeps the chats that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Any] = []

    def encode(self, prompt: Any) -> list[int]:
        self.chats.append(prompt)
        return super().encode(prompt)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def texts(*texts: str) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts
    ]


CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": texts("4")}
CHATS = [
    ({}, [turn("user", "Count.")]),
    ({"system": "Be brief."}, [turn("system", "Be brief."), *HI]),
    ({"system": texts("Be", "brief.")}, [turn("system", "Be\nbrief."), *HI]),
    ({"messages": [turn("user", texts("a", "b"))]}, [turn("user", "a\nb")]),
    ({"messages": [*HI, turn("assistant", texts("One")), turn("user", "And?")]},
     [*HI, turn("assistant", "One"), turn("user", "And?")]),
    ({"messages": [*HI, turn("assistant", "One, ")]}, [*HI, turn("assistant", "One, ")]),
    ({"messages": [turn("system", "Be brief."), *HI]}, [turn("system", "Be brief."), *HI]),
    ({"messages": [*HI, turn("assistant", [*texts("Well."), CALL]),
                   turn("user", [RESULT, *texts("And?")])]},
     [*HI, turn("assistant", 'Well.\n{"name": "f", "arguments": {"a": 1}}'), turn("tool", "4"),
      turn("user", "And?")]),
    ({"system": []}, HI),
    ({"messages": [*HI, turn("assistant", [CALL]), turn("user", [{**RESULT, "content": []}])]},
     [*HI, turn("assistant", '{"name": "f", "arguments": {"a": 1}}'), turn("tool", "")]),
    ({"messages": [*HI, turn("assistant", [CALL]), turn("user", [{**RESULT, "content": "4"}])]},
     [*HI, turn("assistant", '{"name": "f", "arguments": {"a": 1}}'), turn("tool", "4")]),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "chat"), CHATS)
async def test_the_model_reads(asked: Any, chat: Any) -> None:
    model = Recorder()
    async with serving(Engine(model)) as running:
        answer = await running.ask("POST", "/v1/messages", {**ASK, **asked})
        assert answer.status == 200, answer.content
        counted = await running.ask("POST", "/v1/messages/count_tokens", {**ASK, **asked})
    assert model.chats == [chat, chat]
    assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}


REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 1.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.7"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": 4}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"model": "other"}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [turn("user", [])]}, "messages[0].content"),
    ({"messages": [turn("user", [{"type": "image", "source": {}}])]}, "messages[0].content[0]"),
    ({"messages": [turn("user", [*texts("a"), {"type": "document"}])]}, "messages[0].content[1]"),
    ({"messages": [turn("user", [{"type": "never_heard"}])]}, "messages[0].content[0]"),
    ({"messages": [turn("user", [{"type": "text", "text": 4}])]}, "messages[0].content[0].text"),
    ({"messages": [turn("user", [CALL])]}, "messages[0].content[0]"),
    ({"messages": [*HI, turn("assistant", [RESULT])]}, "messages[1].content[0]"),
    ({"messages": [turn("user", [{**RESULT, "content": [{"type": "image"}]}])]},
     "messages[0].content[0].content[0]"),
    ({"system": 4}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "tool_choice"),
    ({"output_config": 4}, "output_config"),
    ({"output_config": {"format": 4}}, "output_config.format"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"output_format": {"type": "grammar"}}, "output_config.format"),
]  # fmt: skip


async def test_a_document_does_not_begin_in_the_middle() -> None:
    """Neither does Anthropic's: a prefill is not for structured output."""
    async with serving(Engine(FakeModel())) as running:
        for schema in ({"const": {}}, {"type": "object"}):
            config = {"format": {"type": "json_schema", "schema": schema}}
            body = {**ASK, "messages": [*HI, turn("assistant", "{")], "output_config": config}
            answer = await running.ask("POST", "/v1/messages", body)
            assert (answer.status, "continued" in answer.json()["error"]["message"]) == (400, True)


async def test_a_tool_whose_type_is_null() -> None:
    tool = {"type": None, "name": "f", "input_schema": {"type": "object"}}
    async with serving() as running:
        await whole(running, tools=[tool])


async def test_the_older_name_of_a_format() -> None:
    format = {"type": "json_schema", "schema": {"const": {"a": 1}}}
    async with serving(Engine(FakeModel())) as running:
        message = await whole(running, output_format=format, max_tokens=50)
    assert message.content[0].text == '{"a": 1}'


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=lambda value: str(value)[:60])
async def test_refused_by_name(fields: Any, name: str) -> None:
    """Field reports 32, 95, 127: before the head, also of a stream."""
    async with serving() as running:
        for streamed in (False, True):
            body = {"stream": streamed, **ASK, **fields}
            answer = await running.ask("POST", "/v1/messages", body)
            assert answer.status == 400, answer.content
            error = strictly(shared.ErrorResponse, answer.json()).error
            assert error.type == "invalid_request_error"
            assert name in error.message


async def test_what_asks_for_nothing_is_let_through() -> None:
    fields = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"},
        "never_heard": 1, "tools": [], "stop_sequences": [], "cache_control": {"type": "ephemeral"},
        "max_tokens": 10**18, "temperature": None, "output_config": {},
    }  # fmt: skip
    async with serving(Engine(FakeModel(context=20))) as running:
        message = await whole(running, **fields)
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + message.usage.output_tokens == 20


def refuse(prompt: Any) -> list[int]:
    raise ValueError("no tools here")


class TestErrors:
    """Field report 127: the envelope and the type of each status."""

    async def error(self, running: Running, status: int, *ask: Any, **fields: str) -> str:
        answer = await running.ask(*ask, **fields)
        assert answer.status == status
        return str(strictly(shared.ErrorResponse, answer.json()).error.type)

    @pytest.mark.parametrize(
        "content", [b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"a": NaN}', b'"\\ud83d"']
    )
    async def test_no_request(self, content: bytes) -> None:
        """Field reports 100, 130."""
        async with serving() as running:
            kind = await self.error(running, 400, "POST", "/v1/messages", content)
        assert kind == "invalid_request_error"

    async def test_of_access(self) -> None:
        async with serving(api_keys=("secret",)) as running:
            kind = await self.error(running, 401, "POST", "/v1/messages", ASK, x_api_key="wrong")
            assert kind == "authentication_error"
            for fields in ({"x_api_key": "secret"}, {"Authorization": "Bearer secret"}):
                for version in ("2023-06-01", "2099-01-01", "x"):
                    fields = {**fields, "anthropic_version": version}
                    answer = await running.ask("POST", "/v1/messages", ASK, **fields)
                    assert answer.status == 200
            page = {"Origin": "https://elsewhere.example", "x_api_key": "secret"}
            kind = await self.error(running, 403, "POST", "/v1/messages", ASK, **page)
            assert kind == "permission_error"

    async def test_of_the_address(self) -> None:
        async with serving() as running:
            kind = await self.error(running, 404, "POST", "/v1/messages/elsewhere", ASK)
            assert kind == "not_found_error"
            kind = await self.error(running, 405, "GET", "/v1/messages")
            assert kind == "invalid_request_error"

    async def test_too_large(self) -> None:
        body = {**ASK, "messages": [turn("user", "x" * 2**20)]}
        async with serving() as running:
            answer = await running.ask("POST", "/v1/messages", body)
        assert answer.status == 413
        # In the reference, though not among the SDK's types.
        assert answer.json()["error"]["type"] == "request_too_large"

    async def test_of_the_template(self) -> None:
        """Field report 32: known before the head, also of a stream."""
        model = FakeModel()
        model.encode = refuse  # type: ignore[method-assign]
        async with serving(Engine(model)) as running:
            body = {**ASK, "stream": True}
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                kind = await self.error(running, 400, "POST", path, body)
                assert kind == "invalid_request_error"

    async def test_too_long_for_the_context(self) -> None:
        """Field report 98."""
        body = {**ASK, "stream": True, "messages": [turn("user", "x" * 21)]}
        async with serving(Engine(FakeModel(context=20))) as running:
            answer = await running.ask("POST", "/v1/messages", body)
        assert answer.status == 400
        message = strictly(shared.ErrorResponse, answer.json()).error.message
        assert "21" in message
        assert "20" in message

    async def test_of_a_full_queue(self) -> None:
        model = FakeModel(rows=1)
        async with serving(Engine(model, max_waiting=0)) as running, running.connect() as peer:
            model.step = threading.Semaphore(0)
            peer.request("POST", "/v1/messages", {**ASK, "stream": True})
            await eventually(lambda: running.server.engine.running)
            answer = await running.ask("POST", "/v1/messages", ASK)
            assert answer.status == 429
            assert answer.fields.get("retry-after")
            error = strictly(shared.ErrorResponse, answer.json()).error
            assert error.type == "rate_limit_error"

    async def test_of_the_model(self) -> None:
        async with serving() as running:
            body = {**ASK, "fail_after": 1}
            assert await self.error(running, 500, "POST", "/v1/messages", body) == "api_error"

    async def test_of_shutdown(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/v1/messages", {**ASK, "stall_after": 2})
            await eventually(lambda: running.server.engine.running)
            await running.server.stop(goodbye_s=1)
            answer = await peer.answer()
        assert answer.status == 503
        assert strictly(shared.ErrorResponse, answer.json()).error.type == "overloaded_error"


class TestSDK:
    """What the blocking and the asynchronous client make of it."""

    async def test_stream(self) -> None:
        async with serving(saying("One, two.")) as running, client(running) as sdk:
            async with sdk.messages.stream(**BODY) as events:
                text = "".join([text async for text in events.text_stream])
                final = await events.get_final_message()
            raw = [event async for event in await sdk.messages.create(**BODY, stream=True)]

            def use(sdk: Any) -> Any:
                with sdk.messages.stream(**BODY) as events:
                    return "".join(events.text_stream), events.get_final_message()

            blocking_text, blocking = await of_sdk(running, use)
        assert text == blocking_text == "One, two."
        assert final.content == blocking.content
        assert final.usage == blocking.usage
        assert raw[0].type == "message_start"
        assert raw[-1].type == "message_stop"

    async def test_whole_and_counted(self) -> None:
        counted = {name: BODY[name] for name in ("model", "messages")}
        async with serving(saying("One.")) as running, client(running) as sdk:
            message = await sdk.messages.create(**BODY)
            tokens = await sdk.messages.count_tokens(**counted)
            same = await of_sdk(running, lambda sdk: sdk.messages.create(**BODY))
            count = await of_sdk(running, lambda sdk: sdk.messages.count_tokens(**counted))
        assert message.content == same.content
        assert tokens.input_tokens == count.input_tokens == message.usage.input_tokens == 6

    async def test_failures(self) -> None:
        fault = {"extra_body": {"fail_after": 3}}
        async with serving() as running, client(running) as sdk:
            texts: list[str] = []

            async def read() -> None:
                async with sdk.messages.stream(**BODY, **fault) as events:
                    async for text in events.text_stream:
                        texts.append(text)

            with pytest.raises(anthropic.APIStatusError, match="failed, as asked"):
                await read()
            assert len(texts) == 3
            with pytest.raises(anthropic.InternalServerError):
                await sdk.messages.create(**BODY, **fault)
            with pytest.raises(anthropic.BadRequestError, match="not served here"):
                await sdk.messages.create(**{**BODY, "model": "other"})

    async def test_keys(self) -> None:
        async with serving(api_keys=("secret",)) as running:
            for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
                async with client(running, **options) as sdk:
                    await sdk.messages.create(**BODY)
            async with client(running, api_key="wrong") as sdk:
                with pytest.raises(anthropic.AuthenticationError):
                    await sdk.messages.create(**BODY)


class TestSameText:
    """The same seeded request gives the same text on every route and in every dialect."""

    @pytest.mark.parametrize(
        "engine", [lambda: SimulatedEngine(delay_ms=1), lambda: Engine(FakeModel())]
    )
    @pytest.mark.parametrize("sampling", [{"temperature": 0.9, "top_p": 0.8}, {"temperature": 0}])
    async def test_on_all_routes(self, engine: Any, sampling: dict[str, Any]) -> None:
        chat = [turn("system", "Be brief."), *HI]
        same = {"seed": 11, **sampling}
        asked = {
            "/complete": {"messages": chat, "max_tokens": 12},
            "/v1/chat/completions": {"messages": chat, "max_tokens": 12},
            "/v1/responses": {
                "input": HI, "instructions": "Be brief.", "max_output_tokens": 12,
            },
            "/v1/messages": {"messages": HI, "system": "Be brief.", "max_tokens": 12},
        }  # fmt: skip
        told = {}
        async with serving(engine()) as running:
            for route, body in asked.items():
                answer = await running.ask("POST", route, {**body, **same})
                assert answer.status == 200, answer.content
                told[route] = answer.json()
            told["messages"] = text_of(await stream(running, **asked["/v1/messages"], **same))
        texts = {
            told["/complete"]["text"],
            told["/v1/chat/completions"]["choices"][0]["message"]["content"],
            told["/v1/responses"]["output"][0]["content"][0]["text"],
            told["/v1/messages"]["content"][0]["text"],
            told["messages"],
        }
        assert len(texts) == 1

"""OpenAI's responses: every event against the SDK's own types, and the SDK itself as client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import EOS, FakeModel
from require import require
from serving import Answer, Running, eventually, serving

import sse
from delivery import Policy
from engine import Engine
from pieces import Banned
from simulated import SimulatedEngine

openai = require("openai")
types = require("openai.types.responses")

from strict import strictly  # noqa: E402

ASK: dict[str, Any] = {"model": "default", "input": "Count.", "max_output_tokens": 5, "seed": 7}
HEAD = ["response.created", "response.in_progress", "response.output_item.added"]
TAIL = ["response.output_item.done"]
TEXT_DONE = ["response.output_text.done", "response.content_part.done"]
TOOL = {"type": "function", "name": "look", "parameters": {"const": {"city": "Paris"}}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}}
ARGUMENTS = '{"city": "Paris"}'
# What the reference says is always there, null or not.
FIELDS = {
    "id", "object", "created_at", "status", "background", "completed_at", "error",
    "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "model", "output", "parallel_tool_calls", "previous_response_id", "prompt_cache_key",
    "reasoning", "safety_identifier", "service_tier", "temperature", "text", "tool_choice",
    "tools", "top_logprobs", "top_p", "truncation", "usage", "user",
}  # fmt: skip


def saying(text: str, prompt: str = "Count.") -> Engine:
    """An engine whose model says this, and that it is done."""
    said = [*text.encode(), EOS]

    def script(history: Sequence[int]) -> int:
        return said[len(history) - len(prompt)]

    return Engine(FakeModel(script=script))


def events_of(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked by itself and in its place."""
    told = []
    for number, event in enumerate(sse.Parser().feed(content)):
        data = json.loads(event.data)
        assert event.type == data["type"]
        assert data["sequence_number"] == number
        known = data
        if data["type"] == "response.function_call_arguments.done":
            # In the reference and in some SDKs' types, required; not in others.
            known = {name: value for name, value in data.items() if name != "name"}
        assert strictly(types.ResponseStreamEvent, known).type == data["type"]
        if "response" in data:
            assert set(data["response"]) == FIELDS
        told.append(data)
    return told


async def stream(running: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = await running.ask("POST", "/v1/responses", {**ASK, "stream": True, **fields})
    assert answer.status == 200, answer.content
    assert answer.fields.get("content-type") == "text/event-stream; charset=utf-8"
    assert answer.fields.get_all("x-accel-buffering") == ["no"]
    assert b"[DONE]" not in answer.content
    for line in (b"\nid:", b"\nretry:"):
        assert line not in answer.content
    return events_of(answer.content)


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in told]


def deltas(told: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in told)


def client(running: Running, kind: Any = None, **options: Any) -> Any:
    kind = kind or openai.AsyncOpenAI
    base = f"http://127.0.0.1:{running.port}/v1"
    return kind(base_url=base, api_key="none", max_retries=0, timeout=30, **options)


class TestEvents:
    @pytest.mark.parametrize("text", ["One, two.", "", "x", "é 你 😀 \u2028\x85"])
    async def test_of_a_text(self, text: str) -> None:
        """Field reports 120, 121: every event in its place, also of an empty answer."""
        async with serving(saying(text)) as running:
            told = await stream(running, max_output_tokens=99)
        pieces = ["response.output_text.delta"] * len(text)
        head = [*HEAD, "response.content_part.added"]
        assert kinds(told) == [*head, *pieces, *TEXT_DONE, *TAIL, "response.completed"]
        response = told[-1]["response"]
        assert deltas(told) == text
        assert told[-4]["text"] == told[-3]["part"]["text"] == text
        assert response["output"] == [told[-2]["item"]]
        assert response["output"][0]["content"][0]["text"] == text
        assert [e["response"]["status"] for e in (told[0], told[1], told[-1])] == [
            "in_progress", "in_progress", "completed",
        ]  # fmt: skip
        assert told[0]["response"]["output"] == []
        assert told[0]["response"]["usage"] is None
        assert response["usage"]["input_tokens"] == 6
        assert response["usage"]["output_tokens"] == len(text.encode()) + 1
        assert response["completed_at"] >= response["created_at"]

    async def test_cut_by_its_limit(self) -> None:
        """Field reports 107, 121."""
        async with serving() as running:
            told = await stream(running, max_output_tokens=1)
        assert kinds(told)[-1] == "response.incomplete"
        response = told[-1]["response"]
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert deltas(told) == response["output"][0]["content"][0]["text"] != ""

    async def test_ids_are_the_same_in_a_reply_and_differ_between_two(self) -> None:
        """Field report 116."""
        async with serving() as running:
            replies = [await stream(running) for _ in range(2)]
        for told in replies:
            responses = [event["response"] for event in told if "response" in event]
            assert len({(r["id"], r["created_at"], r["model"]) for r in responses}) == 1
            items = {event["item_id"] for event in told if "item_id" in event}
            items |= {event["item"]["id"] for event in told if "item" in event}
            assert len(items) == 1
        first, second = (told[0]["response"]["id"] for told in replies)
        assert first != second

    async def test_of_a_function_call(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            told = await stream(running, **FORCED, max_output_tokens=99)
        pieces = ["response.function_call_arguments.delta"] * len(ARGUMENTS)
        done = "response.function_call_arguments.done"
        assert kinds(told) == [*HEAD, *pieces, done, *TAIL, "response.completed"]
        assert deltas(told) == told[-3]["arguments"] == ARGUMENTS
        item = told[-1]["response"]["output"][0]
        assert (item["name"], item["arguments"]) == ("look", ARGUMENTS)
        assert item["call_id"] == told[2]["item"]["call_id"]
        assert told[2]["item"]["arguments"] == ""

    async def test_padded(self) -> None:
        """A field of random length on each piece."""
        async with serving() as running:
            answer = await running.ask(
                "POST",
                "/v1/responses",
                {**ASK, "stream": True, "stream_options": {"include_obfuscation": True}},
            )
        told = [json.loads(event.data) for event in sse.Parser().feed(answer.content)]
        assert all(("obfuscation" in event) == ("delta" in event) for event in told)

    async def test_a_failure_is_told_in_words_and_keeps_what_came(self) -> None:
        """Field reports 33, 122."""
        async with serving() as running:
            told = await stream(running, fail_after=3)
        assert kinds(told)[-2:] == ["error", "response.failed"]
        assert told[-2]["message"]
        response = told[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"]["message"] == told[-2]["message"]
        assert response["output"][0]["content"][0]["text"] == deltas(told) != ""

    async def test_shutdown_is_told_in_words(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/v1/responses", {**ASK, "stream": True, "stall_after": 2})
            await peer.until(b"delta")
            await running.server.stop(goodbye_s=1)
            await peer.until(b"response.failed")
        told = events_of(peer.content)
        assert told[-2]["message"] == "the server is shutting down"

    async def test_a_filter_cuts_the_reply_short(self) -> None:
        policy = Policy(banned=Banned(["two"]))
        async with serving(saying("One, two."), policy=policy) as running:
            told = await stream(running, max_output_tokens=99)
            answer = await running.ask("POST", "/v1/responses", {**ASK, "max_output_tokens": 99})
        assert kinds(told)[-1] == "response.incomplete"
        for response in (told[-1]["response"], answer.json()):
            strictly(types.Response, response)
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "content_filter"}
            assert response["output"][0]["content"][0]["text"] == deltas(told)
        assert "two" not in deltas(told)

    async def test_cancelled_by_its_id(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", "/v1/responses", {**ASK, "stream": True, "stall_after": 2})
            await peer.until(b"delta")
            (entry,) = running.server.entries
            await running.ask("POST", f"/cancel/{entry.generation.id}")
            await peer.until(b"event: response.incomplete")
        assert events_of(peer.content)[-1]["response"]["status"] == "cancelled"


class TestWhole:
    async def test_is_what_the_stream_completes_with(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/v1/responses", ASK)
            told = await stream(running)
        response = answer.json()
        strictly(types.Response, response)
        assert set(response) == FIELDS
        assert response["output"][0]["content"] == told[-1]["response"]["output"][0]["content"]
        assert response["usage"] == told[-1]["response"]["usage"]

    async def test_repeats_what_was_asked_for(self) -> None:
        asked = {
            "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9,
            "user": "u", "tools": [TOOL], "tool_choice": "none", "max_output_tokens": 9,
        }  # fmt: skip
        async with serving() as running:
            response = (await running.ask("POST", "/v1/responses", {**ASK, **asked})).json()
        strictly(types.Response, response)
        tools = [{**TOOL, "strict": True}]
        assert {name: response[name] for name in asked} == {**asked, "tools": tools}

    async def test_function_call(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            body = {**ASK, **FORCED, "max_output_tokens": 99}
            response = (await running.ask("POST", "/v1/responses", body)).json()
        strictly(types.Response, response)
        assert response["output"][0]["arguments"] == ARGUMENTS

    async def test_json_schema(self) -> None:
        schema = {"const": {"n": 1}}
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        async with serving(Engine(FakeModel())) as running:
            body = {**ASK, "text": text, "max_output_tokens": 99}
            response = strictly(
                types.Response, (await running.ask("POST", "/v1/responses", body)).json()
            )
        assert json.loads(response.output_text) == {"n": 1}
        assert response.text.format.schema_ == schema

    @pytest.mark.parametrize("tokens", [10**7, 10**18])
    async def test_more_tokens_than_the_context_holds(self, tokens: int) -> None:
        async with serving(Engine(FakeModel(context=20))) as running:
            body = {**ASK, "max_output_tokens": tokens}
            response = (await running.ask("POST", "/v1/responses", body)).json()
        assert response["status"] == "incomplete"
        assert response["usage"]["total_tokens"] == 20

    async def test_a_failure_is_a_500(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/v1/responses", {**ASK, "fail_after": 1})
        assert answer.status == 500
        assert answer.json()["error"]["type"] == "server_error"


class Recorder(FakeModel):
    """Keeps the chats that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Any] = []

    def encode(self, prompt: Any) -> list[int]:
        self.chats.append(prompt)
        return super().encode(prompt)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    ({"input": "Hi"}, [turn("user", "Hi")]),
    ({"input": "Hi", "instructions": "Be brief."},
     [turn("system", "Be brief."), turn("user", "Hi")]),
    ({"input": [turn("developer", "Be brief."), turn("user", "Hi")]},
     [turn("system", "Be brief."), turn("user", "Hi")]),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"},
                                             {"type": "input_text", "text": "b"}]}]},
     [turn("user", "a\nb")]),
    ({"input": [{"type": "message", "role": "user", "content": "Hi"},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                 "content": [{"type": "output_text", "text": "Ho", "annotations": []}]},
                turn("user", "And?")]},
     [turn("user", "Hi"), turn("assistant", "Ho"), turn("user", "And?")]),
    ({"input": [turn("user", "Hi"),
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "4"}]},
     [turn("user", "Hi"), turn("assistant", '{"name": "f", "arguments": {"a": 1}}'),
      turn("tool", "4")]),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "chat"), CHATS)
async def test_the_model_reads(asked: Any, chat: Any) -> None:
    model = Recorder()
    async with serving(Engine(model)) as running:
        answer = await running.ask("POST", "/v1/responses", {**ASK, **asked})
    assert answer.status == 200, answer.content
    assert model.chats == [chat]


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["Hi"]}, "input[0]"),
    ({"input": [{"role": "boss", "content": "Hi"}]}, "input[0].role"),
    ({"input": [{"role": ["user"], "content": "Hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
     "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": 4}]}, "input[0].output"),
    ({"instructions": 4}, "instructions"),
    ({"model": "other"}, "model"),
    ({"model": 4}, "model"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream": 1}, "stream"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": 5}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": False}, "top_logprobs"),
    ({"max_tool_calls": True}, "max_tool_calls"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": "x"}, "metadata"),
    ({"user": 5}, "user"),
    ({"text": "x"}, "text"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"format": 5}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": ["object", "null"]}}]},
     "tools[0].parameters.type"),
    ({"tool_choice": "look"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": ["function"]}}, "tool_choice"),
    ({"stream_options": 5}, "stream_options"),
    ({"background": "yes"}, "background"),
    ({"background": True, "store": False}, "store"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=lambda value: str(value)[:60])
async def test_refused_by_name(fields: Any, name: str) -> None:
    """Field reports 32, 93, 95: before the head, also of a stream."""
    async with serving() as running:
        for streamed in (False, True):
            body = {"stream": streamed, **ASK, **fields}
            answer = await running.ask("POST", "/v1/responses", body)
            assert answer.status == 400, answer.content
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["param"]) == ("invalid_request_error", name)


async def test_the_simulated_engine_follows_no_schema() -> None:
    async with serving() as running:
        answer = await running.ask("POST", "/v1/responses", {**ASK, **FORCED, "stream": True})
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "tools[0].parameters"


async def test_what_asks_for_nothing_is_let_through() -> None:
    fields = {
        "store": False, "metadata": {}, "service_tier": "auto", "reasoning": {"effort": "none"},
        "include": ["reasoning.encrypted_content"], "truncation": "disabled", "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "never_heard": 1,
        "previous_response_id": None, "tool_choice": "auto", "prompt_cache_key": "k",
        "safety_identifier": "s", "parallel_tool_calls": False, "max_tool_calls": 3,
    }  # fmt: skip
    async with serving() as running:
        response = (await running.ask("POST", "/v1/responses", {**ASK, **fields})).json()
    strictly(types.Response, response)


@pytest.mark.parametrize("number", [b"1e400", b"-1e999"])
async def test_a_number_that_could_not_be_repeated(number: bytes) -> None:
    """Read as infinity, and told as `Infinity`, it would be no JSON."""
    async with serving() as running:
        body = b'{"input": "a", "metadata": {"a": %b}}' % number
        answer = await running.ask("POST", "/v1/responses", body)
        assert (answer.status, "too large" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_depth(streamed: bool) -> None:
    """What can be read can be repeated: a depth that ended in the middle of the stream."""
    async with serving() as running:
        for depth, status in ((198, 200), (199, 400), (900, 400), (970, 400)):
            body = json.dumps({**ASK, "stream": streamed, "metadata": {"a": 0}}).encode()
            body = body.replace(b'"a": 0', b'"a": ' + b"[" * depth + b"]" * depth)
            answer = await running.ask("POST", "/v1/responses", body)
            assert answer.status == status, depth
            if status == 400:
                assert "too deeply" in answer.json()["error"]["message"]
            else:
                assert answer.content.count(b"[" * depth) == (3 if streamed else 1)


async def test_many_objects_are_not_deep() -> None:
    parts = [{"type": "input_text", "text": "a"}] * 300
    async with serving() as running:
        body = {**ASK, "input": [{"role": "user", "content": parts}]}
        assert (await running.ask("POST", "/v1/responses", body)).status == 200


async def test_a_prompt_that_does_not_fit() -> None:
    """Field report 98."""
    async with serving(Engine(FakeModel(context=20))) as running:
        for streamed in (False, True):
            body = {**ASK, "input": "x" * 21, "stream": streamed}
            answer = await running.ask("POST", "/v1/responses", body)
            assert answer.status == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
            assert "21" in error["message"]
            assert "20" in error["message"]


async def test_a_chat_that_the_template_refuses() -> None:
    """Field report 32: known before the head, also of a stream."""
    model = FakeModel()
    model.encode = refuse  # type: ignore[method-assign]
    async with serving(Engine(model)) as running:
        answer = await running.ask("POST", "/v1/responses", {**ASK, "stream": True})
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "no tools here"
    assert answer.json()["error"]["param"] == "input"


def refuse(prompt: Any) -> list[int]:
    raise ValueError("no tools here")


# In the background.


@asynccontextmanager
async def begun(running: Running, **fields: Any) -> AsyncIterator[str]:
    answer = await running.ask("POST", "/v1/responses", {**ASK, "background": True, **fields})
    assert answer.status == 200, answer.content
    response = answer.json()
    strictly(types.Response, response)
    assert response["background"] is True
    yield response["id"]


async def retrieve(running: Running, id: str, query: str = "") -> Answer:
    return await running.ask("GET", f"/v1/responses/{id}{query}")


class TestBackground:
    async def test_runs_without_anybody(self) -> None:
        policy = Policy(grace_s=0.001)
        async with serving(policy=policy) as running, begun(running) as id:
            status = ""
            async with asyncio.timeout(10):
                while status != "incomplete":
                    answer = await retrieve(running, id)
                    strictly(types.Response, answer.json())
                    status = answer.json()["status"]
            alone = (await running.ask("POST", "/v1/responses", ASK)).json()
        assert answer.json()["output"][0]["content"] == alone["output"][0]["content"]

    async def test_answers_at_once(self) -> None:
        async with serving() as running, begun(running, stall_after=2) as id:
            answer = (await retrieve(running, id)).json()
            assert (answer["id"], answer["status"], answer["output"]) == (id, "in_progress", [])

    async def test_each_event_comes_once_after_any_number(self) -> None:
        """The events are the same, one sequence number is one place."""
        async with serving() as running:
            told = await stream(running, background=True)
            id = told[0]["response"]["id"]
            whole = (await retrieve(running, id, "?stream=true")).content
            assert events_of(whole) == told
            for number in range(len(told)):
                answer = await retrieve(running, id, f"?stream=true&starting_after={number}")
                assert answer.status == 200
                assert whole.endswith(answer.content)
                rest = sse.Parser().feed(answer.content)
                assert [json.loads(event.data) for event in rest] == told[number + 1 :]

    async def test_a_connection_that_breaks_does_not_end_it(self) -> None:
        async with serving(SimulatedEngine(delay_ms=20, jitter_ms=0)) as running:
            async with running.connect() as peer:
                body = {**ASK, "background": True, "stream": True}
                peer.request("POST", "/v1/responses", body)
                await peer.until(b"delta")
                before = sse.Parser().feed(peer.content)
                peer.reset()
            seen = json.loads(before[-1].data)["sequence_number"]
            id = json.loads(before[0].data)["response"]["id"]
            answer = await retrieve(running, id, f"?stream=true&starting_after={seen}")
            after = sse.Parser().feed(answer.content)
        told = [json.loads(event.data) for event in [*before, *after]]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert deltas(told) == told[-1]["response"]["output"][0]["content"][0]["text"]

    async def test_without_it_a_closed_connection_ends_the_generation(self) -> None:
        """Field report 87."""
        async with serving() as running, running.connect() as peer:
            body = {**ASK, "stream": True, "max_output_tokens": 10**6}
            peer.request("POST", "/v1/responses", body)
            await peer.until(b"delta")
            peer.close()
            await eventually(lambda: not running.server.engine.running)
            (entry,) = running.server.entries
            assert entry.client_left

    async def test_cancelled(self) -> None:
        async with serving() as running, begun(running, stall_after=2) as id:
            follower = asyncio.create_task(retrieve(running, id, "?stream=true"))
            await eventually(lambda: running.server.entries[0].generation.completion_tokens == 2)
            answer = await running.ask("POST", f"/v1/responses/{id}/cancel")
            response = answer.json()
            strictly(types.Response, response)
            assert response["status"] == "cancelled"
            assert response["output"][0]["content"][0]["text"]
            assert (await running.ask("POST", f"/v1/responses/{id}/cancel")).json() == response
            assert (await retrieve(running, id)).json() == response
            assert events_of((await follower).content)[-1]["response"] == response

    async def test_failed(self) -> None:
        async with serving() as running, begun(running, fail_after=2) as id:
            told = events_of((await retrieve(running, id, "?stream=true")).content)
            response = (await retrieve(running, id)).json()
        assert response == told[-1]["response"]
        assert response["status"] == "failed"

    @pytest.mark.parametrize(
        "id", ["resp_0", "resp_", "reply-0", "x", "resp_zz", "resp_" + "0" * 33]
    )
    async def test_unknown(self, id: str) -> None:
        async with serving() as running:
            for method, path in (("GET", id), ("POST", f"{id}/cancel"), ("GET", f"{id}?stream=x")):
                answer = await running.ask(method, f"/v1/responses/{path}")
                assert answer.status == 404
                assert answer.json()["error"]["type"] == "not_found_error"

    async def test_only_those_in_the_background_are_kept(self) -> None:
        async with serving() as running:
            response = (await running.ask("POST", "/v1/responses", ASK)).json()
            native = {"prompt": "a", "max_tokens": 3, "resume": True}
            reply = (await running.ask("POST", "/stream", native)).fields.get("reply-id")
            for id in (response["id"], reply.replace("reply-", "resp_")):
                assert (await retrieve(running, id)).status == 404

    @pytest.mark.parametrize(
        ("query", "name"),
        [
            ("stream=true&starting_after=99", "starting_after"),
            ("stream=true&starting_after=-1", "starting_after"),
            ("stream=true&starting_after=x", "starting_after"),
            ("stream=true&starting_after=%D9%A3", "starting_after"),
            ("stream=1", "stream"),
        ],
    )
    async def test_bad_queries(self, query: str, name: str) -> None:
        """Field report 37."""
        async with serving() as running, begun(running) as id:
            await retrieve(running, id, "?stream=true")
            answer = await retrieve(running, id, f"?{query}")
        assert answer.status == 400
        assert answer.json()["error"]["param"] == name

    @pytest.mark.parametrize("query", ["", "?stream=true"])
    async def test_head(self, query: str) -> None:
        async with serving() as running, begun(running) as id:
            answer = await running.ask("HEAD", f"/v1/responses/{id}{query}")
        assert (answer.status, answer.content) == (200, b"")

    async def test_other_methods(self) -> None:
        async with serving() as running:
            for method, path in (
                ("GET", "/v1/responses"),
                ("DELETE", "/v1/responses/resp_0"),
                ("GET", "/v1/responses/resp_0/cancel"),
            ):
                answer = await running.ask(method, path)
                assert answer.status == 405
                assert answer.json()["error"]["message"]
            assert (await running.ask("GET", "/v1/responses/resp_0/input_items")).status == 404


# The SDK.


async def of_sdk(running: Running, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the SDK's blocking client, in a thread."""

    def run() -> Any:
        with client(running, openai.OpenAI) as sdk:
            return use(sdk)

    return await asyncio.to_thread(run)


class TestSDK:
    async def test_whole(self) -> None:
        async with serving(saying("One, two.")) as running, client(running) as sdk:
            body = {**ASK, "max_output_tokens": 99, "extra_body": {"seed": 7}}
            del body["seed"]
            response = await sdk.responses.create(**body)
            blocking = await of_sdk(running, lambda sdk: sdk.responses.create(**body))
        assert response.output_text == blocking.output_text == "One, two."
        assert response.status == "completed"

    async def test_stream(self) -> None:
        async with serving(saying("One, two.")) as running, client(running) as sdk:
            body = {"model": "default", "input": "Count."}
            told = [event async for event in await sdk.responses.create(**body, stream=True)]
            assert "".join(e.delta for e in told if e.type.endswith(".delta")) == "One, two."
            async with sdk.responses.stream(**body) as events:
                final = await events.get_final_response()
            assert final.output_text == "One, two."
            assert final.usage.input_tokens == 6

            def use(sdk: Any) -> Any:
                with sdk.responses.stream(**body) as events:
                    return events.get_final_response()

            assert (await of_sdk(running, use)).output_text == "One, two."

    async def test_function_call(self) -> None:
        body = {"model": "default", "input": "Count.", **FORCED}
        async with serving(Engine(FakeModel())) as running, client(running) as sdk:
            async with sdk.responses.stream(**body) as events:
                final = await events.get_final_response()
        assert final.output[0].arguments == ARGUMENTS

    async def test_failures(self) -> None:
        async with serving() as running, client(running) as sdk:
            asked = {"model": "default", "input": "Count.", "extra_body": {"fail_after": 3}}
            told = [event async for event in await sdk.responses.create(**asked, stream=True)]
            assert [event.type for event in told[-2:]] == ["error", "response.failed"]
            assert sum(event.type == "response.output_text.delta" for event in told) == 3
            with pytest.raises(openai.InternalServerError):
                await sdk.responses.create(**asked)
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.responses.create(model="other", input="Count.")
            assert caught.value.code == "model_not_found"
            assert caught.value.param == "model"

    async def test_background(self) -> None:
        async with serving() as running, client(running) as sdk:
            asked = {"model": "default", "input": "Count.", "max_output_tokens": 5}
            begun = await sdk.responses.create(**asked, background=True)
            after = 4
            rest = await sdk.responses.retrieve(begun.id, stream=True, starting_after=after)
            told = [event async for event in rest]
            numbers = [event.sequence_number for event in told]
            assert numbers == list(range(after + 1, after + 1 + len(told)))
            whole = await sdk.responses.retrieve(begun.id)
            assert whole == told[-1].response
            stalled = await sdk.responses.create(
                **asked, background=True, extra_body={"stall_after": 1}
            )
            cancelled = await sdk.responses.cancel(stalled.id)
            assert cancelled.status == "cancelled"

    async def test_keys(self) -> None:
        """Field report 127: refusals are in the provider's envelope."""
        async with serving(api_keys=("secret",)) as running, client(running) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.responses.create(model="default", input="Count.")

"""The providers' clients for Node, and `ai`, on every route, streamed and whole."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from beating import HEARTBEATS, PATHS, beating, heartbeat
from fakes import EOS, FakeModel
from noding import (
    AI,
    CALLERS,
    CHATS,
    HI,
    SDKS,
    WAYS,
    Node,
    Told,
    anthropic_types,
    asking,
    error_of,
    openai_types,
    reason_for,
    with_format,
    with_tool,
)
from serving import Running, eventually, serving

from engine import Engine

SCHEMA = {"const": {"city": "Paris"}}
ARGUMENTS = '{"city": "Paris"}'


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    process = Node()
    yield process
    process.close()


def saying(text: str) -> Engine:
    """An engine whose model says this to "Count.", and that it is done."""
    said = [*text.encode(), EOS]
    return Engine(FakeModel(script=lambda history: said[len(history) - len("Count.")]))


async def replies(
    node: Node, running: Running, ways: Sequence[str] = CHATS, **asked: Any
) -> dict[tuple[str, bool], Told]:
    """The replies to one request in each of these ways, streamed and whole."""
    pairs = [(way, stream) for way in ways for stream in (True, False)]
    told = await node.call(running, *(asking(way, stream=s, **asked) for way, s in pairs))
    return {pair: Told(pair[0], one) for pair, one in zip(pairs, told, strict=True)}


class TestReplies:
    @pytest.mark.parametrize(
        ("said", "asked", "text", "why"),
        [
            pytest.param("One, two.", {}, "One, two.", "stop", id="stop"),
            pytest.param("x", {}, "x", "stop", id="one token"),
            pytest.param("", {}, "", "stop", id="empty"),
            pytest.param("One, two.", {"tokens": 1}, "O", "length", id="length"),
            pytest.param("é 你 😀 \u2028\x85", {}, "é 你 😀 \u2028\x85", "stop", id="characters"),
        ],
    )
    async def test_every_end(self, node: Node, said: str, asked: Any, text: str, why: str) -> None:
        """Field reports 111, 112, 114, 117, 119 to 121, 123 to 125."""
        async with serving(saying(said)) as running:
            told = await replies(node, running, **asked)
        tokens = 1 if why == "length" else len(said.encode()) + 1
        for (way, _), reply in told.items():
            assert (reply.text, reply.reason) == (text, reason_for(way, why)), way
            assert reply.usage == (len("Count."), tokens), way

    async def test_stop_strings(self, node: Node) -> None:
        """Field report 126. `/v1/responses` has none."""
        ways = [way for way in CHATS if not way.endswith("responses")]
        async with serving(saying("1,2,3,4")) as running:
            told = await replies(node, running, ways, stop=["5", "4"])
        for (way, _), reply in told.items():
            assert (reply.text, reply.reason) == ("1,2,3,", reason_for(way, "string")), way

    async def test_the_same_text_in_all_ways(self, node: Node) -> None:
        """Where a seed can be named by it; and greedily where not."""
        seeded = {"seed": 11, "temperature": 0.9}
        with_seed = [way for way in CHATS if way not in ("ai responses", "ai messages")]
        async with serving(Engine(FakeModel())) as running:
            body = {"messages": HI, "max_tokens": 12}
            drawn = await running.ask("POST", "/complete", {**body, **seeded})
            greedy = await running.ask("POST", "/complete", {**body, "temperature": 0})
            told = await replies(node, running, with_seed, tokens=12, **seeded)
            told_greedily = await replies(node, running, tokens=12, temperature=0)
            own = await replies(node, running, ["ai completions"], tokens=12, temperature=0)
        assert {reply.text for reply in told.values()} == {drawn.json()["text"]}
        assert {reply.text for reply in told_greedily.values()} == {greedy.json()["text"]}
        assert len({reply.text for reply in own.values()}) == 1
        assert all(len(reply.text) == 12 for reply in own.values())

    async def test_the_sum_of_a_stream(self, node: Node) -> None:
        """The clients' helpers that add up a stream; they throw where something is missing."""
        usage = {"stream_options": {"include_usage": True}}
        ask = {"model": "default", "max_tokens": 99}
        calls = [
            {"client": "openai", "method": "chat.completions.stream",
             "args": [{**ask, "messages": HI, **usage}], "final": "finalChatCompletion"},
            {"client": "openai", "method": "responses.stream",
             "args": [{"model": "default", "input": "Count."}], "final": "finalResponse"},
            {"client": "anthropic", "method": "messages.stream",
             "args": [{**ask, "messages": HI}], "final": "finalMessage"},
        ]  # fmt: skip
        async with serving(saying("One, two.")) as running:
            chat, response, message = await node.call(running, *calls)
        (choice,) = chat["final"]["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One, two.", "stop")
        assert chat["final"]["usage"] == {
            "prompt_tokens": 6, "completion_tokens": 10, "total_tokens": 16,
        }  # fmt: skip
        assert response["final"]["output"][0]["content"][0]["text"] == "One, two."
        assert response["final"]["status"] == "completed"
        assert message["final"]["content"][0]["text"] == "One, two."
        assert message["final"]["stop_reason"] == "end_turn"
        assert message["final"]["usage"]["output_tokens"] == 10

    async def test_models_and_counts(self, node: Node) -> None:
        calls = [
            {"client": client, "method": f"models.{method}", "args": args}
            for client in ("openai", "anthropic")
            for method, args in (("list", []), ("retrieve", ["default"]), ("retrieve", ["other"]))
        ]
        counted = {"model": "default", "messages": HI, "system": "Be brief."}
        calls.append({"client": "anthropic", "method": "messages.countTokens", "args": [counted]})
        async with serving() as running:
            *models, tokens = await node.call(running, *calls)
        for kind, (listed, one, unknown) in (
            (openai_types.Model, models[:3]),
            (anthropic_types.ModelInfo, models[3:]),
        ):
            assert {"simulated", "default"} <= {model["id"] for model in listed["events"]}
            for model in [*listed["events"], one["value"]]:
                strictly_dated(kind, model)
            assert (unknown["error"]["name"], unknown["error"]["status"]) == ("NotFoundError", 404)
        assert tokens["value"] == {"input_tokens": 3}

    async def test_in_the_background(self, node: Node) -> None:
        ask = {"model": "default", "input": "Count.", "max_output_tokens": 5, "background": True}

        def of(method: str, *args: Any) -> dict[str, Any]:
            return {"client": "openai", "method": f"responses.{method}", "args": args}

        async with serving() as running:
            begun, stalled = await node.call(
                running, of("create", ask), of("create", {**ask, "stall_after": 1})
            )
            id = begun["value"]["id"]
            (rest,) = await node.call(
                running, of("retrieve", id, {"stream": True, "starting_after": 4})
            )
            whole, cancelled = await node.call(
                running, of("retrieve", id, {}), of("cancel", stalled["value"]["id"])
            )
        numbers = [event["sequence_number"] for event in rest["events"]]
        assert numbers == list(range(5, 5 + len(numbers)))
        assert rest["events"][-1]["response"]["output"] == whole["value"]["output"]
        assert cancelled["value"]["status"] == "cancelled"


def strictly_dated(kind: Any, model: Any) -> None:
    """A model; in JSON, so that a date is told by a text."""
    value = kind.model_validate_json(json.dumps(model), strict=True)
    assert not value.model_extra


async def constrained(
    node: Node, running: Running, pairs: Sequence[tuple[str, bool]], schema: Any, **asked: Any
) -> list[Any]:
    """What was told in each way, streamed or whole: first of calls, then of texts by the schema."""
    values = []
    calls = [asking(way, stream=s, **with_tool(way, schema), **asked) for way, s in pairs]
    for (way, _), told in zip(pairs, await node.call(running, *calls), strict=True):
        reply = Told(way, told)
        assert reply.reason == reason_for(way, "call"), way
        values.append(json.loads(reply.arguments))
    calls = [asking(way, stream=s, **with_format(way, schema), **asked) for way, s in pairs]
    for (way, _), told in zip(pairs, await node.call(running, *calls), strict=True):
        reply = Told(way, told)
        values.append(told["final"] if way in AI else json.loads(reply.text))
    return values


class TestByASchema:
    async def test_calls_and_formats(self, node: Node) -> None:
        pairs = [(way, stream) for way in CALLERS for stream in (True, False)]
        async with serving(Engine(FakeModel())) as running:
            told = await constrained(node, running, pairs, SCHEMA)
        assert told == [{"city": "Paris"}] * len(pairs) * 2

    async def test_any_one_tool(self, node: Node) -> None:
        calls = [asking(way, **with_tool(way, SCHEMA, named=False)) for way in CALLERS]
        async with serving(Engine(FakeModel())) as running:
            for way, told in zip(CALLERS, await node.call(running, *calls), strict=True):
                assert Told(way, told).arguments == ARGUMENTS

    async def test_the_sum_of_a_stream(self, node: Node) -> None:
        calls = [
            {"client": "openai", "method": "chat.completions.stream",
             "args": [{"model": "default", "messages": HI, **with_tool("chat", SCHEMA)}],
             "final": "finalChatCompletion"},
            {"client": "openai", "method": "responses.stream",
             "args": [{"model": "default", "input": "Count.", **with_tool("responses", SCHEMA)}],
             "final": "finalResponse"},
            {"client": "anthropic", "method": "messages.stream",
             "args": [{"model": "default", "messages": HI, "max_tokens": 99,
                       **with_tool("messages", SCHEMA)}],
             "final": "finalMessage"},
        ]  # fmt: skip
        async with serving(Engine(FakeModel())) as running:
            chat, response, message = await node.call(running, *calls)
        (call,) = chat["final"]["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == ARGUMENTS
        assert response["final"]["output"][0]["arguments"] == ARGUMENTS
        assert message["final"]["content"][0]["input"] == {"city": "Paris"}

    @pytest.mark.model
    async def test_by_the_real_model(self, node: Node, real_model: Any) -> None:
        schema = {
            "type": "object",
            "properties": {"day": {"enum": ["Mon", "Tue"]}, "hot": {"type": "boolean"}},
            "required": ["day", "hot"],
            "additionalProperties": False,
        }
        ways = ("chat", "messages", "ai responses")
        async with serving(Engine(real_model)) as running:
            told = await constrained(node, running, [(way, True) for way in ways], schema)
        assert len(told) == len(ways) * 2
        for value in told:
            assert set(value) == {"day", "hot"}
            assert value["day"] in ("Mon", "Tue")
            assert isinstance(value["hot"], bool)


class TestFailures:
    async def test_before_the_head(self, node: Node) -> None:
        """Field reports 32, 127: of a class, with the status and our words, streamed or not."""
        pairs = [(way, stream) for way in WAYS for stream in (True, False)]
        calls = [asking(way, stream=stream, model="other") for way, stream in pairs]
        async with serving() as running:
            for (way, _), told in zip(pairs, await node.call(running, *calls), strict=True):
                error = error_of(way, told)
                name = "BadRequestError" if way in SDKS else "AI_APICallError"
                assert (error["name"], error["status"]) == (name, 400), way
                assert "'other' is not served here" in error["message"]
                assert not told["events"] or {e["type"] for e in told["events"]} <= {
                    "start",
                    "error",
                }

    async def test_keys(self, node: Node) -> None:
        calls = [asking(way) for way in WAYS]
        async with serving(api_keys=("secret",)) as running:
            for way, told in zip(WAYS, await node.call(running, *calls), strict=True):
                error = error_of(way, told)
                name = "AuthenticationError" if way in SDKS else "AI_APICallError"
                assert (error["name"], error["status"]) == (name, 401), way
            keyed = [{**asking(way, tokens=3), "key": "secret"} for way in WAYS]
            for way, told in zip(WAYS, await node.call(running, *keyed), strict=True):
                assert len(Told(way, told).text.split()) == 3

    async def test_in_the_stream(self, node: Node) -> None:
        """Field reports 33, 122: what came is kept, the words are ours, and it is no end."""
        model = FakeModel()
        model.fail_choose = lambda history: len(history) == len("Count.") + 3
        async with serving(Engine(model)) as running:
            calls = [asking(way) for way in CHATS]
            for way, told in zip(CHATS, await node.call(running, *calls), strict=True):
                error = error_of(way, told)
                assert "failed" in json.dumps(error), way
                if way == "responses":
                    assert [e["type"] for e in told["events"][-2:]] == ["error", "response.failed"]
                elif way in SDKS:
                    assert error["name"] == "APIError"
                reply = Told(way, told, error=told["error"] is not None)
                assert len(reply.text) == 3, way
                assert reply.reason in (None, "error", "failed"), way
            whole = await node.call(running, *(asking(way, stream=False) for way in CHATS))
            for way, told in zip(CHATS, whole, strict=True):
                name = "InternalServerError" if way in SDKS else "AI_APICallError"
                assert (told["error"]["name"], told["error"]["status"]) == (name, 500), way

    async def test_a_cut(self, node: Node) -> None:
        """Without an error it would look like a short answer that is whole."""
        calls = [asking(way, tokens=9, truncate_after=4) for way in SDKS]
        fault = {"here": {"truncate_after": 4}}
        of_ai = ("ai chat", "ai completions")
        calls += [asking(way, tokens=9, providerOptions=fault) for way in of_ai]
        async with serving() as running:
            for way, told in zip((*SDKS, *of_ai), await node.call(running, *calls), strict=True):
                assert told["error"] is not None
                reply = Told(way, told, error=True)
                assert 0 < len(reply.text.split()) < 9, way
                assert reply.reason is None, way

    @pytest.mark.parametrize("way", WAYS)
    async def test_an_abort(self, node: Node, way: str) -> None:
        """Field report 87: no token after the pass under way."""
        model = FakeModel()
        model.step = threading.Semaphore(0)
        async with serving(Engine(model)) as running:
            aborted = asyncio.create_task(
                node.call(running, asking(way, tokens=100, abort_after=3))
            )
            model.step.release(3)
            (told,) = await aborted
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left)
            model.step.release(1000)
            await eventually(lambda: entry.generation.finish_reason)
            (logged,) = (await running.ask("GET", "/log")).json()["requests"]
        assert logged["finish_reason"] == "cancelled"
        assert logged["client_left"]
        assert logged["completion_tokens"] == 3
        assert told["events"]


class TestSilence:
    async def test_heartbeats_do_no_harm(self, node: Node) -> None:
        """Field reports 27 to 29, 31: silences of several, before the reply and in it."""
        asked = list(itertools.product(HEARTBEATS, WAYS))
        async with AsyncExitStack() as stack:
            servers = {mode: await stack.enter_async_context(beating(mode)) for mode in HEARTBEATS}
            calls = [
                {**asking(way, tokens=2), "base": f"http://127.0.0.1:{servers[mode].port}"}
                for mode, way in asked
            ]
            told, *answers = await asyncio.gather(
                node.call(servers["off"], *calls),
                *(self.raw(servers[mode], way) for mode in HEARTBEATS for way in SDKS),
            )
        for (mode, way), one in zip(asked, told, strict=True):
            reply = Told(way, one)
            assert len(reply.text.split()) == 2, (mode, way)
            assert reply.reason == reason_for(way, "length"), (mode, way)
        for (mode, way), content in zip(itertools.product(HEARTBEATS, SDKS), answers, strict=True):
            assert heartbeat(content) == HEARTBEATS[mode][way], (mode, way, content)

    async def raw(self, running: Running, way: str) -> bytes:
        (body,) = asking(way, tokens=2)["args"]
        return (await running.ask("POST", f"/v1/{PATHS[way]}", body)).content

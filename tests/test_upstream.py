"""The relay, against upstream servers that follow a script, and against foreign ones."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import outcome, start, started
from require import require
from scripted import Peer, Server, Step, reset, scripted, until_client_ends
from serving import Running, eventually, quick, serving
from sockets import open_websocket
from splits import splits
from tiny import save_tiny_model

import http1
from delivery import Policy
from generation import (
    BadRequest,
    EngineDown,
    Generation,
    GenerationError,
    QueueFull,
    SamplingParams,
)
from outbound import Address
from upstream import Relay, UpstreamEngine

MESSAGES = [{"role": "user", "content": "Count."}]
CHAT = {"messages": MESSAGES, "usage": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def chunk(text: str | None = None, finish_reason: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def usage_chunk(**usage: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": usage or USAGE}).encode() + b"\n\n"


def answer(
    status: str, body: Any = None, *fields: str, media_type: str = "application/json"
) -> bytes:
    """A whole answer that is no stream."""
    content = (
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    )
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {media_type}", *fields]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


TWO = (HEAD, chunk("One,"), chunk(" two"), chunk(None, "stop"), usage_chunk(), DONE)


def engine_for(server: Server, path: str = "", **options: Any) -> UpstreamEngine:
    return UpstreamEngine(server.url(path), model=options.pop("model", "m"), **options)


@contextlib.asynccontextmanager
async def relaying(
    *scripts: Sequence[Step], **options: Any
) -> AsyncIterator[tuple[Running, Server]]:
    """Our server in front of a scripted one."""
    ours = {k: options.pop(k) for k in ("settings", "policy") if k in options}
    async with scripted(*scripts) as upstream:
        async with serving(engine_for(upstream, **options), **ours) as running:
            yield running, upstream


def submit(engine: UpstreamEngine, prompt: Any = MESSAGES, **params: Any) -> Generation:
    return engine.submit(engine.encode(prompt), SamplingParams(**params))


async def read(generation: Generation) -> str:
    async with asyncio.timeout(10):
        return "".join([piece async for piece in generation])


async def sent(prompt: Any = MESSAGES, path: str = "", **params: Any) -> tuple[Any, dict[str, Any]]:
    """The request that reaches upstream: its head, and its body."""
    options = params.pop("options", {})
    async with scripted(TWO) as upstream:
        await read(submit(engine_for(upstream, path, **options), prompt, **params))
        ((head, content),) = upstream.peer.requests
        return head, json.loads(content)


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "told", "port"),
        [
            ("http://gpu1:8000", "http://gpu1:8000/v1", 8000),
            ("http://gpu1:8000/", "http://gpu1:8000/v1", 8000),
            ("http://gpu1/v1", "http://gpu1/v1", 80),
            ("https://api.example.com/openai/v1/", "https://api.example.com/openai/v1", 443),
            ("https://gateway/llm", "https://gateway/llm/v1", 443),
            ("http://[::1]:8000/v1", "http://[::1]:8000/v1", 8000),
            ("http://b\u00fccher.example", "http://xn--bcher-kva.example/v1", 80),
        ],
    )
    def test_parsed(self, url: str, told: str, port: int) -> None:
        address = Address.parse(url)
        assert (str(address), address.port) == (told, port)

    @pytest.mark.parametrize(
        "url",
        [
            "gpu1:8000", "ftp://gpu1", "http://", "", "http://me:secret@gpu1", "http://gpu1/v1?key=1",
            "http://gpu1/#a", "http://gpu1:x", "http://gpu1:99999", "http://gpu1/a b",
            f"http://{'a' * 70}.example",
        ],
    )  # fmt: skip
    def test_refused(self, url: str) -> None:
        with pytest.raises(ValueError) as caught:
            UpstreamEngine(url)
        assert "secret" not in str(caught.value)

    def test_a_key_that_could_end_its_field(self) -> None:
        with pytest.raises(ValueError, match="visible ASCII"):
            UpstreamEngine("http://gpu1", "key\r\nX: y")


class TestRequest:
    async def test_messages(self) -> None:
        head, body = await sent(max_tokens=5, temperature=0, top_p=1)
        assert (head.method, head.target) == ("POST", "/v1/chat/completions")
        assert body == {
            "model": "m",
            "messages": MESSAGES,
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @pytest.mark.parametrize("prompt", ["One,", [101, 102]], ids=["text", "token ids"])
    async def test_prompt(self, prompt: Any) -> None:
        head, body = await sent(prompt)
        assert head.target == "/v1/completions"
        assert body["prompt"] == prompt
        assert "messages" not in body

    async def test_sampling_fields_that_not_every_server_knows_only_when_in_use(self) -> None:
        given = {"top_k": 4, "repetition_penalty": 1.1, "seed": 0, "stop": ("x", "y")}
        _, body = await sent(**given)
        assert {name: body[name] for name in given} == {**given, "stop": ["x", "y"]}
        _, body = await sent()
        assert not set(given) & set(body)

    async def test_a_schema(self) -> None:
        schema = {"type": "object"}
        _, body = await sent(schema=schema)
        assert body["response_format"]["type"] == "json_schema"
        assert body["response_format"]["json_schema"]["schema"] == schema

    def test_log_probabilities_are_refused_by_name(self) -> None:
        with pytest.raises(BadRequest) as caught:
            submit(UpstreamEngine("http://gpu1"), logprobs=2)
        assert caught.value.field == "logprobs"

    async def test_no_limit_of_tokens_is_no_field(self) -> None:
        _, body = await sent(max_tokens=1_000_000)
        assert "max_tokens" not in body

    async def test_fields(self) -> None:
        head, _ = await sent(path="/llm/v1", options={"key": "k-1"})
        assert head.target == "/llm/v1/chat/completions"
        assert head.fields.get("authorization") == "Bearer k-1"
        assert head.fields.tokens("accept-encoding") == ["identity"]
        assert head.fields.get("content-type") == "application/json"
        assert head.fields.get("host") == head.host != ""

    async def test_without_a_key_no_authorization(self) -> None:
        head, _ = await sent()
        assert "authorization" not in head.fields


class TestModelName:
    async def test_the_first_of_upstream_s_list_asked_for_once(self) -> None:
        models = answer("200 OK", {"data": [{"id": "qwen"}, {"id": "llama"}]})
        async with scripted([models], TWO, TWO) as upstream:
            engine = engine_for(upstream, model=None)
            await read(submit(engine))
            await read(submit(engine))
            requests = [peer.requests[0] for peer in upstream.peers]
        assert [head.target for head, _ in requests] == [
            "/v1/models", "/v1/chat/completions", "/v1/chat/completions",
        ]  # fmt: skip
        assert [json.loads(content)["model"] for _, content in requests[1:]] == ["qwen", "qwen"]

    @pytest.mark.parametrize(
        "listed",
        [
            answer("404 Not Found"),
            answer("200 OK", {"data": []}),
            answer("200 OK", {"data": 5}),
            answer("200 OK", [{"id": 5}]),
            answer("200 OK", b"<html>", media_type="text/html"),
        ],
        ids=["404", "empty", "no list", "no object", "no JSON"],
    )
    async def test_default_where_there_is_no_list(self, listed: bytes) -> None:
        async with scripted([listed], TWO) as upstream:
            engine = engine_for(upstream, model=None)
            assert await read(submit(engine)) == "One, two"
            assert json.loads(upstream.peers[1].requests[0][1])["model"] == "default"
            assert engine.model is None


def listing(*names: str) -> bytes:
    return answer("200 OK", {"data": [{"id": name} for name in names]})


ANTHROPIC = {"anthropic-version": "2023-06-01"}


class TestModels:
    """What is served is what upstream lists, whatever `--model` says."""

    async def test_a_name_that_can_t_be_written(self) -> None:
        async with relaying([listing("\ud83d", "qwen")], model=None) as (ours, _):
            listed = await ours.ask("GET", "/v1/models")
        assert [model["id"] for model in listed.json()["data"]] == ["qwen", "default"]

    async def test_are_listed_as_upstream_lists_them(self) -> None:
        async with relaying([listing("qwen", "org/llama")], model=None) as (ours, upstream):
            listed = (await ours.ask("GET", "/v1/models")).json()
            theirs = (await ours.ask("GET", "/v1/models", **ANTHROPIC)).json()
            one = await ours.ask("GET", "/v1/models/org/llama", **ANTHROPIC)
            assert len(upstream.peers) == 1  # and not asked again at once
        names = ["qwen", "org/llama", "default"]
        assert [model["id"] for model in listed["data"]] == names
        assert [model["id"] for model in theirs["data"]] == names
        assert (one.status, one.json()["id"]) == (200, "org/llama")
        assert one.json()["max_input_tokens"] is None  # which upstream does not say

    @pytest.mark.parametrize(
        ("asked", "relayed"),
        [("llama", "llama"), ("qwen", "qwen"), ("default", "qwen"), ("alias", "qwen"),
         (None, "qwen")],
    )  # fmt: skip
    @pytest.mark.parametrize("pinned", [None, "qwen"])
    async def test_the_one_that_is_asked_for(
        self, asked: str | None, relayed: str, pinned: str | None
    ) -> None:
        async with scripted([listing("qwen", "llama")], TWO) as upstream:
            engine = engine_for(upstream, model=pinned)
            async with serving(engine, aliases=("alias",)) as ours:
                await ours.ask("GET", "/v1/models")
                body = {"model": asked, "messages": MESSAGES}
                reply = await ours.ask("POST", "/v1/chat/completions", body)
            assert json.loads(upstream.peers[1].requests[0][1])["model"] == relayed
        assert reply.json()["choices"][0]["message"]["content"] == TEXT

    async def test_one_that_was_loaded_since(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("upstream.LIST_S", 0)
        body = {"model": "new", "messages": MESSAGES}
        scripts = ([listing("qwen")], [listing("qwen", "new")], TWO)
        async with relaying(*scripts, model=None) as (ours, upstream):
            refused = await ours.ask("POST", "/v1/chat/completions", body)
            assert (refused.status, refused.json()["error"]["code"]) == (400, "model_not_found")
            assert "'qwen' or 'default'" in refused.json()["error"]["message"]
            assert (await ours.ask("POST", "/v1/chat/completions", body)).status == 200
            assert json.loads(upstream.peers[2].requests[0][1])["model"] == "new"

    @pytest.mark.parametrize("status", ["404 Not Found", "405 No", "501 No"])
    async def test_without_a_list_there_is_one(self, status: str) -> None:
        async with relaying([answer(status)], model=None) as (ours, _):
            listed = (await ours.ask("GET", "/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["default"]

    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            (answer("503 Loading"), 502),
            (answer("401 No"), 502),
            (answer("504 Slow"), 504),
            (b"", 502),
        ],
    )
    @pytest.mark.parametrize("anthropic", [False, True])
    async def test_what_goes_wrong(self, raw: bytes, status: int, anthropic: bool) -> None:
        fields = ANTHROPIC if anthropic else {}
        async with relaying([raw], model=None) as (ours, _):
            reply = await ours.ask("GET", "/v1/models", **fields)
        assert reply.status == status
        assert (reply.json().get("type") == "error") == anthropic
        assert "upstream server" in reply.json()["error"]["message"]


class TestProviders:
    """The providers' routes in front of another server."""

    async def test_usage_comes_through_though_it_comes_last(self) -> None:
        """Field report 123: what the SDK hands out at the end is right."""
        anthropic = require("anthropic")
        body: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 9}
        async with relaying(TWO, TWO) as (ours, _):
            url = f"http://127.0.0.1:{ours.port}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as sdk:
                async with sdk.messages.stream(**body) as events:
                    final = await events.get_final_message()
                whole = await sdk.messages.create(**body)
        counts = USAGE["prompt_tokens"], USAGE["completion_tokens"]
        assert (final.usage.input_tokens, final.usage.output_tokens) == counts
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == counts

    async def test_of_responses_and_chat(self) -> None:
        openai = require("openai")
        async with relaying(TWO, TWO) as (ours, _):
            url = f"http://127.0.0.1:{ours.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none") as sdk:
                async with sdk.responses.stream(model="default", input="Count.") as events:
                    response = await events.get_final_response()
                async with sdk.chat.completions.stream(
                    model="default", messages=MESSAGES, stream_options={"include_usage": True}
                ) as chunks:
                    chat = await chunks.get_final_completion()
        counts = USAGE["prompt_tokens"], USAGE["completion_tokens"]
        assert (response.usage.input_tokens, response.usage.output_tokens) == counts
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == counts
        assert response.output_text == chat.choices[0].message.content == TEXT

    async def test_tokens_can_t_be_counted(self) -> None:
        async with relaying() as (ours, _):
            body = {"model": "default", "messages": MESSAGES}
            reply = await ours.ask("POST", "/v1/messages/count_tokens", body)
        assert reply.status == 501
        assert reply.json()["type"] == "error"
        assert "can't be counted" in reply.json()["error"]["message"]

    async def test_a_forced_function(self) -> None:
        """It is described to the model, and its schema goes with it."""
        tool = {"name": "look", "description": "See.", "input_schema": {"type": "object"}}
        asked = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 9}
        arguments = [HEAD, chunk('{"a":'), chunk(" 1}", "stop"), usage_chunk(), DONE]
        async with relaying(arguments) as (ours, upstream):
            body = {"model": "default", "messages": MESSAGES, **asked}
            reply = (await ours.ask("POST", "/v1/messages", body)).json()
            sent = json.loads(upstream.peer.requests[0][1])
        assert reply["content"][0]["input"] == {"a": 1}
        assert reply["stop_reason"] == "tool_use"
        assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert "look: See." in sent["messages"][0]["content"]

    @pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
    @pytest.mark.parametrize("how", ["close", "reset"])
    async def test_who_leaves_closes_upstream(self, route: str, how: str) -> None:
        asked = {
            "completions": {"prompt": "a"}, "responses": {"input": "a"},
        }.get(route, {"messages": MESSAGES, "max_tokens": 9})  # fmt: skip
        async with relaying([HEAD, chunk("One,"), until_client_ends]) as (ours, upstream):
            async with ours.connect() as peer:
                peer.request("POST", f"/v1/{route}", {"model": "default", "stream": True, **asked})
                await peer.head()
                getattr(peer, how)()
                assert await ended(upstream) == b""

    @pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
    async def test_what_breaks_is_told_in_the_dialect_s_way(self, route: str) -> None:
        asked = {
            "completions": {"prompt": "a"}, "responses": {"input": "a"},
        }.get(route, {"messages": MESSAGES, "max_tokens": 9})  # fmt: skip
        body = {"model": "default", **asked}
        async with relaying([HEAD, chunk("One,"), hang_up], [answer("503 No")]) as (ours, _):
            cut = await ours.ask("POST", f"/v1/{route}", {**body, "stream": True})
            dead = await ours.ask("POST", f"/v1/{route}", body)
        assert (cut.status, dead.status) == (200, 502)
        assert b"One," in cut.content
        assert b"without an end" in cut.content
        for end in (b"[DONE]", b"message_stop", b"response.completed"):
            assert end not in cut.content
        assert dead.json()["error"]["message"] == "the upstream server failed"

    @pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
    async def test_a_filter_there_is_an_end_here(self, route: str) -> None:
        """With what was said before it, and the usage that comes after it."""
        asked = {
            "completions": {"prompt": "a"}, "responses": {"input": "a"},
        }.get(route, {"messages": MESSAGES, "max_tokens": 9})  # fmt: skip
        script = [HEAD, chunk("One,"), chunk(None, "content_filter"), usage_chunk(), DONE]
        async with relaying(script, script) as (ours, _):
            for streamed in (True, False):
                body = {"model": "default", **asked, "stream": streamed}
                reply = await ours.ask("POST", f"/v1/{route}", body)
                assert reply.status == 200
                assert b"One," in reply.content
                assert (
                    b'"refusal"' if route == "messages" else b'"content_filter"'
                ) in reply.content
                if route in ("messages", "responses"):
                    assert b'"output_tokens": 3' in reply.content

    async def test_in_the_background(self) -> None:
        go = asyncio.Event()
        async with relaying([*TWO[:2], go, *TWO[2:]]) as (ours, _):
            body = {"model": "default", "input": "a", "background": True}
            id = (await ours.ask("POST", "/v1/responses", body)).json()["id"]
            go.set()
            events = await ours.ask("GET", f"/v1/responses/{id}?stream=true&starting_after=4")
        assert b" two" in events.content
        assert b'"input_tokens": 7' in events.content


TEXT = "One, two"
PLAIN = b"".join(TWO[1:])
PLAIN_END = b"".join(TWO[3:])
HABITS = [
    ("a role chunk first", chunk("") + PLAIN),
    ("content null, key absent",
     b'data: {"choices":[{"delta":{"content":null}}]}\n\n' + chunk() + PLAIN),
    ("CRLF", PLAIN.replace(b"\n", b"\r\n")),
    ("bare CR", PLAIN.replace(b"\n", b"\r")),
    ("no space after the colon", PLAIN.replace(b"data: ", b"data:")),
    ("comments", b": hello\n\n" + PLAIN.replace(b"\n\n", b"\n\n: ping\n\n")),
    ("ids and event names", PLAIN.replace(b"data:", b"id: 5\nevent: message\ndata:")),
    ("events without data", b"event: ping\n\ndata:\n\n" + PLAIN),
    ("a ping with an object", b"event: ping\ndata: {}\n\n" + PLAIN),
    ("usage in every chunk, G 115",
     chunk("One,", usage={"prompt_tokens": 7, "completion_tokens": 1})
     + chunk(" two", "stop", usage=USAGE) + DONE),
    ("usage null", chunk("One,", usage=None) + chunk(" two", "stop", usage=USAGE) + DONE),
    ("text with the finish reason, G 111", chunk("One, two", "stop") + usage_chunk() + DONE),
    ("no [DONE]", chunk("One, two", "stop") + usage_chunk()),
    ("no [DONE] and half an event", chunk("One, two", "stop") + usage_chunk() + b"data: {"),
    ("no finish reason, G 112", chunk("One, two") + usage_chunk() + DONE),
    ("an empty finish reason, G 112", chunk("One, two", "") + usage_chunk() + DONE),
    ("reasoning, I 144",
     b'data: {"choices":[{"delta":{"reasoning_content":"Hm","content":null}}]}\n\n' + PLAIN),
    ("completions' form",
     b'data: {"choices":[{"text":"One, two","finish_reason":"stop"}]}\n\n' + usage_chunk() + DONE),
    ("what comes after the end", PLAIN + chunk("more")),
    ("parts, of which one is reasoning",
     b'data: {"choices":[{"delta":{"content":[{"type":"thinking","thinking":[{"type":"text",'
     b'"text":"Hm"}]},{"type":"text","text":"One,"},{"type":"text"},5]}}]}\n\n'
     + chunk(" two") + PLAIN_END),
    ("several replies, apart", b'data: {"choices":[{"index":1,"delta":{"content":"A"}}]}\n\n'
     + chunk("One, two")
     + b'data: {"choices":[{"index":1,"delta":{},"finish_reason":"length"}]}\n\n' + PLAIN_END),
    ("several replies together",
     b'data: {"choices":[{"index":1,"delta":{"content":"A"}},'
     b'{"index":0,"delta":{"content":"One, two"}}]}\n\n' + PLAIN_END),
    ("error: null", chunk("One, two", "stop", error=None) + usage_chunk() + DONE),
]  # fmt: skip


class TestHabits:
    @pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
    @pytest.mark.parametrize(("_id", "content"), HABITS, ids=[id for id, _ in HABITS])
    async def test_taken(self, _id: str, content: bytes, cut: bool) -> None:
        parts = [content[i : i + 1] for i in range(len(content))] if cut else [content]
        async with scripted([HEAD, *parts]) as upstream:
            generation = submit(engine_for(upstream))
            assert await read(generation) == TEXT
        assert (generation.finish_reason, generation.usage) == ("stop", USAGE)

    async def test_however_the_answer_is_cut(self) -> None:
        raw = HEAD + chunk("Hé", "length") + DONE
        cuts = list(splits(raw))
        async with scripted(*cuts) as upstream:
            engine = engine_for(upstream)
            for _ in cuts:
                generation = submit(engine)
                assert (await read(generation), generation.finish_reason) == ("Hé", "length")

    @pytest.mark.parametrize("choice", [{"message": {"content": "Whole"}}, {"text": "Whole"}])
    async def test_a_json_body_in_place_of_a_stream(self, choice: Any) -> None:
        body = {"choices": [{**choice, "finish_reason": "length"}], "usage": USAGE}
        async with relaying([answer("200 OK", body)]) as (ours, _):
            reply = await ours.ask("POST", "/stream", CHAT)
        assert (reply.status, reply.text()) == (200, "Whole")
        end = json.loads(reply.events()[-2])
        assert (end["finish_reason"], end["usage"]) == ("length", USAGE)

    async def test_interim_responses(self) -> None:
        async with scripted([b"HTTP/1.1 103 Early Hints\r\n\r\n", *TWO]) as upstream:
            assert await read(submit(engine_for(upstream))) == TEXT

    async def test_without_usage_the_counts_are_zero(self) -> None:
        async with scripted([HEAD, chunk("One, two", "stop"), DONE]) as upstream:
            generation = submit(engine_for(upstream))
            await read(generation)
        assert generation.usage == {"prompt_tokens": 0, "completion_tokens": 0}

    @pytest.mark.parametrize("count", ["7", -1, 1.5, None, [7], True, 2**53 + 1, 10**400])
    async def test_a_count_that_is_none(self, count: Any) -> None:
        async with scripted(
            [HEAD, chunk("a", "stop"), usage_chunk(prompt_tokens=count), DONE]
        ) as up:
            generation = submit(engine_for(up))
            await read(generation)
        assert generation.prompt_tokens is not True
        assert generation.prompt_tokens == 0

    async def test_half_a_surrogate_pair_does_not_reach_our_wire(self) -> None:
        lone = b'data: {"choices":[{"delta":{"content":"a\\ud83d"}}]}\n\n'
        async with relaying([HEAD, lone, chunk(None, "stop"), DONE]) as (ours, _):
            assert (await ours.ask("POST", "/stream", CHAT)).text() == "a?"

    @pytest.mark.parametrize(
        ("theirs", "mine"),
        [("stop", "stop"), ("length", "length"), ("eos_token", "stop"), ("tool_calls", "stop")],
    )
    async def test_finish_reasons(self, theirs: str, mine: str) -> None:
        async with scripted([HEAD, chunk("a", theirs), DONE]) as upstream:
            generation = submit(engine_for(upstream))
            await read(generation)
        assert generation.finish_reason == mine

    async def test_the_end_is_not_waited_for_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("upstream.LINGER_S", 0.05)
        async with scripted([HEAD, chunk("a", "stop"), until_client_ends]) as upstream:
            generation = submit(engine_for(upstream))
            assert (await read(generation), generation.finish_reason) == ("a", "stop")

    async def test_a_reset_after_the_finish_reason_loses_nothing(self) -> None:
        seen = asyncio.Event()
        async with scripted([HEAD, chunk("a", "stop"), seen, reset]) as upstream:
            generation = submit(engine_for(upstream))
            assert await anext(generation) == "a"
            seen.set()
            assert await read(generation) == ""
        assert generation.finish_reason == "stop"


class TestComesThrough:
    """Text, finish reason and usage, by every way of delivery."""

    async def test_complete(self) -> None:
        async with relaying(TWO) as (ours, _):
            reply = await ours.ask("POST", "/complete", {"messages": MESSAGES})
        assert reply.json() == {"text": TEXT, "finish_reason": "stop", "usage": USAGE}

    async def test_stream(self) -> None:
        async with relaying(TWO) as (ours, _):
            reply = await ours.ask("POST", "/stream", CHAT)
        one, two, end, done = reply.events()
        assert [json.loads(one), json.loads(two), done] == [
            {"text": "One,"},
            {"text": " two"},
            "[DONE]",
        ]
        assert json.loads(end)["finish_reason"] == "stop"
        assert json.loads(end)["usage"] == USAGE
        timings = json.loads(end)["timings"]
        assert 0 < timings["queued"] <= timings["first_token"] <= timings["last_token"]

    async def test_websocket(self) -> None:
        async with relaying(TWO) as (ours, _), ours.connect() as peer:
            client = await open_websocket(peer)
            client.say({"messages": MESSAGES})
            text, end = await client.reply()
        assert (text, end["finish_reason"], end["usage"]) == (TEXT, "stop", USAGE)

    async def test_resumed(self) -> None:
        go = asyncio.Event()
        async with relaying([*TWO[:2], go, *TWO[2:]]) as (ours, _):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", {**CHAT, "resume": True})
                head, _ = await peer.head()
                await peer.until(b"One,")
            go.set()
            id = head.fields.get("reply-id")
            reply = await ours.ask("GET", f"/stream/{id}", Last_Event_ID=f"{id}:1")
        assert reply.text() == " two"
        assert reply.events()[-1] == "[DONE]"

    async def test_each_piece_leaves_in_the_read_that_completed_it(self) -> None:
        go = asyncio.Event()
        cut = chunk(" two")
        async with relaying([HEAD, chunk("One,"), go, cut[:-1], until_client_ends]) as (ours, up):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", CHAT)
                await peer.until(b"One,")  # while upstream writes nothing more
                go.set()
                await eventually(lambda: up.peer.written > len(HEAD + chunk("One,")))
                await up.peer.write(cut[-1:])
                await peer.until(b" two")

    async def test_our_head_leaves_with_upstream_s_not_with_the_first_piece(self) -> None:
        async with relaying([HEAD, until_client_ends]) as (ours, _), ours.connect() as peer:
            peer.request("POST", "/stream", CHAT)
            head, _ = await peer.head()
        assert head.status == 200

    async def test_log_and_metrics(self) -> None:
        async with relaying(TWO) as (ours, _):
            await ours.ask("POST", "/complete", {"messages": MESSAGES})
            (line,) = (await ours.ask("GET", "/log")).json()["requests"]
            told = (await ours.ask("GET", "/metrics")).content.decode()
        assert {name: line[name] for name in USAGE} == USAGE
        assert 'server_tokens_total{type="output"} 3' in told
        assert 'server_requests_total{finish_reason="stop"} 1' in told
        assert "gen_ai_server_time_to_first_token_seconds_count 1" in told

    async def test_health_says_what_is_behind(self) -> None:
        async with relaying(TWO, model="qwen") as (ours, upstream):
            state = (await ours.ask("GET", "/health")).json()
        assert (state["upstream"], state["model"]) == (upstream.url("/v1"), "qwen")


REFUSALS = [
    # upstream's answer, our status, our type, our words, our Retry-After
    ("400", answer("400 Bad Request", {"error": {"message": "too long", "code": 400}}),
     400, "invalid_request_error", "too long", None),
    ("400 of an older vLLM", answer("400 Bad Request", {"object": "error", "message": "too long"}),
     400, "invalid_request_error", "too long", None),
    ("422 of FastAPI", answer("422 Unprocessable Entity", {"detail": "no such field"}),
     422, "invalid_request_error", "no such field", None),
    ("400 without words", answer("400 Bad Request", b"<html>", media_type="text/html"),
     400, "invalid_request_error", "refused the request", None),
    ("400 with many words", answer("400 Bad Request", {"error": "x" * 9999}),
     400, "invalid_request_error", "x" * 500, None),
    ("400 whose words are cut", answer("400 Bad Request", {"error": "too long"})[:-5],
     400, "invalid_request_error", "refused the request", None),
    ("429 whose words are cut",
     b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 17\r\nContent-Length: 9\r\n\r\n",
     429, "overloaded", "busy", "17"),
    ("413", answer("413 Too Large"), 413, "invalid_request_error", "refused the request", None),
    ("401", answer("401 Unauthorized", {"error": {"message": "bad key k-1"}}),
     502, "upstream_error", "refused this server's key", None),
    ("403", answer("403 Forbidden"), 502, "upstream_error", "refused this server's key", None),
    ("404", answer("404 Not Found", {"error": {"message": "no such model: k-1"}}),
     502, "upstream_error", "does not know the address or the model", None),
    ("429", answer("429 Too Many Requests", None, "Retry-After: 17"),
     429, "overloaded", "busy", "17"),
    ("429 without a time", answer("429 Too Many Requests"), 429, "overloaded", "busy", "1"),
    ("429 with a date", answer("429 Too Many Requests", None, "Retry-After: Mon, 30 Nov 2026"),
     429, "overloaded", "busy", "1"),
    ("500", answer("500 Oops", b"Traceback: k-1"), 502, "upstream_error", "failed", None),
    ("503", answer("503 Loading", {"error": "k-1"}), 502, "upstream_error", "failed", None),
    ("504", answer("504 Slow"), 504, "upstream_error", "did not answer in time", None),
    ("307", answer("307 Temporary Redirect", None, "Location: http://k-1/"),
     502, "upstream_error", "redirects", None),
    ("101", b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, "upstream_error", "failed", None),
    ("204", b"HTTP/1.1 204 No Content\r\n\r\n", 502, "upstream_error", "failed", None),
    ("200 with a page", answer("200 OK", b"<html>", media_type="text/html"),
     502, "upstream_error", "no stream of events", None),
    ("gzip", HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n",
     502, "upstream_error", "compressed", None),
    ("no HTTP", b"SSH-2.0-OpenSSH_9.9\r\n", 502, "upstream_error", "not valid", None),
    ("half a head", b"HTTP/1.1 200 OK\r\nContent-", 502, "upstream_error", "broke off", None),
    ("nothing", b"", 502, "upstream_error", "broke off", None),
    ("an endless head", HEAD[:-2] + b"A: b\r\n" * 9999, 502, "upstream_error", "not valid", None),
]  # fmt: skip


class TestRefusedBeforeTheHead:
    @pytest.mark.parametrize("route", ["/stream", "/complete"])
    @pytest.mark.parametrize(
        ("raw", "status", "kind", "words", "later"),
        [case[1:] for case in REFUSALS],
        ids=[case[0] for case in REFUSALS],
    )
    async def test_answered_with_a_status(
        self, raw: bytes, status: int, kind: str, words: str, later: str | None, route: str
    ) -> None:
        async with relaying([raw], key="k-1") as (ours, _):
            reply = await ours.ask("POST", route, {"messages": MESSAGES})
            assert ours.server.engine.running == ours.server.engine.waiting == 0
        assert reply.status == status
        assert reply.json()["error"]["type"] == kind
        assert words in reply.json()["error"]["message"]
        assert reply.fields.get("retry-after") == later
        assert b"k-1" not in reply.content

    async def test_the_words_of_an_error_are_not_waited_for_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("upstream.LINGER_S", 0.01)
        head = b"HTTP/1.1 429 Busy\r\nRetry-After: 17\r\nContent-Length: 9\r\n\r\n"
        async with relaying([head, until_client_ends], timeout_s=60) as (ours, _):
            async with asyncio.timeout(30):
                reply = await ours.ask("POST", "/complete", {"messages": MESSAGES})
        assert (reply.status, reply.fields.get("retry-after")) == (429, "17")

    async def test_on_a_websocket_in_a_message(self) -> None:
        async with relaying([REFUSALS[0][1]]) as (ours, _), ours.connect() as peer:
            client = await open_websocket(peer)
            client.say({"messages": MESSAGES})
            told = await client.told()
            assert told == {"error": {"message": "too long", "type": "invalid_request_error"}}
            assert await client.closed() == 1000

    async def test_a_resumable_reply(self) -> None:
        async with relaying([REFUSALS[0][1]]) as (ours, _):
            reply = await ours.ask("POST", "/stream", {**CHAT, "resume": True})
            assert reply.status == 400
            assert len(ours.server.delivery.replays) == 0

    async def test_nobody_there(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # and nobody listens
            engine = UpstreamEngine(f"http://127.0.0.1:{free.getsockname()[1]}", model="m")
            async with serving(engine) as ours:
                reply = await ours.ask("POST", "/stream", CHAT)
        assert (reply.status, reply.json()["error"]["type"]) == (502, "upstream_error")

    async def test_no_such_host(self) -> None:
        async with serving(UpstreamEngine("http://nowhere.invalid", model="m")) as ours:
            assert (await ours.ask("POST", "/stream", CHAT)).status == 502

    @pytest.mark.parametrize("route", ["/stream", "/complete"])
    async def test_silence(self, route: str) -> None:
        async with relaying([until_client_ends], timeout_s=0.1) as (ours, upstream):
            reply = await ours.ask("POST", route, {"messages": MESSAGES})
            assert await upstream.peer.ended == b""
        assert (reply.status, reply.json()["error"]["type"]) == (504, "upstream_error")

    async def test_a_connection_that_is_not_accepted(self) -> None:
        with socket.socket() as deaf, contextlib.ExitStack() as others:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            for _ in range(3):  # fill the backlog: the next SYN gets no answer
                other = others.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(deaf.getsockname())
            engine = UpstreamEngine(
                f"http://127.0.0.1:{deaf.getsockname()[1]}", model="m", timeout_s=0.2
            )
            async with serving(engine) as ours, asyncio.timeout(5):  # not CONNECT_S
                assert (await ours.ask("POST", "/stream", CHAT)).status == 504

    async def test_the_log_has_the_reason_and_no_key(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        raws = [case[1] for case in REFUSALS if case[0] in ("401", "307", "503")]
        async with relaying(*([raw] for raw in raws), key="secret") as (ours, _):
            for _ in raws:
                await ours.ask("POST", "/stream", CHAT)
        assert "secret" not in caplog.text
        assert "bad key" not in caplog.text
        assert "http://k-1/" in caplog.text
        assert "503" in caplog.text


BROKEN = [
    # what comes after the first piece, our status on /complete, words
    ("cut", (), 502, "broke off"),
    ("cut in an event", (chunk(" two")[:-3],), 502, "broke off"),
    ("reset", (reset,), 502, "failed"),
    ("dead", (until_client_ends,), 504, "in time"),
    ("an error as data, C 55", (b'data: {"error": {"message": "k-1"}}\n\n',), 502, "failed"),
    ("an error's code, in vLLM's way",
     (b'data: {"error": {"message": "too long", "code": 400}}\n\n', DONE), 400, "too long"),
    ("an error that is a string", (b'data: {"error": "k-1"}\n\n',), 502, "failed"),
    ("event: error", (b'event: error\ndata: {"message": "k-1"}\n\n', DONE), 502, "failed"),
    ("an older vLLM's error", (b'data: {"object": "error", "message": "k-1"}\n\n',), 502, "failed"),
    ("not JSON", (b"data: {\n\n", DONE), 502, "no JSON object"),
    ("no object", (b"data: 5\n\n", DONE), 502, "no JSON object"),
    ("no UTF-8", (b"data: \xff\n\n", DONE), 502, "no JSON object"),
    ("deep", (b"data: " + b"[" * 100_000 + b"\n\n", DONE), 502, "no JSON object"),
    ("filtered", (chunk(None, "content_filter"), DONE), 422, "content_filter"),
    ("given up", (chunk(None, "abort"), DONE), 502, "abort"),
    ("given up for half a character", (chunk(None, "\ud83d"), DONE), 502, "ended the reply: ?"),
    ("an endless event", (b"data: " + b"x" * 1_100_000, until_client_ends), 502, "not valid"),
]  # fmt: skip


async def hang_up(peer: Peer) -> None:
    peer.writer.close()


class TestBrokenAfterTheHead:
    @pytest.mark.parametrize(
        ("rest", "status", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
    )
    async def test_told_in_band_and_never_an_end(
        self, rest: tuple[Step, ...], status: int, words: str
    ) -> None:
        script = [HEAD, chunk("One,"), *rest, hang_up]
        async with relaying(script, script, script, timeout_s=0.2) as (ours, _):
            reply = await ours.ask("POST", "/stream", CHAT)
            assert reply.status == 200
            first, error = reply.events()
            assert (json.loads(first)["text"], words in error) == ("One,", True)
            assert b"event: error" in reply.content
            assert b"[DONE]" not in reply.content
            assert b"k-1" not in reply.content
            whole = await ours.ask("POST", "/complete", {"messages": MESSAGES})
            assert whole.status == status
            async with ours.connect() as peer:
                client = await open_websocket(peer)
                client.say({"messages": MESSAGES})
                text, end = await client.reply()
                assert (text, words in end["error"]["message"]) == ("One,", True)
            assert ours.server.engine.running == 0
            ends = [entry.generation.finish_reason for entry in ours.server.entries]
            assert ends == ["error"] * 3

    async def test_cut_in_a_chunk(self) -> None:
        head = HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
        async with scripted([head, b"ff\r\n" + chunk("One,")]) as upstream:
            generation = submit(engine_for(upstream))
            assert await anext(generation) == "One,"
            with pytest.raises(GenerationError, match="broke off"):
                await read(generation)

    async def test_a_chunked_answer_that_ends_well_but_has_no_end(self) -> None:
        part = chunk("One,")
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part)
        async with scripted([HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + content]) as up:
            with pytest.raises(GenerationError, match="without an end"):
                await read(submit(engine_for(up)))

    async def test_more_than_any_reply_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outbound.LIMITS", http1.Limits(content_bytes=1000))
        async with scripted([HEAD, *([chunk("One,")] * 100), until_client_ends]) as upstream:
            with pytest.raises(GenerationError, match="not valid"):
                await read(submit(engine_for(upstream)))

    async def test_what_we_did_not_foresee_ends_the_reply_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("upstream.sse.Parser", None)
        async with scripted([HEAD]) as upstream:
            engine = engine_for(upstream)
            with pytest.raises(GenerationError, match="internal error"):
                await read(submit(engine))
            assert engine.running == 0


class TestSilence:
    async def test_heartbeats_before_and_after_upstream_s_head(self) -> None:
        heads, goes = asyncio.Event(), asyncio.Event()
        settings = quick(heartbeat_s=0.05)
        script = [heads, HEAD, goes, *TWO[1:]]
        async with relaying(script, settings=settings) as (ours, _), ours.connect() as peer:
            peer.request("POST", "/stream", CHAT)
            head, _ = await peer.head()  # after one heartbeat's time, though upstream is silent
            assert head.status == 200
            await peer.until(b":\n\n:\n\n")
            heads.set()
            await peer.until(b":\n\n" * 4)
            goes.set()
            await peer.until(b"[DONE]")

    async def test_a_refusal_after_our_head_is_told_in_band(self) -> None:
        refused = asyncio.Event()
        script = [refused, REFUSALS[0][1]]
        async with relaying(script, settings=quick(heartbeat_s=0.05)) as (ours, _):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", CHAT)
                await peer.head()
                refused.set()
                await peer.until(b'event: error\ndata: {"message": "too long"')


LEAVES = ["close", "reset"]
SO_FAR: dict[str, list[Step]] = {
    "before its head": [],
    "before the first piece": [HEAD],
    "between two pieces": [HEAD, chunk("One,")],
    "in an event": [HEAD, chunk("One,"), b'data: {"choi'],
}


class TestStopLaw:
    """Whoever leaves, the upstream connection is closed; upstream need not write to learn it."""

    @pytest.mark.parametrize("how", LEAVES)
    @pytest.mark.parametrize("so_far", SO_FAR.values(), ids=SO_FAR)
    @pytest.mark.parametrize("route", ["/stream", "/complete"])
    async def test_the_client_leaves(self, route: str, so_far: list[Step], how: str) -> None:
        async with relaying([*so_far, until_client_ends]) as (ours, upstream):
            async with ours.connect() as peer:
                peer.request("POST", route, {"messages": MESSAGES})
                await eventually(lambda: upstream.peers and upstream.peer.requests)
                if so_far and route == "/stream":
                    await peer.head()
                getattr(peer, how)()
                assert await ended(upstream) == b""
            (entry,) = ours.server.entries
            await eventually(lambda: ours.server.engine.waiting + ours.server.engine.running == 0)
            assert (entry.generation.finish_reason, entry.client_left) == ("cancelled", True)

    @pytest.mark.parametrize("so_far", SO_FAR.values(), ids=SO_FAR)
    async def test_stop_on_a_websocket(self, so_far: list[Step]) -> None:
        async with relaying([*so_far, until_client_ends]) as (ours, upstream):
            async with ours.connect() as peer:
                client = await open_websocket(peer)
                client.say({"messages": MESSAGES})
                await eventually(lambda: upstream.peers and upstream.peer.requests)
                client.say({"stop": True})
                assert await ended(upstream) == b""
                _, end = await client.reply()
                assert end["finish_reason"] == "cancelled"

    async def test_cancelled_by_id(self) -> None:
        async with relaying([HEAD, until_client_ends]) as (ours, upstream), ours.connect() as peer:
            peer.request("POST", "/stream", CHAT)
            head, _ = await peer.head()
            await ours.ask("POST", f"/cancel/{head.fields.get('reply-id')}")
            assert await ended(upstream) == b""
            await peer.until(b'"finish_reason": "cancelled"')

    async def test_a_resumable_reply_that_nobody_comes_back_for(self) -> None:
        policy = Policy(grace_s=0.1)
        async with relaying([HEAD, chunk("One,"), until_client_ends], policy=policy) as (ours, up):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", {**CHAT, "resume": True})
                await peer.until(b"One,")
            assert await ended(up) == b""

    async def test_shutdown(self) -> None:
        async with relaying([HEAD, chunk("One,"), until_client_ends]) as (ours, upstream):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", CHAT)
                await peer.until(b"One,")
                await ours.server.stop(goodbye_s=1)
                assert await ended(upstream) == b""
                await peer.until(b"shutting down")
            with pytest.raises(EngineDown):
                submit(ours.server.engine)

    async def test_cancelled_before_it_has_begun(self) -> None:
        async with scripted(TWO) as upstream:
            engine = engine_for(upstream)
            generation = submit(engine)
            generation.cancel("at once")
            assert await read(generation) == ""
            assert generation.finish_reason == "cancelled"
            assert (engine.waiting, engine.running, upstream.peers) == (0, 0, [])

    async def test_while_the_model_s_name_is_asked_for(self) -> None:
        async with scripted([until_client_ends]) as upstream:
            generation = submit(engine_for(upstream, model=None))
            await eventually(lambda: upstream.peers and upstream.peer.requests)
            generation.cancel()
            assert await ended(upstream) == b""
            assert await read(generation) == ""

    async def test_while_paused(self) -> None:
        async with scripted([HEAD, chunk("One,"), until_client_ends]) as upstream:
            generation = submit(engine_for(upstream))
            assert await anext(generation) == "One,"
            generation.pause(True)
            generation.cancel()
            assert await ended(upstream) == b""

    async def test_while_upstream_does_not_take_the_request(self) -> None:
        """What is still unsent is dropped, not sent before the connection closes."""
        prompt = "x" * 16_000_000
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            engine = UpstreamEngine(f"http://127.0.0.1:{deaf.getsockname()[1]}", model="m")
            generation = submit(engine, prompt)
            accepted, _ = await loop.sock_accept(deaf)
            with accepted:
                await loop.sock_recv(accepted, 100)
                generation.cancel()
                assert await read(generation) == ""
                taken = 0
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionError):
                        while data := await loop.sock_recv(accepted, 2**20):
                            taken += len(data)
        assert taken < len(prompt)

    async def test_the_others_go_on(self) -> None:
        go = asyncio.Event()
        async with scripted([HEAD, chunk("a"), until_client_ends], [*TWO[:2], go, *TWO[2:]]) as up:
            engine = engine_for(up)
            leaving = submit(engine)
            assert await anext(leaving) == "a"
            staying = submit(engine)
            assert await anext(staying) == "One,"
            leaving.cancel()
            go.set()
            assert await read(staying) == " two"

    async def test_three_hundred_leave(self) -> None:
        scripts = [[HEAD, chunk("One,"), until_client_ends]] * 300
        async with scripted(*scripts, TWO) as upstream:
            engine = engine_for(upstream)
            for _ in scripts:
                generation = submit(engine)
                await anext(generation)
                generation.cancel()
                await read(generation)
            assert await read(submit(engine)) == TEXT
            assert engine.running == 0


async def ended(upstream: Server) -> bytes | OSError:
    async with asyncio.timeout(5):
        return await upstream.peer.ended


class TestBackpressure:
    async def test_a_paused_reply_is_not_read(self) -> None:
        resumed = 0

        async def flood(peer: Peer) -> None:
            for _ in range(400):  # 25 MiB: more than all buffers between us
                await peer.write(chunk("x" * 64_000))

        async with scripted([HEAD, chunk("One,"), flood, chunk(None, "stop"), DONE]) as upstream:
            generation = submit(engine_for(upstream))
            assert await anext(generation) == "One,"
            generation.pause(True)
            before = -1
            while before < upstream.peer.written:  # until the sender is held back
                before = upstream.peer.written
                await asyncio.sleep(0.2)
            assert before < 20_000_000
            assert len(generation._pieces) < 10
            generation.pause(False)
            async for piece in generation:
                resumed += len(piece)
            assert (resumed, generation.finish_reason) == (400 * 64_000, "stop")

    async def test_as_many_wait_as_may(self) -> None:
        async with relaying([until_client_ends], max_waiting=1) as (ours, upstream):
            async with ours.connect() as peer:
                peer.request("POST", "/stream", CHAT)
                await eventually(lambda: upstream.peers and upstream.peer.requests)
                assert ours.server.engine.waiting == 1
                reply = await ours.ask("POST", "/stream", CHAT)
                assert (reply.status, reply.fields.get("retry-after")) == (429, "1")
                with pytest.raises(QueueFull):
                    submit(ours.server.engine)

    def test_an_empty_prompt(self) -> None:
        with pytest.raises(BadRequest, match="empty"):
            UpstreamEngine("http://gpu1").submit([], SamplingParams())


class TestTls:
    async def test_relayed_and_left(self, tls: ssl.SSLContext, files: tuple[Path, Path]) -> None:
        trusting = ssl.create_default_context(cafile=files[0])
        async with scripted(TWO, [HEAD, chunk("a"), until_client_ends], ssl=tls) as upstream:
            engine = UpstreamEngine(upstream.url("", "https"), model="m", tls=trusting)
            assert await read(submit(engine)) == TEXT
            generation = submit(engine)
            assert await anext(generation) == "a"
            generation.cancel()
            async with asyncio.timeout(5):
                await upstream.peers[1].ended

    async def test_a_certificate_that_nobody_vouches_for(self, tls: ssl.SSLContext) -> None:
        async with scripted(TWO, ssl=tls) as upstream:
            engine = UpstreamEngine(upstream.url("", "https"), model="m")
            with pytest.raises(GenerationError, match="connection to the upstream server failed"):
                await read(submit(engine))
            assert not any(peer.requests for peer in upstream.peers)


class TestProgram:
    async def test_in_front_of_a_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_KEY", "k-1")
        models = answer("200 OK", {"data": [{"id": "qwen"}]})
        async with scripted([models], TWO) as upstream:
            flags = ("--upstream", upstream.url(""), "--upstream-key-env", "GPU_KEY")
            async with started(*flags) as program, program.connect() as peer:
                reply = await peer.ask("POST", "/complete", {"messages": MESSAGES})
                state = (await peer.ask("GET", "/health")).json()
            requests = [peer.requests[0] for peer in upstream.peers]
        assert reply.json()["text"] == TEXT
        assert (state["model"], state["upstream"]) == ("qwen", upstream.url("/v1"))
        assert {head.fields.get("authorization") for head, _ in requests} == {"Bearer k-1"}

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--upstream", "gpu1:8000"), b"not an http or https URL"),
            (("--upstream", "http://x", "--upstream-key-env", "NO_SUCH"), b"NO_SUCH is not set"),
        ],
    )
    async def test_flags(self, flags: tuple[str, ...], words: bytes) -> None:
        code, _, err = await outcome(await start(*flags))
        assert code == 2
        assert words in err

    def test_needs_no_model_library(self) -> None:
        probe = (
            "import options, sys; "
            "options.make_engine(options.parse_arguments(['--upstream', 'http://gpu1:8000'])); "
            "print([name for name in ('torch', 'transformers', 'lm') if name in sys.modules])"
        )
        folder = Path(__file__).resolve().parent.parent
        out = subprocess.check_output([sys.executable, "-c", probe], cwd=folder, text=True)
        assert out == "[]\n"


# What the simulated engine can be asked for, and what comes of it: piece count, words in the error.
FAULTS = [
    ({"fail_after": 2}, 2, "failed"),
    ({"stall_after": 2}, 2, "in time"),
    ({"truncate_after": 3}, None, "broke off"),
    ({"garbage_after": 3}, None, "not valid"),
]


AskFor = Callable[[dict[str, int]], None]


class TestInFrontOfThisServer:
    async def test_the_same_reply(self) -> None:
        body = {"messages": MESSAGES, "seed": 7, "max_tokens": 9}
        async with serving() as behind:
            direct = await behind.ask("POST", "/complete", body)
            async with serving(UpstreamEngine(f"http://127.0.0.1:{behind.port}")) as ours:
                whole = await ours.ask("POST", "/complete", body)
                stream = await ours.ask("POST", "/stream", body)
        assert whole.json() == direct.json()
        assert stream.text() == direct.json()["text"]

    async def test_who_leaves_here_leaves_there(self) -> None:
        async with serving() as behind:
            async with serving(UpstreamEngine(f"http://127.0.0.1:{behind.port}")) as ours:
                async with ours.connect() as peer:
                    peer.request("POST", "/stream", {**CHAT, "max_tokens": 100_000})
                    await peer.until(b'"text"')
                    assert behind.server.engine.running == 1
                await eventually(lambda: behind.server.engine.running == 0)
        assert behind.server.entries[-1].client_left

    @pytest.mark.parametrize(("fault", "told", "words"), FAULTS, ids=[str(f[0]) for f in FAULTS])
    async def test_faults(
        self, fault: dict[str, int], told: int | None, words: str, ask_for: AskFor
    ) -> None:
        ask_for(fault)
        async with serving() as behind:
            engine = UpstreamEngine(f"http://127.0.0.1:{behind.port}", timeout_s=0.3)
            async with serving(engine) as ours:
                reply = await ours.ask("POST", "/stream", {**CHAT, "max_tokens": 9})
        *pieces, error = reply.events()
        assert words in json.loads(error)["message"]
        assert b"[DONE]" not in reply.content
        assert told in (None, len(pieces))

    async def test_cut_into_bytes(self, ask_for: AskFor) -> None:
        ask_for({"split_at": 1})
        async with serving() as behind:
            async with serving(UpstreamEngine(f"http://127.0.0.1:{behind.port}")) as ours:
                reply = await ours.ask("POST", "/complete", {"messages": MESSAGES, "max_tokens": 3})
        assert len(reply.json()["text"].split()) == 3


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> AskFor:
    """Have the relay ask the server behind it for a fault."""
    request = Relay._request

    def install(fault: dict[str, int]) -> None:
        def with_fault(relay: Relay, model: str) -> tuple[str, dict[str, Any]]:
            path, body = request(relay, model)
            return path, {**body, **fault}

        monkeypatch.setattr(Relay, "_request", with_fault)

    return install


# Needs no internet: the model is a folder. Its chat form is FastAPI's and pydantic's, not ours.
SERVE = "from transformers.cli.transformers import main; main()"


class TestForeign:
    """`transformers serve`: OpenAI's API by other people, over FastAPI and uvicorn."""

    async def test_a_chat(self, foreign: str) -> None:
        direct = ask_directly(foreign, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0})
        async with serving(UpstreamEngine(foreign)) as ours:
            body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            stream = await ours.ask("POST", "/stream", {**body, "usage": True})
            whole = (await ours.ask("POST", "/complete", body)).json()
        message = direct["choices"][0]["message"]["content"]
        assert stream.text() == whole["text"] == message != ""
        usage = {name: direct["usage"][name] for name in USAGE}
        assert whole["usage"] == json.loads(stream.events()[-2])["usage"] == usage
        assert whole["finish_reason"] == direct["choices"][0]["finish_reason"]

    async def test_plain_text(self, foreign: str) -> None:
        async with serving(UpstreamEngine(foreign)) as ours:
            body = {"prompt": "One, two,", "max_tokens": 5, "temperature": 0}
            reply = (await ours.ask("POST", "/complete", body)).json()
        assert reply["text"]
        assert reply["usage"]["completion_tokens"] <= 5

    async def test_a_field_that_it_does_not_know(self, foreign: str) -> None:
        async with serving(UpstreamEngine(foreign)) as ours:
            reply = await ours.ask("POST", "/stream", {"messages": MESSAGES, "top_k": 5})
        assert reply.status == 422
        assert "top_k" in reply.json()["error"]["message"]

    async def test_a_model_that_it_does_not_have(self, foreign: str) -> None:
        async with serving(UpstreamEngine(foreign, model="no/such-model")) as ours:
            reply = await ours.ask("POST", "/stream", {"messages": MESSAGES})
        assert reply.status in (400, 502)

    async def test_the_next_is_served_after_one_that_left(self, foreign: str) -> None:
        engine = UpstreamEngine(foreign)
        async with serving(engine) as ours:
            async with ours.connect() as peer:
                peer.request("POST", "/stream", {"messages": MESSAGES, "max_tokens": 200})
                await peer.until(b"data: ")
            await eventually(lambda: engine.running == 0)
            body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
            assert (await ours.ask("POST", "/complete", body)).status == 200


def ask_directly(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(f"{url}/v1/models") as models:
        model = json.load(models)["data"][0]["id"]
    content = json.dumps({"model": model, **body}).encode()
    fields = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", content, fields)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for module in ("torch", "transformers", "fastapi", "accelerate"):
        require(module)
    folder = save_tiny_model(tmp_path_factory.mktemp("foreign") / "tiny-llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", str(folder), "--device", "cpu",
         "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        for _ in range(600):
            assert process.poll() is None, "transformers serve has ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()

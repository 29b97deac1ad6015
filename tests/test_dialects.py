"""What holds in every provider's dialect alike, and what differs, side by side."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeModel
from serving import serving
from sockets import open_websocket

import completions
import dialects
import legacy
import messages
import responses
from engine import Engine

HI = [{"role": "user", "content": "Count."}]
BAD = {"not": {}}
LOOK = {"name": "look", "description": "See a city."}
OTHER = {"name": "other", "description": "Never mind."}
PARIS = {"const": {"city": "Paris"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 40},
    RESPONSES: {"input": HI, "max_output_tokens": 40},
    MESSAGES: {"messages": HI, "max_tokens": 40},
    "/complete": {"messages": HI, "max_tokens": 40},
}


class Recorder(FakeModel):
    """Keeps the chats that it was given."""

    def __init__(self) -> None:
        super().__init__(context=1000)
        self.chats: list[Any] = []

    def encode(self, prompt: Any) -> list[int]:
        self.chats.append(prompt)
        return super().encode(prompt)


def forced(route: str, schema: Any) -> dict[str, Any]:
    """Two tools, the second of which has to be called."""
    if route == CHAT:
        tools: Any = [
            {"type": "function", "function": {**OTHER, "parameters": PARIS}},
            {"type": "function", "function": {**LOOK, "parameters": schema}},
        ]
        return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    if route == RESPONSES:
        tools = [
            {"type": "function", **OTHER, "parameters": PARIS},
            {"type": "function", **LOOK, "parameters": schema},
        ]
        return {"tools": tools, "tool_choice": {"type": "function", "name": "look"}}
    tools = [{**OTHER, "input_schema": PARIS}, {**LOOK, "input_schema": schema}]
    return {"tools": tools, "tool_choice": {"type": "tool", "name": "look"}}


def formatted(route: str, schema: Any) -> dict[str, Any]:
    """A reply in words that fit a schema."""
    format = {"type": "json_schema", "name": "n", "schema": schema}
    if route == CHAT:
        return {"response_format": {"type": "json_schema", "json_schema": format}}
    if route == RESPONSES:
        return {"text": {"format": format}}
    if route == MESSAGES:
        return {"output_config": {"format": format}}
    return {"schema": schema}


WHERE = [
    (CHAT, formatted, "response_format.json_schema.schema"),
    (CHAT, forced, "tools[1].function.parameters"),
    (RESPONSES, formatted, "text.format.schema"),
    (RESPONSES, forced, "tools[1].parameters"),
    (MESSAGES, formatted, "output_config.format.schema"),
    (MESSAGES, forced, "tools[1].input_schema"),
    ("/complete", formatted, "schema"),
]


@pytest.mark.parametrize(("route", "asked", "where"), WHERE)
async def test_a_schema_that_can_t_be_followed_is_named_as_it_was_asked_for(
    route: str, asked: Any, where: str
) -> None:
    """By the model and by the engine that has none; before the head of a stream, too."""
    for engine in (Engine(FakeModel(context=1000)), None):
        async with serving(engine) as running:
            for streamed in ({}, {"stream": True}) if route != "/complete" else ({},):
                body = {**ASKS[route], **asked(route, BAD), **streamed}
                answer = await running.ask("POST", route, body)
                assert answer.status == 400
                error = answer.json()["error"]
                if route == MESSAGES:  # its envelope has no place for a name
                    assert where in error["message"]
                else:
                    assert error["field" if route == "/complete" else "param"] == where


class TestTheChosenFunction:
    """The model is told what it fills in; the reply is the arguments alone."""

    @pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
    async def test_is_described_to_the_model_and_counted(self, route: str) -> None:
        model = Recorder()
        async with serving(Engine(model)) as running:
            answer = await running.ask("POST", route, {**ASKS[route], **forced(route, PARIS)})
            assert answer.status == 200, answer.content
            ((system, user),) = model.chats
            counted = len(system["content"] + user["content"])
            if route == MESSAGES:
                count = await running.ask(
                    "POST", f"{route}/count_tokens", {**ASKS[route], **forced(route, PARIS)}
                )
                assert count.json() == {"input_tokens": counted}
        assert user == HI[0]
        assert system["role"] == "system"
        assert "look: See a city." in system["content"]
        assert json.dumps(PARIS) in system["content"]
        assert "other" not in system["content"]
        usage = answer.json()["usage"]
        assert counted in (usage.get("prompt_tokens"), usage.get("input_tokens"))
        assert b"Paris" in answer.content

    async def test_the_client_s_own_system_message_comes_first(self) -> None:
        model = Recorder()
        chat = [{"role": "system", "content": "Be brief."}, *HI]
        async with serving(Engine(model)) as running:
            asked = {**ASKS[CHAT], "messages": chat, **forced(CHAT, PARIS)}
            assert (await running.ask("POST", CHAT, asked)).status == 200
        ((system, user),) = model.chats
        assert system["content"].startswith("Be brief.\n\nCall the function look: See a city.")
        assert user == HI[0]

    @pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
    async def test_what_need_not_be_called_is_not_described(self, route: str) -> None:
        """Nor is a format: the prompt, and so the text, is that of a request without."""
        model = Recorder()
        tools = {"tools": forced(route, PARIS)["tools"]}
        async with serving(Engine(model)) as running:
            for more in (tools, formatted(route, PARIS)):
                answer = await running.ask("POST", route, {**ASKS[route], **more})
                assert answer.status == 200, answer.content
        assert model.chats == [HI, HI]

    @pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
    async def test_without_words(self, route: str) -> None:
        asked = forced(route, PARIS)
        for tool in asked["tools"]:
            tool.get("function", tool).pop("description")
        model = Recorder()
        async with serving(Engine(model)) as running:
            assert (await running.ask("POST", route, {**ASKS[route], **asked})).status == 200
        assert model.chats[0][0]["content"].startswith("Call the function look.\n")


@pytest.mark.parametrize("route", [CHAT, MESSAGES, "/complete"])
@pytest.mark.parametrize("turns", [1, 5000])
async def test_many_empty_messages_are_not_tokenized_on_the_event_loop(
    route: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template writes something around each: it is their number that takes time."""
    threads: list[threading.Thread] = []

    def encode(*_: Any) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    monkeypatch.setattr(FakeModel, "encode", encode)
    chat = [{"role": "user", "content": ""}] * turns
    async with serving(Engine(FakeModel())) as running:
        answer = await running.ask("POST", route, {**ASKS[route], "messages": chat})
    assert answer.status == 200, answer.content
    assert (threads == [threading.current_thread()]) == (turns == 1)


@pytest.mark.parametrize("route", ASKS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fault_of_our_own_has_the_dialect_s_envelope(
    route: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret internals")

    monkeypatch.setattr(FakeModel, "encode", broken)
    if route == "/complete" and streamed:
        route = "/stream"
    stream = {"stream": True} if streamed and route.startswith("/v1/") else {}
    async with serving(Engine(FakeModel())) as running, running.connect() as peer:
        body = {**ASKS.get(route, ASKS["/complete"]), **stream}
        answer = await peer.ask("POST", route, body)
        assert await peer.closed() == b""  # what state it left is not known
    assert answer.status == 500
    assert b"secret" not in answer.content
    expected: dict[str, Any] = {
        CHAT: {"type": "server_error", "param": None, "code": None},
        RESPONSES: {"type": "server_error", "param": None, "code": None},
        MESSAGES: {"type": "api_error"},
    }.get(route, {"type": "server_error", "field": None})
    expected = {"error": {"message": "internal error", **expected}}
    if route == MESSAGES:
        expected["type"] = "error"
    assert answer.json() == expected


def drawn() -> Iterator[tuple[str, str, list[str], list[str]]]:
    """The docstrings' bytes: method, path, the lines of a reply, and of one that fails."""
    modules = (dialects, completions, legacy, responses, messages)
    docs = "\n".join(module.__doc__ or "" for module in modules)
    sections = re.findall(r"^(GET|POST) (/\S+)\n((?:    .+\n)+)", docs, re.MULTILINE)
    for method, path, body in sections:
        good, bad = body.split("    or  ")
        lines = [line.strip() for line in good.splitlines()]
        failure = [line.strip() for line in bad.splitlines()]
        (said,) = [number for number, line in enumerate(lines) if '"Two"' in line][:1]
        yield method, path, lines, [*lines[: said + 1], *failure]


def fits(line: str, told: str) -> bool:
    return re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), told) is not None


class Word(FakeModel):
    """Says "Two" in one piece, as a real model would: it is one token."""

    def text(self, ids: Any) -> str:
        return "Two" if list(ids) == [0] else ""

    def encode(self, prompt: Any) -> list[int]:
        return [1]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("method", "path", "good", "bad"), list(drawn()))
async def test_the_docstrings_have_the_bytes(
    method: str, path: str, good: list[str], bad: list[str], fails: bool
) -> None:
    model = Word(script=lambda history: 0 if len(history) == 1 else 256)
    model.fail_decode = lambda: fails
    asked = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(
        path, {"messages": HI, "max_tokens": 9}
    )
    body = {**asked, **({"stream": True} if path.startswith("/v1/") else {})}
    async with serving(Engine(model)) as running, running.connect() as peer:
        if method == "GET":
            web = await open_websocket(peer)
            web.say(body)
            told = [json.dumps(await web.told()) for _ in range(2)]
        else:
            content = (await peer.ask(method, path, body)).content.decode()
            told = [line for line in content.split("\n") if line]
    lines = bad if fails else good
    told = [line.replace("the model failed on this request", "the model failed") for line in told]
    assert len(told) == len(lines)
    for line, other in zip(lines, told, strict=True):
        assert fits(line, other), (line, other)


def test_the_docstrings_have_every_dialect() -> None:
    assert [path for _, path, _, _ in drawn()] == [
        "/stream", "/ws", CHAT, "/v1/completions", RESPONSES, MESSAGES,
    ]  # fmt: skip


class TestAnyClient:
    """What is the same whoever asks: other methods, keys, versions."""

    @pytest.mark.parametrize("route", [CHAT, "/v1/completions", RESPONSES, MESSAGES])
    async def test_other_methods(self, route: str) -> None:
        origin = {"Origin": "http://app.example", "Access-Control-Request-Method": "POST"}
        async with serving(origins=("http://app.example",)) as running:
            for method in ("GET", "HEAD", "DELETE"):
                answer = await running.ask(method, route)
                assert answer.status == 405
                assert "POST" in (answer.fields.get("allow") or "")
                assert (answer.content == b"") == (method == "HEAD")
            asked = await running.ask("OPTIONS", route)
            preflight = await running.ask("OPTIONS", route, **origin)
            listed = await running.ask("HEAD", "/v1/models")
        assert (asked.status, preflight.status) == (204, 204)
        assert preflight.fields.get("access-control-allow-origin") == "http://app.example"
        assert (listed.status, listed.content) == (200, b"")

    @pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "secret", "anthropic-version": "1999-01-01"}, 200),
            ({"x-api-key": "secret", "anthropic-beta": "a,b"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ],
    )
    async def test_either_key_and_any_version(
        self, route: str, fields: dict[str, str], status: int
    ) -> None:
        async with serving(api_keys=("secret",)) as running:
            answer = await running.ask("POST", route, ASKS[route], **fields)
        assert answer.status == status

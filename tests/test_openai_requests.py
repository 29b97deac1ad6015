"""OpenAI's routes: what may be asked for, what the model reads of it, what is refused."""

import threading
from datetime import datetime
from typing import Any

import pytest
from chatting import ASK, CHAT, HI, NAMED, TEXT, TEXT_ASK, TOOL, USAGE, client, refused, whole
from fakes import FakeModel
from require import require
from serving import eventually, serving
from strict import strictly

import completions
from engine import Engine
from models import Served

openai = require("openai")
types = require("openai.types")
anthropic_types = require("anthropic.types")


class Recorder(FakeModel):
    """Keeps the chats that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Any] = []

    def encode(self, prompt: Any) -> list[int]:
        self.chats.append(prompt)
        return super().encode(prompt)


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def texts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
CALLED = '{"name": "f", "arguments": {"a": 1}}'
READ = [
    (HI, HI),
    ([turn("developer", "Be brief."), *HI], [turn("system", "Be brief."), *HI]),
    ([turn("system", texts("Be", "brief.")), *HI], [turn("system", "Be\nbrief."), *HI]),
    ([turn("user", texts("a", "b"), name="Ann")], [turn("user", "a\nb")]),
    ([*HI, turn("assistant", texts("One")), turn("user", "And?")],
     [*HI, turn("assistant", "One"), turn("user", "And?")]),
    ([*HI, turn("assistant", None, tool_calls=CALLS), turn("tool", "4", tool_call_id="c")],
     [*HI, turn("assistant", CALLED), turn("tool", "4")]),
    ([*HI, turn("assistant", "Well.", tool_calls=CALLS, refusal=None),
      turn("tool", texts("4"), tool_call_id="c"), turn("user", "And?")],
     [*HI, turn("assistant", f"Well.\n{CALLED}"), turn("tool", "4"), turn("user", "And?")]),
    ([*HI, turn("assistant", None, refusal="No."), turn("user", "And?")],
     [*HI, turn("assistant", "No."), turn("user", "And?")]),
    ([*HI, turn("assistant", [*texts("Hm."), {"type": "refusal", "refusal": "No."}],
                tool_calls=[])],
     [*HI, turn("assistant", "Hm.\nNo.")]),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "chat"), READ)
async def test_the_model_reads(messages: Any, chat: Any) -> None:
    model = Recorder()
    async with serving(Engine(model)) as running:
        answer = await running.ask("POST", CHAT, {**ASK, "messages": messages})
    assert answer.status == 200, answer.content
    assert model.chats == [chat]


IGNORED: dict[str, Any] = {
    "ignore_eos": True,
    "min_tokens": 3,
    "user": "u",
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "some_benchmark": [1],
    # Known, and asking for nothing.
    "n": 1,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "store": False,
    "service_tier": "auto",
    "modalities": ["text"],
    "reasoning_effort": None,
    "logprobs": None,
    "top_logprobs": 0,
    "tools": [],
    "stop": None,
    "stream_options": None,
}


async def test_ignored() -> None:
    async with serving() as running:
        plain = await whole(running)
        assert (await whole(running, **IGNORED)).choices == plain.choices
        for name, told in (("simulated", "simulated"), ("default", "default"), (None, "simulated")):
            assert (await whole(running, model=name)).model == told


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": 2**63}),
        ({"seed": 1, "top_p": 0}, {"seed": 1, "top_p": 1e-9}),
        ({"seed": 1, "top_p": 0.0}, {"seed": 1, "top_p": 1e-9}),
        ({"seed": 1, "top_k": -1}, {"seed": 1, "top_k": 0}),
        ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, {}),
    ],
    ids=str,
)
async def test_what_the_providers_accept(theirs: Any, ours: Any) -> None:
    """OpenAI's schema: a seed from -2**63, top_p from 0; vLLM's: top_k -1 for none."""
    async with serving(Engine(FakeModel())) as running:
        assert (await whole(running, **theirs)).choices == (await whole(running, **ours)).choices


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"type": "object"}, {"type": "object"}),
        ({"anyOf": [{"type": "object"}]}, {"anyOf": [{"type": "object"}]}),
        ({}, completions.NO_PARAMETERS),
        (None, completions.NO_PARAMETERS),
    ],
)
def test_arguments_are_an_object(parameters: Any, schema: Any) -> None:
    """Without a type a schema fits a string, whatever its properties."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    assert completions.Chat(Served()).parse(body).params.schema == schema


def test_one_system_message() -> None:
    """Many templates take no second one: what describes the function joins the client's own."""
    body = {"messages": [turn("system", "Be brief."), *HI], "tools": [TOOL], "tool_choice": NAMED}
    first, *rest = completions.Chat(Served()).parse(body).prompt
    assert first["content"].startswith("Be brief.\n\nCall the function look.")
    assert (first["role"], rest) == ("system", HI)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", [257, 10**6, 10**18])
async def test_more_tokens_than_the_context_holds(name: str, asked: int) -> None:
    """Field report 98, README of the checks: clamped, never refused."""
    async with serving(Engine(FakeModel(context=50))) as running:
        reply = await whole(running, **{"max_tokens": None, name: asked})
        unsaid = await whole(running, max_tokens=None)
    assert reply.usage.total_tokens == unsaid.usage.total_tokens == 50
    assert reply.choices[0].finish_reason == "length"


# The request's fields, and the field that is named; in chat.
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", True, [])),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    *(({"temperature": value}, "temperature") for value in (-1, -1e-9, 2.1, "0.7", True, 1e9)),
    *(({"top_p": value}, "top_p") for value in (-0.1, False, 1.1, "x")),
    *(({"top_k": value}, "top_k") for value in (-5, 10**9, 0.5)),
    *(({"seed": value}, "seed") for value in (-(2**63) - 1, 2**64, 0.5, "x")),
    *(({"stop": value}, "stop") for value in ("", [""], 5, [1], {}, ["a"] * 100)),
    *(({"n": value}, "n") for value in (0, 2, 128, "1", 1.5, True)),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"presence_penalty": 9}, "presence_penalty"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    *(({"logprobs": True, "top_logprobs": v}, "top_logprobs") for v in (-1, 21, True, "2")),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": 5}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": SCHEMA}, "response_format.json_schema.schema"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
     "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters.type"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "look"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL, TOOL], "tool_choice": "required"}, "tool_choice"),
    *(({"messages": value}, "messages") for value in (None, [], {}, "a", 5)),
    *(({"messages": [value]}, "messages[0]") for value in ("a", [], None)),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [turn("robot", "a")]}, "messages[0].role"),
    ({"messages": [turn("function", "a", name="f")]}, "messages[0].role"),
    ({"messages": [turn(5, "a")]}, "messages[0].role"),
    ({"messages": [turn("user", None)]}, "messages[0].content"),
    ({"messages": [turn("user", 5)]}, "messages[0].content"),
    ({"messages": [turn("user", [])]}, "messages[0].content"),
    ({"messages": [turn("assistant", None)]}, "messages[0].content"),
    ({"messages": [turn("user", [*texts("a"), IMAGE])]}, "messages[0].content[1]"),
    ({"messages": [turn("user", [{"type": "input_audio"}])]}, "messages[0].content[0]"),
    ({"messages": [turn("user", ["a"])]}, "messages[0].content[0]"),
    ({"messages": [turn("user", [{"type": "text"}])]}, "messages[0].content[0].text"),
    ({"messages": [turn("assistant", "a", audio={"id": "x"})]}, "messages[0].audio"),
    ({"messages": [turn("assistant", None, tool_calls=[])]}, "messages[0].content"),
    ({"messages": [turn("assistant", "a", tool_calls={})]}, "messages[0].tool_calls"),
    ({"messages": [turn("assistant", [{"type": "refusal"}])]}, "messages[0].content[0].refusal"),
    ({"messages": [turn("user", [{"type": "refusal", "refusal": "a"}])]}, "messages[0].content[0]"),
    ({"messages": [turn("assistant", None, tool_calls=[5])]},
     "messages[0].tool_calls[0]"),
    ({"messages": [turn("assistant", None, tool_calls=[{"type": "custom"}])]},
     "messages[0].tool_calls[0]"),
    ({"stream_options": 5}, "stream_options"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": "gpt-x"}, "model"),
]  # fmt: skip
REFUSED_TEXT: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": value}, "prompt")
      for value in (None, "", [], [""], [[]], {}, 5, ["a", 5], [True], [[1], ["a"]], ["a"] * 21)),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 2}, "n"),
    *(({"logprobs": value}, "logprobs") for value in (-1, 6, True, "2")),
    ({"echo": 1}, "echo"),
    ({"echo": True, "prompt": [1, 2]}, "echo"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logit_bias": {"5": 5}}, "logit_bias"),
]  # fmt: skip


class TestRefusals:
    """Field reports 85, 93, 95 to 97, 119, 127, 130: by name, before a stream begins."""

    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_by_name(self, route: str) -> None:
        table, right = (REFUSED, ASK) if route == CHAT else (REFUSED_TEXT, TEXT_ASK)
        async with serving(Engine(FakeModel())) as running:
            for fields, name in table:
                status, error = await refused(running, {**right, **fields}, route)
                assert (status, error["param"]) == (400, name), fields
                assert error["type"] == "invalid_request_error"
                assert error["message"]
            assert running.server.engine.running == 0
            await whole(running, route)

    async def test_usage_without_a_stream(self) -> None:
        """Field report 114."""
        async with serving() as running:
            answer = await running.ask("POST", CHAT, {**ASK, **USAGE})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "stream_options"

    async def test_codes(self) -> None:
        async with serving(Engine(FakeModel(context=20))) as running:
            _, model = await refused(running, {**ASK, "model": "gpt-x"})
            _, long = await refused(running, {**ASK, "messages": [turn("user", "a" * 21)]})
        assert model["code"] == "model_not_found"
        assert long["code"] == "context_length_exceeded"
        assert "21" in long["message"]
        assert "20" in long["message"]

    @pytest.mark.parametrize(
        ("content", "status"),
        [
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (b'"a"', 400),
            (b"null", 400),
            (b"{}", 400),
            (b'{"seed": 1, "seed": 2, "messages": [{"role": "user", "content": "x"}]}', 400),
            (b'{"messages": [{"role": "user", "content": "\\ud83d x"}]}', 400),
            (b'{"model": "\\ud83d", "messages": [{"role": "user", "content": "x"}]}', 400),
            (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', 400),
            (b'{"messages": ' + b"[" * 100_000, 400),
            (b" " * 10_000_000, 413),
            (b'{"prompt": "x", "input": "x", "user": 1e400}', 400),
        ],
        ids=lambda value: str(value)[:40],
    )
    async def test_contents(self, content: bytes, status: int) -> None:
        async with serving() as running:
            assert (await refused(running, content))[0] == status

    async def test_other_ways_to_be_wrong(self) -> None:
        async with serving(api_keys=("secret",)) as running:
            key = {"Authorization": "Bearer secret"}
            assert (await refused(running, ASK))[0] == 401
            assert (await refused(running, ASK, **key, Content_Type="text/plain"))[0] == 400
            assert (await refused(running, ASK, "/v1/nope", **key))[0] == 404
            assert (await refused(running, ASK, "/v1/models", **key))[0] == 405
            assert (await refused(running, ASK, **key, Origin="http://evil.example"))[0] == 403

    async def test_no_room(self) -> None:
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with serving(Engine(model, max_waiting=0)) as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True})
            await peer.until(b"role")
            await eventually(lambda: running.server.engine.running)
            status, error = await refused(running, ASK)
            model.step.release(1000)
        assert (status, error["type"]) == (429, "rate_limit_error")

    async def test_a_prompt_that_the_template_refuses(self) -> None:
        """Field report 32: not a 200 that fails."""

        class Refusing(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                raise ValueError("the chat template refuses these messages")

        async with serving(Engine(Refusing())) as running:
            status, error = await refused(running, ASK)
        assert (status, error["param"]) == (400, "messages")


class TestModels:
    async def test_openai(self) -> None:
        async with serving(aliases=("org/small", "*"), model="org/big") as running:
            listed = (await running.ask("GET", "/v1/models")).json()
            async with client(running) as sdk:
                names = [model.id async for model in sdk.models.list()]
                for name in (*names, "whatever"):
                    assert (await sdk.models.retrieve(name)).id == name
                    asked = {**ASK, "model": name}
                    assert (await sdk.chat.completions.create(**asked)).model == name
        assert names == ["org/big", "default", "org/small"]
        assert set(listed) == {"object", "data"}
        for model in listed["data"]:
            strictly(types.Model, model)

    async def test_anthropic(self) -> None:
        version = {"anthropic-version": "2023-06-01"}
        async with serving() as running:
            listed = (await running.ask("GET", "/v1/models", **version)).json()
            one = (await running.ask("GET", "/v1/models/default", **version)).json()
        assert set(listed) == {"data", "has_more", "first_id", "last_id"}
        assert [model["id"] for model in listed["data"]] == ["simulated", "default"]
        for model in (*listed["data"], one):
            created = datetime.fromisoformat(model["created_at"])  # JSON has no moments
            strictly(anthropic_types.ModelInfo, {**model, "created_at": created})

    async def test_not_served(self) -> None:
        async with serving() as running:
            for name in ("gpt-x", "a/b", ""):
                answer = await running.ask("GET", f"/v1/models/{name}")
                assert answer.status == 404
                assert answer.json()["error"]["code"] == "model_not_found"
                version = {"anthropic-version": "2023-06-01"}
                answer = await running.ask("GET", f"/v1/models/{name}", **version)
                assert answer.status == 404
                strictly(anthropic_types.shared.ErrorResponse, answer.json())

"""OpenAI's chat and completions as they are told: every chunk, every end, and the SDK as client."""

import asyncio
import json
import threading
from typing import Any

import pytest
from chatting import (
    ARGUMENTS,
    ASK,
    BODY,
    CHAT,
    FORCED,
    HI,
    NAMED,
    TEXT,
    TEXT_ASK,
    TOOL,
    USAGE,
    choices,
    chunks_of,
    client,
    of_sdk,
    reason_of,
    refused,
    saying,
    stream,
    text_of,
    whole,
)
from fakes import FakeModel
from require import require
from serving import eventually, serving

import http1
from delivery import Policy
from engine import Engine
from pieces import Banned
from simulated import SimulatedEngine

openai = require("openai")
pydantic = require("pydantic")


async def final_of(events: Any) -> Any:
    """The helper's accumulated reply: of one that was cut at its length it makes an error."""
    try:
        return await events.get_final_completion()
    except openai.LengthFinishReasonError as error:
        return error.completion


ENDS = [
    pytest.param("One, two.", {}, "One, two.", "stop", id="stop"),
    pytest.param("", {}, "", "stop", id="empty"),
    pytest.param("x", {}, "x", "stop", id="one token"),
    pytest.param("One, two.", {"max_tokens": 3}, "One", "length", id="max_tokens"),
    pytest.param("One, two.", {"max_tokens": 1}, "O", "length", id="max_tokens 1"),
    pytest.param("x", {"max_tokens": 2}, "x", "stop", id="end at the last token"),
    pytest.param("1,2,3,4", {"stop": "4"}, "1,2,3,", "stop", id="stop string"),
    pytest.param("1,2,3,4", {"stop": ["5", "3"]}, "1,2,", "stop", id="stop strings"),
    pytest.param("é 你 😀 \u2028", {}, "é 你 😀 \u2028", "stop", id="characters"),
]


@pytest.mark.parametrize(("said", "fields", "text", "reason"), ENDS)
class TestEveryEnd:
    """Field reports 107, 111, 112, 119."""

    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_streamed_and_whole(
        self, route: str, said: str, fields: Any, text: str, reason: str
    ) -> None:
        fields = {"max_tokens": 99, **fields}
        async with serving(saying(said)) as running:
            chunks = await stream(running, route, **fields)
            reply = await whole(running, route, **fields)
        assert (text_of(chunks), reason_of(chunks)) == (text, reason)
        (choice,) = reply.choices
        told = choice.text if route == TEXT else choice.message.content
        assert (told, choice.finish_reason, choice.index) == (text, reason, 0)

    async def test_to_the_sdk(self, said: str, fields: Any, text: str, reason: str) -> None:
        body = {"max_tokens": 99, **fields}
        async with serving(saying(said)) as running, client(running) as sdk:
            async with sdk.chat.completions.stream(**BODY, **body, **USAGE) as events:
                final = await final_of(events)
            plain = await sdk.chat.completions.create(**BODY, **body)
            older = await sdk.completions.create(model="default", prompt="Count.", **body)
        # The SDK makes null of an empty text.
        assert (final.choices[0].message.content or "") == plain.choices[0].message.content == text
        assert older.choices[0].text == text
        assert final.choices[0].finish_reason == plain.choices[0].finish_reason == reason
        assert final.usage == plain.usage
        assert plain.usage.prompt_tokens == len("Count.")
        assert plain.usage.total_tokens == len("Count.") + plain.usage.completion_tokens


class TestChunks:
    async def test_role_and_content(self) -> None:
        """Field report 117."""
        async with serving() as running:
            first, *rest = choices(await stream(running))
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all(set(choice["delta"]) <= {"content"} for choice in rest)
        assert rest[-1]["delta"] == {}

    async def test_usage(self) -> None:
        """Field report 114: after the finish, before `[DONE]`, and null in the others."""
        async with serving() as running:
            for route in (CHAT, TEXT):
                *chunks, last = await stream(running, route, **USAGE)
                plain = await stream(running, route)
                await stream(running, route, stream_options={"continuous_usage_stats": True})
                assert all(chunk["usage"] is None for chunk in chunks)
                assert reason_of(chunks) == "length"
                assert last["choices"] == []
                assert last["usage"] == {
                    "prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6,
                }  # fmt: skip
                assert not any("usage" in chunk for chunk in plain)

    async def test_ids_differ_between_replies(self) -> None:
        async with serving() as running:
            ids = {(await whole(running)).id, (await stream(running))[0]["id"]}
            older = {(await whole(running, TEXT)).id, (await stream(running, TEXT))[0]["id"]}
        assert len(ids | older) == 4
        assert all(id.startswith("chatcmpl-") for id in ids)
        assert all(id.startswith("cmpl-") for id in older)

    async def test_the_head_and_the_role_do_not_wait_for_the_first_token(self) -> None:
        async with serving(SimulatedEngine(first_delay_ms=3_600_000)) as running:
            async with running.connect() as peer:
                peer.request("POST", CHAT, {**ASK, "stream": True})
                await peer.until(b'"role"')

    async def test_the_body_ends_with_done(self) -> None:
        """OpenAI's SDK for Node reads on after `[DONE]` until the body ends."""
        async with serving() as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True})
            await peer.until(b"[DONE]")
            assert isinstance(await peer.event(), http1.End)

    async def test_http_1_0(self) -> None:
        content = json.dumps({**ASK, "stream": True}).encode()
        async with serving() as running, running.connect() as peer:
            head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n"
            peer.send(head.encode() + content)
            answer = await peer.closed()
        assert len(chunks_of(answer.partition(b"\r\n\r\n")[2])) == 7

    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_padding(self, route: str) -> None:
        """Every chunk that has text is longer by a random number."""
        fields: dict[str, Any] = {"max_tokens": 60}
        for pad in (False, True):
            async with serving(pad=pad) as running:
                plain = await stream(running, route, **fields)
                off = await stream(
                    running, route, stream_options={"include_obfuscation": False}, **fields
                )
                on = await stream(
                    running, route, stream_options={"include_obfuscation": True}, **fields
                )
            assert not any("obfuscation" in chunk for chunk in off)
            assert all("obfuscation" in chunk for chunk in (plain if pad else on))
            assert any("obfuscation" in chunk for chunk in plain) == pad
            assert len({len(chunk["obfuscation"]) for chunk in on}) > 5


class TestOneText:
    """The same seed, the same text: streamed, whole, in every dialect and natively."""

    async def test_simulated(self) -> None:
        prompt = {"prompt": "Count.", "max_tokens": 12, "seed": 7}
        async with serving() as running:
            native = (await running.ask("POST", "/complete", prompt)).json()["text"]
            fields: Any = {"max_tokens": 12}
            assert text_of(await stream(running, **fields)) == native
            assert text_of(await stream(running, TEXT, **fields)) == native
            assert (await whole(running, **fields)).choices[0].message.content == native
            assert (await whole(running, TEXT, **fields)).choices[0].text == native

    async def test_by_an_engine(self) -> None:
        sampling = {"max_tokens": 20, "seed": 3, "temperature": 0.9, "top_p": 0.8, "top_k": 9}
        async with serving(Engine(FakeModel())) as running:
            body = {"prompt": "Count.", **sampling}
            native = (await running.ask("POST", "/complete", body)).json()["text"]
            for route in (CHAT, TEXT):
                assert text_of(await stream(running, route, **sampling)) == native

    @pytest.mark.model
    async def test_by_the_real_model(self, real_model: Any) -> None:
        sampling = {"max_tokens": 8, "seed": 3, "temperature": 0.9, "top_p": 0.8}
        async with serving(Engine(real_model)) as running:
            native = await running.ask("POST", "/complete", {"messages": HI, **sampling})
            chunks = await stream(running, **sampling)
            ids = {"prompt": real_model.encode(HI), **sampling}
            reply = await whole(running, TEXT, **ids)
            beyond = await refused(running, {**TEXT_ASK, "prompt": [10**9]}, TEXT)
        assert text_of(chunks) == native.json()["text"] == reply.choices[0].text
        assert beyond[1]["param"] == "prompt"


class TestSdk:
    async def test_sync(self) -> None:
        def use(sdk: Any) -> Any:
            deltas = [
                chunk.choices[0].delta.content or ""
                for chunk in sdk.chat.completions.create(**ASK, stream=True)
            ]
            with sdk.chat.completions.stream(**ASK) as events:
                final = "".join(e.delta for e in events if e.type == "content.delta")
            plain = sdk.chat.completions.create(**ASK)
            older = sdk.completions.create(**TEXT_ASK)
            pieces = [c.choices[0].text for c in sdk.completions.create(**TEXT_ASK, stream=True)]
            return {
                "".join(deltas),
                "".join(pieces),
                final,
                plain.choices[0].message.content,
                older.choices[0].text,
            }

        async with serving() as running:
            texts = await of_sdk(running, use)
        assert len(texts) == 1
        assert len(texts.pop().split()) == 5

    async def test_async(self) -> None:
        async with serving() as running, client(running) as sdk:
            deltas = [
                chunk.choices[0].delta.content or ""
                async for chunk in await sdk.chat.completions.create(**ASK, stream=True)
            ]
            older = await sdk.completions.create(**TEXT_ASK)
        assert "".join(deltas) == older.choices[0].text

    async def test_events_of_the_helper(self) -> None:
        async with serving(saying("Hello")) as running, client(running) as sdk:
            async with sdk.chat.completions.stream(**BODY) as events:
                told = [event async for event in events]
        deltas = [event.delta for event in told if event.type == "content.delta"]
        assert deltas == ["", *"Hello"]
        assert told[-1].type == "content.done"

    async def test_parse(self) -> None:
        class City(pydantic.BaseModel):
            city: str

            @classmethod
            def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
                return {**super().model_json_schema(*args, **options), "const": {"city": "Paris"}}

        body: Any = {**BODY, "max_tokens": 99, "response_format": City}
        async with serving(Engine(FakeModel())) as running, client(running) as sdk:
            reply = await sdk.chat.completions.parse(**body)
            async with sdk.chat.completions.stream(**body) as events:
                final = await events.get_final_completion()
        assert reply.choices[0].message.parsed == City(city="Paris")
        assert final.choices[0].message.parsed == City(city="Paris")

    async def test_errors_have_their_class(self) -> None:
        async with serving() as running, client(running) as sdk:
            with pytest.raises(openai.BadRequestError) as bad:
                await sdk.chat.completions.create(**{**ASK, "max_tokens": 0}, stream=True)
            with pytest.raises(openai.BadRequestError) as model:
                await sdk.chat.completions.create(**{**ASK, "model": "gpt-x"})
            with pytest.raises(openai.NotFoundError):
                await sdk.models.retrieve("gpt-x")
        assert bad.value.param == "max_tokens"
        assert model.value.code == "model_not_found"

    async def test_keys(self) -> None:
        async with serving(api_keys=("secret",)) as running:
            async with client(running, api_key="secret") as sdk:
                await sdk.chat.completions.create(**ASK)
            async with client(running) as sdk:
                with pytest.raises(openai.AuthenticationError) as error:
                    await sdk.chat.completions.create(**ASK)
        assert error.value.code == "invalid_api_key"


class TestTools:
    @pytest.mark.parametrize("choice", ["required", NAMED])
    async def test_streamed(self, choice: Any) -> None:
        fields = {**FORCED, "tool_choice": choice, "max_tokens": 99}
        async with serving(Engine(FakeModel())) as running:
            chunks = await stream(running, **fields)
            (reply,) = (await whole(running, **fields)).choices
        first, *rest, last = [choice["delta"] for choice in choices(chunks)]
        assert (first["role"], first["content"], last) == ("assistant", None, {})
        (call,) = first["tool_calls"]
        assert (call["index"], call["type"]) == (0, "function")
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "look", "arguments": ""}
        deltas = [call for delta in rest for call in delta["tool_calls"]]
        assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in deltas)
        assert "".join(call["function"]["arguments"] for call in deltas) == ARGUMENTS
        assert reason_of(chunks) == reply.finish_reason == "tool_calls"
        (whole_call,) = reply.message.tool_calls
        assert reply.message.content is None
        assert (whole_call.function.name, whole_call.function.arguments) == ("look", ARGUMENTS)

    async def test_to_the_sdk(self) -> None:
        fields: Any = {**BODY, **FORCED, "max_tokens": 99}
        async with serving(Engine(FakeModel())) as running, client(running) as sdk:
            async with sdk.chat.completions.stream(**fields) as events:
                kinds = {event.type async for event in events}
                final = await events.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        (call,) = final.choices[0].message.tool_calls
        assert call.function.arguments == ARGUMENTS

    async def test_cut_short(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            chunks = await stream(running, **FORCED, max_tokens=4)
            stopped = await stream(running, **FORCED, max_tokens=99, stop="Par")
        assert reason_of(chunks) == "length"
        assert reason_of(stopped) == "stop"

    @pytest.mark.parametrize("choice", [None, "auto", "none"])
    async def test_not_chosen(self, choice: Any) -> None:
        async with serving() as running:
            reply = await whole(running, tools=[TOOL], tool_choice=choice)
        assert reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "length"

    @pytest.mark.parametrize(
        ("format", "text"),
        [
            ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}, "1"),
            ({"type": "text"}, None),
        ],
    )
    async def test_formats(self, format: Any, text: str | None) -> None:
        async with serving(Engine(FakeModel())) as running:
            reply = await whole(running, response_format=format, max_tokens=9)
        (choice,) = reply.choices
        assert choice.finish_reason == ("stop" if text else "length")
        assert text in (None, choice.message.content)

    @pytest.mark.model
    async def test_by_the_real_model(self, real_model: Any) -> None:
        parameters = {
            "type": "object",
            "properties": {"day": {"enum": ["Mon", "Tue"]}, "hot": {"type": "boolean"}},
            "required": ["day", "hot"],
            "additionalProperties": False,
        }
        function = {"name": "plan", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        async with serving(Engine(real_model)) as running:
            chunks = await stream(
                running, tools=tools, tool_choice="required", max_tokens=50, temperature=1
            )
        calls = [c for choice in choices(chunks) for c in choice["delta"].get("tool_calls", ())]
        arguments = json.loads("".join(call["function"]["arguments"] for call in calls))
        assert set(arguments) == {"day", "hot"}


class TestLogprobs:
    @pytest.mark.parametrize("top", [0, 2])
    async def test_chat(self, top: int) -> None:
        fields = {"logprobs": True, "top_logprobs": top, "max_tokens": 99}
        async with serving(saying("a你b")) as running:
            chunks = await stream(running, **fields)
            reply = await whole(running, **fields)
        parts = [choice["logprobs"] for choice in choices(chunks)]
        told = [token for part in parts if part for token in part["content"]]
        assert bytes(byte for token in told for byte in token["bytes"]).decode() == "a你b"
        assert all(len(token["top_logprobs"]) == top for token in told)
        content = reply.choices[0].logprobs.content
        assert [token.model_dump() for token in content] == told

    async def test_chat_without(self) -> None:
        async with serving(saying("ab")) as running:
            chunks = await stream(running, max_tokens=99)
            assert (await whole(running, max_tokens=99)).choices[0].logprobs is None
        assert all(choice["logprobs"] is None for choice in choices(chunks))

    @pytest.mark.parametrize("top", [0, 2])
    async def test_completions(self, top: int) -> None:
        fields = {"logprobs": top, "max_tokens": 99}
        async with serving(saying("xyz")) as running:
            chunks = await stream(running, TEXT, **fields)
            reply = await whole(running, TEXT, **fields)
        parts = [choice["logprobs"] for choice in choices(chunks) if choice["logprobs"]]
        logprobs = reply.choices[0].logprobs
        for name, values in logprobs.model_dump().items():
            assert [value for part in parts for value in part[name]] == values
        assert logprobs.tokens == ["x", "y", "z"]
        assert logprobs.text_offset == [0, 1, 2]
        assert [len(tokens) for tokens in logprobs.top_logprobs] == [top + 1] * 3

    async def test_beside_a_filter(self) -> None:
        """They would tell what is held back."""
        policy = Policy(banned=Banned(["two"]))
        async with serving(saying("One, two."), policy=policy) as running:
            status, error = await refused(running, {**BODY, "logprobs": True})
        assert (status, error["param"]) == (400, "logprobs")


class TestCompletions:
    async def test_several_prompts(self) -> None:
        """Field report 119: one choice a prompt, told as it comes, one reply to the client."""
        prompts = ["One.", "Two.", "Three."]
        async with serving(Engine(FakeModel(rows=2))) as running:
            alone = [await whole(running, TEXT, prompt=prompt) for prompt in prompts]
            together = await whole(running, TEXT, prompt=prompts)
            chunks = await stream(running, TEXT, prompt=prompts, **USAGE)
        texts = [reply.choices[0].text for reply in alone]
        assert [choice.text for choice in together.choices] == texts
        assert [choice.index for choice in together.choices] == [0, 1, 2]
        for index, text in enumerate(texts):
            assert (text_of(chunks, index), reason_of(chunks, index)) == (text, "length")
        assert chunks[-1]["usage"] == together.usage.model_dump(exclude_none=True)
        assert together.usage.completion_tokens == 15

    async def test_they_are_told_side_by_side(self) -> None:
        model = FakeModel()
        model.step = threading.Semaphore(0)
        engine = Engine(model)
        async with serving(engine) as running:
            fields: Any = {"prompt": ["One.", "Two."], "max_tokens": 20}
            streaming = asyncio.create_task(stream(running, TEXT, **fields))
            await eventually(lambda: engine.running + engine.waiting == 2)
            model.step.release(1000)
            chunks = await streaming
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order)

    @pytest.mark.parametrize("prompt", [[67, 111], [[67, 111]], "Co", ["Co"]])
    async def test_token_ids(self, prompt: Any) -> None:
        async with serving(Engine(FakeModel())) as running:
            reply = await whole(running, TEXT, prompt=prompt)
            same = await whole(running, TEXT, prompt="Co")
        assert (reply.choices, reply.usage) == (same.choices, same.usage)

    async def test_echo(self) -> None:
        async with serving() as running:
            plain = await whole(running, TEXT)
            reply = await whole(running, TEXT, echo=True)
            chunks = await stream(running, TEXT, echo=True)
            several = await stream(running, TEXT, echo=True, prompt=["Count.", "A."])
        text = "Count." + plain.choices[0].text
        assert reply.choices[0].text == text_of(chunks) == text_of(several) == text
        assert text_of(several, 1).startswith("A.")

    async def test_sixteen_tokens(self) -> None:
        """The reference's default."""
        async with serving() as running:
            reply = await whole(running, TEXT, max_tokens=None)
        assert reply.usage.completion_tokens == 16

    async def test_one_that_fails_ends_all(self) -> None:
        model = FakeModel()
        model.fail_prefill = lambda ids: bytes(ids) == b"Two."
        body: Any = {"prompt": ["One.", "Two."], "max_tokens": 200}
        async with serving(Engine(model)) as running:
            chunks = await stream(running, TEXT, **body)
            answer = await running.ask("POST", TEXT, {**TEXT_ASK, **body})
            await eventually(lambda: not running.server.engine.running)
        assert "error" in chunks[-1]
        assert answer.status == 500
        assert {e.generation.finish_reason for e in running.server.entries} <= {
            "error", "cancelled", "length"
        }  # fmt: skip

    async def test_leaving_ends_all(self) -> None:
        async with serving() as running, running.connect() as peer:
            body = {**TEXT_ASK, "prompt": ["a", "b"], "max_tokens": 10**6, "stream": True}
            peer.request("POST", TEXT, body)
            await peer.until(b"text")
            peer.close()
            await eventually(lambda: not running.server.engine.running)
            assert all(entry.client_left for entry in running.server.entries)

    async def test_no_room_for_all(self) -> None:
        """What was begun of a request that is refused stops."""
        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        async with serving(Engine(model, max_waiting=1)) as running:
            status, error = await refused(running, {**TEXT_ASK, "prompt": ["a"] * 5}, TEXT)
            assert (status, error["type"]) == (429, "rate_limit_error")
            model.step.release(1000)
            await eventually(lambda: not running.server.engine.running)


class TestFailures:
    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_keeps_what_came(self, route: str) -> None:
        """Field reports 33 and 55."""
        async with serving() as running:
            chunks = await stream(running, route, fail_after=3)
        error = chunks.pop()["error"]
        assert error["type"] == "server_error"
        assert error["message"] == "the simulated model failed, as asked"
        assert len(text_of(chunks).split()) == 3
        assert all(choice["finish_reason"] is None for choice in choices(chunks))

    async def test_to_the_sdk(self) -> None:
        texts = []
        async with serving() as running, client(running) as sdk:
            chunks = await sdk.chat.completions.create(
                **ASK, stream=True, extra_body={"fail_after": 3}
            )

            async def read() -> None:
                async for chunk in chunks:
                    texts.append(chunk.choices[0].delta.content or "")

            with pytest.raises(openai.APIError, match="failed, as asked"):
                await read()
            with pytest.raises(openai.InternalServerError):
                await sdk.chat.completions.create(**ASK, extra_body={"fail_after": 3})
        assert len("".join(texts).split()) == 3

    async def test_a_cut_is_no_end(self) -> None:
        async with serving() as running, client(running) as sdk:
            chunks = await sdk.chat.completions.create(
                **ASK, stream=True, extra_body={"truncate_after": 3}
            )
            with pytest.raises((openai.APIError, require("httpx").HTTPError)):
                async for _ in chunks:
                    pass

    async def test_shutdown(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True, "stall_after": 2})
            await peer.until(b'"content": " ')
            await running.server.stop(goodbye_s=1)
            await peer.until(b"error")
        error = chunks_of(peer.content, ended=False)[-1]["error"]
        assert (error["message"], error["code"]) == ("the server is shutting down", "unavailable")

    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_cancelled_by_its_id(self, route: str) -> None:
        right = ASK if route == CHAT else TEXT_ASK
        for streamed in (True, False):
            async with serving() as running, running.connect() as peer:
                peer.request("POST", route, {**right, "stream": streamed, "stall_after": 2})
                await eventually(lambda: running.server.engine.running)
                (entry,) = running.server.entries
                generation = entry.generation  # not before there is a piece to be told
                await eventually(lambda made=generation: made.completion_tokens)
                await running.ask("POST", f"/cancel/{entry.generation.id}")
                answer = await peer.answer()
            told = chunks_of(answer.content, False)[-1] if streamed else answer.json()
            assert told["error"]["message"] == "the reply was cancelled"
            assert answer.status == (200 if streamed else 400)

    @pytest.mark.parametrize("route", [CHAT, TEXT])
    async def test_a_filter(self, route: str) -> None:
        policy = Policy(banned=Banned(["two"]))
        async with serving(saying("One, two."), policy=policy) as running:
            chunks = await stream(running, route, max_tokens=99, **USAGE)
            (choice,) = (await whole(running, route, max_tokens=99)).choices
        assert reason_of(chunks) == choice.finish_reason == "content_filter"
        text = choice.text if route == TEXT else choice.message.content
        assert "two" not in text_of(chunks) + text

    async def test_leaving(self) -> None:
        """Field report 87."""
        async with serving() as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True, "max_tokens": 10**6})
            await peer.until(b"content")
            peer.close()
            await eventually(lambda: not running.server.engine.running)
            assert running.server.entries[0].client_left

    async def test_half_closing(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True, "max_tokens": 30})
            await peer.until(b"role")
            peer.half_close()
            await peer.until(b"[DONE]")

    async def test_half_closing_without_heartbeats(self) -> None:
        """The question whether a client is there is asked all the same."""
        policy = Policy(heartbeats=False)
        async with serving(policy=policy) as running, running.connect() as peer:
            peer.request("POST", CHAT, {**ASK, "stream": True, "max_tokens": 30})
            await peer.until(b"role")
            peer.half_close()
            await peer.until(b"[DONE]")

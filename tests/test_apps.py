"""Apps that are pointed at a server of one's own by its address and a model's name: a streamed
chat with each, as its users would have it."""

import asyncio
import os
import sys
import warnings
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from beating import HEARTBEATS, beating
from require import require
from serving import Running, serving

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]


def address(running: Running) -> str:
    return f"http://127.0.0.1:{running.port}/v1"


async def native(running: Running, **sampling: Any) -> str:
    """The text that they should get."""
    body = {"messages": MESSAGES, **sampling}
    return (await running.ask("POST", "/complete", body)).json()["text"]


async def test_langchain() -> None:
    langchain_openai = require("langchain_openai")
    async with serving() as running:
        chat = langchain_openai.ChatOpenAI(
            base_url=address(running),
            api_key="none",
            model="default",
            max_tokens=9,
            seed=7,
            stream_usage=True,
            max_retries=0,
        )
        whole = None
        async for chunk in chat.astream([("system", "Be brief."), ("user", "Count.")]):
            whole = chunk if whole is None else whole + chunk
        plain = await chat.ainvoke([("system", "Be brief."), ("user", "Count.")])
        text = await native(running, max_tokens=9, seed=7)
    assert whole.content == plain.content == text
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata == plain.usage_metadata
    assert whole.usage_metadata["output_tokens"] == 9
    assert whole.id.startswith("chatcmpl-") or whole.id.startswith("lc_run")


async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it fetches a list of prices when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = require("litellm")
        async with serving() as running:
            options: Any = {
                "model": "openai/default",
                "api_base": address(running),
                "api_key": "none",
                "messages": MESSAGES,
                "seed": 7,
                "max_tokens": 9,
                "num_retries": 0,
            }
            chunks = await litellm.acompletion(
                **options, stream=True, stream_options={"include_usage": True}
            )
            told = [chunk async for chunk in chunks]
            plain = await litellm.acompletion(**options)
            text = await native(running, max_tokens=9, seed=7)
        deltas = [c.choices[0].delta.content or "" for c in told if c.choices]
        reasons = [c.choices[0].finish_reason for c in told if c.choices]
        assert "".join(deltas) == plain.choices[0].message.content == text
        assert [reason for reason in reasons if reason] == ["length"]
        assert told[-1].usage.completion_tokens == 9


async def test_llm(tmp_path: Path) -> None:
    """The command, with the model declared as its documentation says."""
    require("llm")
    async with serving(aliases=("mine",)) as running:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: local\n  model_name: mine\n  api_base: {address(running)}\n"
        )
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", "local", "-s", "Be brief.", "Count."]
        options = ["-o", "max_tokens", "9", "-o", "seed", "7", "--no-log"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        text = await native(running, max_tokens=9, seed=7)
        routes = [entry.route for entry in running.server.entries]
    assert process.returncode == 0, errors.decode()
    assert out.decode().strip() == text
    assert routes[0] == "/v1/chat/completions"


async def test_through_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field reports 27 and 28: a heartbeat every 0.2 s, before the reply and in it."""
    langchain_openai = require("langchain_openai")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")

    async def of_langchain(running: Running) -> str:
        chat = langchain_openai.ChatOpenAI(
            base_url=address(running), api_key="none", model="default", max_tokens=2, max_retries=0
        )
        return "".join([chunk.content async for chunk in chat.astream("Count.")])

    async def of_litellm(running: Running) -> str:
        chunks = await litellm.acompletion(
            model="openai/default", api_base=address(running), api_key="none", messages=MESSAGES,
            max_tokens=2, num_retries=0, stream=True,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = require("litellm")
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(beating(mode)) for mode in HEARTBEATS]
            calls = [of(running) for running in servers for of in (of_langchain, of_litellm)]
            texts = await asyncio.gather(*calls)
    assert [len(text.split()) for text in texts] == [2] * 6

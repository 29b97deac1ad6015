"""The same two endpoints with FastAPI and its own server-sent events, on uvicorn.

    pip install -r requirements-compare.txt
    python compare/with_fastapi.py --port 0

A client that leaves a stream is FastAPI's business: it cancels the task that iterates the endpoint.
What it does not do is close that generator, so its `finally` would wait for the garbage collector:
hence the dependency, which is left with the request. For a buffered reply the client has to be
looked for after each word.

What a client sees of a generator that raises is a matter of luck: it runs in a task of its own,
behind two queues, so either the connection is cut, perhaps before the last word left a queue, or
the body ends properly and only the end marker lacks.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from schedule import FAILURE, Cut, Failed, Words, listen, parse_arguments

args = parse_arguments(__doc__.splitlines()[0])
words = Words(args)
app = FastAPI()


class Ask(BaseModel):
    """A request for a reply."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(pattern=r"\S")
    max_tokens: int = Field(100, ge=1)
    seed: int | None = None
    fail_after: int | None = None
    truncate_after: int | None = None


class Piece(BaseModel):
    """A part of the reply's text."""

    text: str


class Text(Piece):
    """All of its text, and why it ended."""

    finish_reason: str


async def reply_to(ask: Ask) -> AsyncIterator[AsyncGenerator[str, None]]:
    """Start a reply that ends with its request."""
    async with aclosing(words.reply(ask)) as reply:
        yield reply


Reply = Annotated[AsyncGenerator[str, None], Depends(reply_to)]


@app.post("/stream", response_class=EventSourceResponse)
async def stream(ask: Ask, reply: Reply) -> AsyncIterable[Piece | ServerSentEvent]:
    """Server-sent events, a word an event."""
    number = 0
    try:
        async for word in reply:
            if number == ask.truncate_after:
                raise Cut
            number += 1
            yield Piece(text=word)
    except Failed:
        yield ServerSentEvent(event="error", data=FAILURE)
        return
    yield ServerSentEvent(raw_data="[DONE]")


@app.post("/complete")
async def complete(ask: Ask, reply: Reply, request: Request) -> Any:
    """The whole reply as one JSON body."""
    text = ""
    try:
        async for word in reply:
            text += word
            if await request.is_disconnected():
                return Response(status_code=499)  # which nobody reads
    except Failed:
        raise HTTPException(500, FAILURE) from None
    answer = Text(text=text, finish_reason="length")
    if ask.truncate_after is not None and ask.truncate_after <= ask.max_tokens:
        return cut_short(answer.model_dump_json().encode())
    return answer


def cut_short(body: bytes) -> StreamingResponse:
    """Answer with half of a body."""

    async def half() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        raise Cut

    length = {"Content-Length": str(len(body))}
    return StreamingResponse(half(), media_type="application/json", headers=length)


@app.get("/health")
async def health() -> dict[str, Any]:
    """How many replies are under way."""
    return {"status": "ok", "running": words.running}


if __name__ == "__main__":
    with listen(args.port) as listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])

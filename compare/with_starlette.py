"""The same two endpoints with Starlette, on uvicorn (with uvloop and httptools where installed).

    pip install -r requirements-compare.txt
    python compare/with_starlette.py --port 0

A client that leaves a stream is Starlette's business: it cancels the generator. For a buffered
reply it has to be asked after each word.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import uvicorn
from schedule import FAILURE, Ask, Cut, Failed, Words, listen, parse_arguments
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

args = parse_arguments(__doc__.splitlines()[0])
words = Words(args)
EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def events(ask: Ask) -> AsyncIterator[str]:
    """Yield server-sent events, a word an event."""
    number = 0
    async with aclosing(words.reply(ask)) as reply:
        try:
            async for word in reply:
                if number == ask.truncate_after:
                    raise Cut
                number += 1
                yield f"data: {json.dumps({'text': word})}\n\n"
        except Failed:
            yield f"event: error\ndata: {json.dumps(FAILURE)}\n\n"
            return
    yield "data: [DONE]\n\n"


async def stream(request: Request) -> Response:
    """Answer with a stream."""
    try:
        ask = Ask.parse(await request.json())
    except ValueError as error:
        return JSONResponse({"error": {"message": str(error)}}, 400)
    return StreamingResponse(events(ask), headers=EVENT_STREAM)


async def complete(request: Request) -> Response:
    """Answer with the whole reply as one JSON body."""
    text = ""
    try:
        ask = Ask.parse(await request.json())
        async with aclosing(words.reply(ask)) as reply:
            async for word in reply:
                text += word
                if await request.is_disconnected():
                    return Response(status_code=499)  # which nobody reads
    except ValueError as error:
        return JSONResponse({"error": {"message": str(error)}}, 400)
    except Failed:
        return JSONResponse({"error": FAILURE}, 500)
    answer = JSONResponse({"text": text, "finish_reason": "length"})
    if ask.truncate_after is not None and ask.truncate_after <= ask.max_tokens:
        return StreamingResponse(half(bytes(answer.body)), headers=answer.headers)
    return answer


async def half(body: bytes) -> AsyncIterator[bytes]:
    """Yield half of a body, and break off."""
    yield body[: len(body) // 2]
    raise Cut


async def health(request: Request) -> Response:
    """Tell how many replies are under way."""
    return JSONResponse({"status": "ok", "running": words.running})


app = Starlette(
    routes=[
        Route("/stream", stream, methods=["POST"]),
        Route("/complete", complete, methods=["POST"]),
        Route("/health", health),
    ]
)

if __name__ == "__main__":
    with listen(args.port) as listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])

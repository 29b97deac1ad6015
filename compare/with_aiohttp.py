"""The same two endpoints with aiohttp.

    pip install -r requirements-compare.txt
    python compare/with_aiohttp.py --port 0

With `handler_cancellation` aiohttp cancels the handler of a client that leaves, on both routes.
"""

import json
from contextlib import aclosing

from aiohttp import web
from schedule import FAILURE, Ask, Failed, Words, listen, parse_arguments

args = parse_arguments(__doc__.splitlines()[0])
words = Words(args)
routes = web.RouteTableDef()
EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def parse(request: web.Request) -> Ask:
    """Return what a request asks for; else it is answered 400."""
    try:
        return Ask.parse(await request.json())
    except ValueError as error:
        raise web.HTTPBadRequest(text=json.dumps({"error": {"message": str(error)}})) from error


def cut(request: web.Request) -> None:
    """Break the connection, as `truncate_after` asked."""
    if request.transport is not None:
        request.transport.abort()


@routes.post("/stream")
async def stream(request: web.Request) -> web.StreamResponse:
    """Answer with server-sent events, a word an event."""
    ask = await parse(request)
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    number = 0
    async with aclosing(words.reply(ask)) as reply:
        try:
            async for word in reply:
                if number == ask.truncate_after:
                    cut(request)
                    return response
                number += 1
                await response.write(f"data: {json.dumps({'text': word})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        except Failed:
            await response.write(f"event: error\ndata: {json.dumps(FAILURE)}\n\n".encode())
    return response


@routes.post("/complete")
async def complete(request: web.Request) -> web.StreamResponse:
    """Answer with the whole reply as one JSON body."""
    ask = await parse(request)
    try:
        async with aclosing(words.reply(ask)) as reply:
            text = "".join([word async for word in reply])
    except Failed:
        return web.json_response({"error": FAILURE}, status=500)
    answer = {"text": text, "finish_reason": "length"}
    if ask.truncate_after is not None and ask.truncate_after <= ask.max_tokens:
        return await cut_short(request, json.dumps(answer).encode())
    return web.json_response(answer)


async def cut_short(request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer with half of a body, and break the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    cut(request)
    return response


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """Tell how many replies are under way."""
    return web.json_response({"status": "ok", "running": words.running})


if __name__ == "__main__":
    app = web.Application()
    app.add_routes(routes)
    web.run_app(app, sock=listen(args.port), print=None, access_log=None, handler_cancellation=True)

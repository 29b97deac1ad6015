"""A real nginx between the server and its clients, as most deployments have one."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel
from require import require_program
from serving import Running, eventually, serving

import client
import server
from engine import Engine

# nginx as it comes, but for HTTP/1.1 and the upgrade: responses are buffered unless one says no.
CONFIGURATION = """
{user} worker_processes 1; daemon off; pid nginx.pid; error_log stderr warn;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u;
  scgi_temp_path s;
  map $http_upgrade $connection_upgrade {{ default upgrade; "" ""; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      proxy_http_version {version};
      proxy_set_header Host $http_host;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
    location /file {{ root {folder}; default_type application/json; }}
  }}
}}
"""


@asynccontextmanager
async def nginx(running: Running, folder: Path, version: str = "1.1") -> AsyncIterator[int]:
    """nginx in front of a server; its port."""
    program = require_program("nginx")
    with server.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    text = CONFIGURATION.format(
        user="user root;" if os.geteuid() == 0 else "",
        port=port,
        upstream=running.port,
        version=version,
        folder=folder / "www",
    )
    (folder / "nginx.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        program,
        "-p",
        str(folder),
        "-e",
        "stderr",
        "-c",
        "nginx.conf",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: _listens(port), 20)
        yield port
    finally:
        process.terminate()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def stepped() -> tuple[FakeModel, Engine]:
    model = FakeModel(rows=2, context=4096)
    model.step = threading.Semaphore(0)
    return model, Engine(model)


REQUEST = {"prompt": "a", "max_tokens": 12, "seed": 1}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_piece_arrives_before_the_next_is_made(tmp_path: Path, version: str) -> None:
    """`X-Accel-Buffering: no` keeps nginx from holding the stream, in either version."""
    model, engine = stepped()
    async with serving(engine) as running, nginx(running, tmp_path, version) as port:
        async with running.connect(port=port) as peer:
            peer.request("POST", "/stream", REQUEST)
            for count in range(1, 4):
                model.step.release()
                while peer.content.count(b"text") < count:
                    await peer.event()
            assert len(model.calls) <= 4
            model.step.release(100)
            await peer.until(b"[DONE]")


@pytest.mark.parametrize("route", ["/stream", "/complete"])
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_who_leaves_nginx_leaves_the_server(tmp_path: Path, route: str, leave: str) -> None:
    model, engine = stepped()
    async with serving(engine) as running, nginx(running, tmp_path) as port:
        async with running.connect(port=port) as peer:
            peer.request("POST", route, {**REQUEST, "max_tokens": 2000})
            await eventually(lambda: len(model.calls) == 1)
            getattr(peer, leave)()
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left, 20)
        model.step.release(100)
        await eventually(lambda: entry.generation.finish_reason)
        assert entry.generation.completion_tokens == 0


@pytest.mark.parametrize("route", ["stream", "complete", "ws"])
async def test_the_measuring_client_through_nginx(tmp_path: Path, route: str) -> None:
    async with serving() as running, nginx(running, tmp_path) as port:
        direct = await ask(running.port, route)
        through = await ask(port, route)
    assert through.complete
    assert through.text == direct.text
    if route == "ws":
        assert through.received.framing == direct.received.framing


async def ask(port: int, route: str) -> Any:
    return await client.ask(f"http://127.0.0.1:{port}/{route}", REQUEST)


async def test_the_measuring_client_on_a_file_of_nginx_s_own(tmp_path: Path) -> None:
    """A response that the project had no hand in: its length, its fields, its bytes."""
    (tmp_path / "www" / "file").mkdir(parents=True)
    (tmp_path / "www" / "file" / "complete").write_text('{"text": "from nginx"}')
    async with serving() as running, nginx(running, tmp_path) as port:
        options = client.Options(method="GET", mode=client.Mode.JSON)
        reply = await client.ask(f"http://127.0.0.1:{port}/file/complete", {}, options)
    assert reply.text == "from nginx"
    assert ("Server", "nginx") in [(name, value[:5]) for name, value in reply.fields]
    assert reply.received.payload == len('{"text": "from nginx"}')


async def test_a_half_closed_client_is_nginx_s_to_judge(tmp_path: Path) -> None:
    """nginx takes end-of-file for gone (499) and closes upstream: the stop law holds."""
    model, engine = stepped()
    async with serving(engine) as running, nginx(running, tmp_path) as port:
        async with running.connect(port=port) as peer:
            peer.request("POST", "/stream", {**REQUEST, "max_tokens": 2000})
            await eventually(lambda: len(model.calls) == 1)
            peer.half_close()
            (entry,) = running.server.entries
            await eventually(lambda: entry.client_left, 20)
            await asyncio.sleep(0)

"""Real gateways in front of the server: how they are configured, started and stopped.

    client -- nginx, haproxy, caddy, apache, varnish -- server.py

`proxy.py` buffers on purpose and shows why a stream arrives in one burst; here are the programs
that do it to people. Each `Hop` is a program and the shortest configuration that matters for
streams, and `running(hop, upstream)` starts one on a free port of this machine:

    async with running(nginx(*HTTP_1_1), "http://127.0.0.1:8765") as url: ...

It runs without privileges (as `nobody` when we are root), out of a folder of its own that is gone
afterwards, and is stopped by its process id. A program that is not installed raises
`NotInstalled`: measurements then have a row that says so.

To put one in front of a server of your own, take the configuration from here: PORT is where it
listens, UPSTREAM the server's host and port, FOLDER a folder that it may write to. The directives
that decide about streams have a comment each.

Not here: what is measured through them (`hop_experiments.py`).
Read next: `hop_experiments.py`.
"""

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# Varnish compiles its configuration first, which takes a second or several.
START_S = 30.0
STOP_S = 5.0
POLL_S = 0.01
# Where distributions keep servers, which is not on everybody's path.
PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"


class HopError(Exception):
    """A gateway did not start; the message says why in one line."""


class NotInstalled(HopError):
    """The program is not on this machine."""


@dataclass(frozen=True)
class Hop:
    """One gateway: a program, how it is called, and what its configuration says.

    In the arguments and the configuration PORT, UPSTREAM, FOLDER and FILE (the configuration's
    own path) are filled in when it is started.
    """

    program: str
    arguments: tuple[str, ...]
    configuration: str

    @property
    def path(self) -> str:
        """Where the program is. Raises NotInstalled."""
        found = shutil.which(self.program, path=PLACES)
        if found is None:
            raise NotInstalled(f"{self.program} is not installed")
        return found


# nginx

NGINX = """
worker_processes 1; daemon off; pid nginx.pid; error_log stderr crit;
events { worker_connections 256; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
SERVERS
}
"""
NGINX_SERVER = """
  map $http_upgrade $connection_upgrade { default upgrade; "" ""; }
  server {
    listen 127.0.0.1:PORT;
    location / {
      proxy_pass http://UPSTREAM;
DIRECTIVES
    }
  }
"""

# nginx asks upstream in HTTP/1.0 unless told otherwise: the response then has no chunks and ends
# with the connection. WebSockets need 1.1, and both upgrade fields.
HTTP_1_1 = (
    "proxy_http_version 1.1;",
    "proxy_set_header Host $http_host;",
    "proxy_set_header Upgrade $http_upgrade;",
    "proxy_set_header Connection $connection_upgrade;",
)
# Without this, nginx obeys the `X-Accel-Buffering: no` that every stream of this server carries:
# with it, it does what it does to servers that do not send the field.
WITHOUT_FIELD = ("proxy_ignore_headers X-Accel-Buffering;",)
UNBUFFERED = ("proxy_buffering off;",)  # for every response, whatever its fields say
GZIP = ("gzip on;", "gzip_proxied any;", "gzip_types text/event-stream;")


def nginx(*directives: str) -> Hop:
    """Return nginx with these directives; without any it is as shipped."""
    lines = "\n".join(f"      {directive}" for directive in directives)
    return nginx_serving(NGINX_SERVER.replace("DIRECTIVES", lines))


def nginx_serving(servers: str) -> Hop:
    """Return nginx with these blocks of its configuration, of which one listens on PORT."""
    arguments = ("-p", "FOLDER", "-e", "stderr", "-c", "FILE")
    return Hop("nginx", arguments, NGINX.replace("SERVERS", servers))


# haproxy

HAPROXY = """
global
  maxconn 200
defaults
  mode http
  timeout connect 5s
  timeout client 60s    # of silence: above the server's --heartbeat
  timeout server 60s    # likewise
  timeout tunnel 1h     # a WebSocket's
OPTIONS
listen streaming
  bind 127.0.0.1:PORT
  server upstream UPSTREAM
"""


def haproxy(*options: str) -> Hop:
    """Return haproxy with these lines among its defaults."""
    lines = "\n".join(f"  {option}" for option in options)
    return Hop("haproxy", ("-db", "-f", "FILE"), HAPROXY.replace("OPTIONS", lines))


# caddy

CADDY = """
{
  admin off
  auto_https off
  storage file_system FOLDER
}
http://:PORT {
  bind 127.0.0.1
DIRECTIVES
  reverse_proxy UPSTREAM    # sends text/event-stream on at once, anything else in blocks
}
"""


def caddy(*directives: str) -> Hop:
    """Return caddy with these directives for its site."""
    lines = "\n".join(f"  {directive}" for directive in directives)
    arguments = ("run", "--config", "FILE", "--adapter", "caddyfile")
    return Hop("caddy", arguments, CADDY.replace("DIRECTIVES", lines))


# Apache, with the modules where Debian has them

APACHE = """
ServerRoot FOLDER
DefaultRuntimeDir FOLDER
PidFile apache.pid
ErrorLog apache.log
LogLevel crit
ServerName 127.0.0.1
Listen 127.0.0.1:PORT
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule proxy_module /usr/lib/apache2/modules/mod_proxy.so
LoadModule proxy_http_module /usr/lib/apache2/modules/mod_proxy_http.so
DIRECTIVES
ProxyPass / http://UPSTREAM/ OPTIONS
"""
DEFLATE = (
    "LoadModule filter_module /usr/lib/apache2/modules/mod_filter.so",
    "LoadModule deflate_module /usr/lib/apache2/modules/mod_deflate.so",
    "AddOutputFilterByType DEFLATE text/event-stream",
)


def apache(*directives: str, options: str = "") -> Hop:
    """Return Apache's mod_proxy_http with these directives, and options of `ProxyPass`."""
    text = APACHE.replace("DIRECTIVES", "\n".join(directives)).replace("OPTIONS", options)
    return Hop("apache2", ("-f", "FILE", "-D", "FOREGROUND"), text)


# varnish

VARNISH = """
vcl 4.1;
backend default { .host = "UPSTREAM_HOST"; .port = "UPSTREAM_PORT"; }
sub vcl_recv { return (pass); }    # nothing is cached
sub vcl_backend_response { set beresp.do_stream = CHOICE; }
"""


def varnish(stream: bool) -> Hop:
    """Return varnish; it streams unless `do_stream` is turned off."""
    arguments = (
        *("-n", "FOLDER/varnish", "-j", "none", "-F"),
        *("-a", "127.0.0.1:PORT", "-f", "FILE", "-s", "malloc,32m"),
    )
    return Hop("varnishd", arguments, VARNISH.replace("CHOICE", "true" if stream else "false"))


# Starting and stopping


@asynccontextmanager
async def running(hop: Hop, upstream: str) -> AsyncIterator[str]:
    """Start a gateway in front of `upstream` and give its URL; stop it in the end.

    Raises NotInstalled, or HopError with the program's own last words.
    """
    path = hop.path
    with tempfile.TemporaryDirectory(prefix="hop-") as folder:
        port = _free_port()
        names = _names(folder, port, upstream)
        account = _prepare(folder, _filled(hop.configuration, names))
        process = await asyncio.create_subprocess_exec(
            *(path, *(_filled(argument, names) for argument in hop.arguments)),
            cwd=folder,
            env={"PATH": PLACES, "HOME": folder},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that what it starts can be found, and Ctrl-C is ours alone
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=account and [],
        )
        words: list[str] = []
        listening = asyncio.create_task(_listen(process, words))
        try:
            await _started(process, port, words)
            yield f"http://127.0.0.1:{port}"
        finally:
            await _stop(process)
            await listening


def _names(folder: str, port: int, upstream: str) -> dict[str, str]:
    parts = urlsplit(upstream)
    return {
        "UPSTREAM": parts.netloc,
        "UPSTREAM_HOST": str(parts.hostname),
        "UPSTREAM_PORT": str(parts.port),
        "PORT": str(port),
        "FOLDER": folder,
        "FILE": f"{folder}/configuration",
    }


def _filled(text: str, names: dict[str, str]) -> str:
    words = r"\b(" + "|".join(names) + r")\b"
    return re.sub(words, lambda found: names[found[0]], text)


def _free_port() -> int:
    """Return a port that is free now: none of these programs takes port 0 and tells which."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _prepare(folder: str, configuration: str) -> pwd.struct_passwd | None:
    """Write the configuration; give the account to run under, None for our own.

    What root starts is nobody's, and so is its folder.
    """
    file = Path(folder, "configuration")
    file.write_text(configuration, encoding="utf-8")
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    for path in (folder, file):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    return nobody


async def _listen(process: asyncio.subprocess.Process, words: list[str]) -> None:
    """Keep the last line that a process says."""
    assert process.stderr is not None
    async for line in process.stderr:
        words[:] = [line.decode(errors="replace").strip()]


async def _started(process: asyncio.subprocess.Process, port: int, words: list[str]) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await _accepts(port):
                if process.returncode is not None:
                    raise HopError(f"it did not start: {' '.join(words) or 'it gave no reason'}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise HopError(f"it did not listen within {START_S:g} s") from None


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.transport.abort()
    return True


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process and what it has started."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):  # its session is its process group, too
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()

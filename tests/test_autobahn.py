"""Autobahn|Testsuite against the WebSocket server and client: every case OK, in both roles.

The suite is Python 2 code. It is taken from the path in AUTOBAHN (the program `wstest`), from PATH,
or built once into the user's cache with the Python 2.7 of pyenv; where there is none, the tests
are skipped.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import venv
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITE = "autobahntestsuite==25.10.1"
PYTHON_2 = "versions/2.7.18/bin/python2.7"

# Without 12 and 13, which are about compression.
CASES = ["1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "9.*", "10.*"]
CASE_COUNT = 301

# About 12 s are usual: several cases wait for a second.
TIME_LIMIT_S = 60


def build_suite():
    """Return the path of `wstest`, installed into the cache if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / SUITE.replace("==", "-")
    wstest = folder / "python2" / "bin" / "wstest"
    if wstest.exists():
        return wstest
    python_2 = find_python_2()
    try:
        # The last releases of virtualenv that can make an environment for Python 2.
        tool = folder / "virtualenv"
        venv.create(tool, with_pip=True)
        run(tool / "bin" / "pip", "install", "virtualenv<20.22")
        run(tool / "bin" / "virtualenv", "-p", python_2, folder / "python2")
        run(folder / "python2" / "bin" / "pip", "install", SUITE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Autobahn|Testsuite could not be installed: {error}")
    return wstest


def find_python_2():
    if not shutil.which("pyenv"):
        pytest.skip("no Python 2.7 for Autobahn|Testsuite: set AUTOBAHN or install pyenv's 2.7.18")
    root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout
    python_2 = Path(root.strip()) / PYTHON_2
    if not python_2.exists():
        pytest.skip("no Python 2.7 for Autobahn|Testsuite: pyenv install 2.7.18")
    return python_2


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wstest():
    return os.environ.get("AUTOBAHN") or shutil.which("wstest") or build_suite()


@asynccontextmanager
async def started(*command, **options):
    """Run a program for as long as the block lasts."""
    process = await asyncio.create_subprocess_exec(*map(str, command), **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def finish(*command, **options):
    """Run a program to its end and return its exit status."""
    async with asyncio.timeout(TIME_LIMIT_S), started(*command, **options) as process:
        return await process.wait()


def write_spec(folder, **role):
    spec = {"outdir": str(folder), "cases": CASES, "exclude-cases": [], "exclude-agent-cases": {}}
    path = folder / "spec.json"
    path.write_text(json.dumps(spec | role))
    return path


def check_report(folder, agent):
    verdicts = json.loads((folder / "index.json").read_text())[agent]
    wrong = {
        case: (verdict["behavior"], verdict["behaviorClose"])
        for case, verdict in verdicts.items()
        if not {verdict["behavior"], verdict["behaviorClose"]} <= {"OK", "INFORMATIONAL"}
    }
    assert not wrong, str(wrong)
    assert len(verdicts) == CASE_COUNT


async def test_both_roles(wstest, tmp_path):
    """At the same time: most of what either does is waiting."""
    server, client = tmp_path / "server", tmp_path / "client"
    server.mkdir()
    client.mkdir()
    await asyncio.gather(as_server(wstest, server), as_client(wstest, client))
    check_report(server, "server")
    check_report(client, "client")


async def as_server(wstest, folder):
    conformance_server = (sys.executable, HERE / "conformance_server.py", "--port", 0)
    async with started(*conformance_server, stdout=subprocess.PIPE) as server:
        port = int(await server.stdout.readline())
        target = {"agent": "server", "url": f"ws://127.0.0.1:{port}/ws-echo"}
        spec = write_spec(folder, servers=[target], options={"failByDrop": False})
        command = (wstest, "-m", "fuzzingclient", "-s", spec)
        assert await finish(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


async def as_client(wstest, folder):
    port = unused_port()
    url = f"ws://127.0.0.1:{port}"
    spec = write_spec(folder, url=url)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    async with started(wstest, "-m", "fuzzingserver", "-s", spec, **quiet):
        await until_listening(port)
        assert await finish(sys.executable, HERE / "conformance_client.py", url, "client") == 0


def unused_port():
    """Return a port that was free a moment ago: the suite cannot choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def until_listening(port):
    """Wait for a server that says nothing when it is ready."""
    async with asyncio.timeout(TIME_LIMIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return

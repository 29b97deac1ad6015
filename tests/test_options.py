"""What the flags say, and what is said of flags that can't be used."""

import subprocess
import sys
from pathlib import Path

import pytest

import server
from options import make_engine, make_options, parse_arguments


class TestFlags:
    """What the command line says reaches those who act on it."""

    async def test_all(self) -> None:
        flags = ["--model", "simulated", "--alias", "a", "--alias", "b", "--pad"]
        args = parse_arguments([*flags, "--sse-heartbeat", "event"])
        options = make_options(args)
        served = options.served(make_engine(args))
        assert served.names == ["simulated", "default", "a", "b"]
        assert (served.pad, served.heartbeat_events, options.policy.heartbeats) == (
            True, True, True,
        )  # fmt: skip

    @pytest.mark.parametrize(("mode", "on"), [("comment", True), ("off", False)])
    async def test_heartbeats(self, mode: str, on: bool) -> None:
        options = make_options(parse_arguments(["--sse-heartbeat", mode]))
        assert (options.policy.heartbeats, options.heartbeat_events) == (on, False)

    async def test_no_such_heartbeat(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse_arguments(["--sse-heartbeat", "loud"])
        assert "--sse-heartbeat" in capsys.readouterr().err


class TestRefused:
    @pytest.mark.parametrize(
        "url",
        ["127.0.0.1:8766", "ftp://h", "http://", "http://h/x", "http://h; img-src *", "http://a@b"],
    )
    def test_no_proxy(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse_arguments(["--page-proxy", url])
        assert "--page-proxy" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            "--port 70000", "--port -1", "--port x", "--port 5_0", "--host 203.0.113.1",
            "--host no.such.name.invalid", "--cert /does/not/exist", "--banned /does/not/exist",
            "--heartbeat nan", "--heartbeat -1", "--stall inf", "--delay-ms x", "--rows 0",
            "--queue -1", "--slow-client x", "--connections 1.5", "--nonsense",
        ],
    )  # fmt: skip
    def test_bad_arguments(self, arguments: str) -> None:
        port = [] if "--port" in arguments else ["--port", "0"]
        command = [sys.executable, "-W", "error", "server.py", "--model", "simulated", *port]
        done = subprocess.run(
            command + arguments.split(), capture_output=True, timeout=20, check=False,
            cwd=Path(server.__file__).parent,
        )  # fmt: skip
        assert done.returncode not in (0, None)
        assert done.stdout == b""
        assert b"Traceback" not in done.stderr
        assert done.stderr.strip()

    @pytest.mark.parametrize("flag", ["--banned", "--cert"])
    @pytest.mark.parametrize("content", [None, b"\xff\xfe"])
    def test_a_file_that_cannot_be_used_is_named_with_its_flag(
        self, flag: str, content: bytes | None, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        path = tmp_path / "file"
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["server.py", "--model", "simulated", flag, str(path)])
        assert server.main() == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"{flag} {path}")

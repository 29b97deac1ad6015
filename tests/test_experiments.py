"""The experiments, against the simulated server and a model of bytes; a few on the real model."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from require import require

from measures import Event, Mode, Reply

require("tqdm")
from benches import FastBench, cells  # noqa: E402

import bench as bench_module  # noqa: E402
import experiments  # noqa: E402
import figures  # noqa: E402
import report  # noqa: E402
from bench import HERE, Bench, ExperimentError, run_experiment, tell  # noqa: E402
from figures import Staircase  # noqa: E402
from report import Finding  # noqa: E402

# One event loop, one bench: servers are shared as in a run.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench():
    async with FastBench() as bench:
        yield bench


class Relay:
    """A relay that counts what passes through it to the client, connection by connection."""

    def __init__(self):
        self.counts = []
        self._tasks = set()
        self._listener = None

    async def before(self, url):
        self._upstream = urlsplit(url)
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return "http://{}:{}".format(*self._listener.sockets[0].getsockname())

    async def close(self):
        self._listener.close()
        await asyncio.gather(*self._tasks)

    async def _accept(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        index = len(self.counts)
        self.counts.append(0)
        parts = self._upstream
        from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
        sending = asyncio.create_task(self._pass(reader, to_server))
        async for data in self._read(from_server):
            self.counts[index] += len(data)
            writer.write(data)
        writer.close()
        await sending
        to_server.close()

    async def _pass(self, reader, writer):
        async for data in self._read(reader):
            writer.write(data)
        with contextlib.suppress(OSError):
            writer.write_eof()

    @staticmethod
    async def _read(reader):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                yield data


class TestThreeWays:
    async def test_the_text_is_the_same_and_the_streams_are_larger(self, bench):
        finding = await experiments.three_ways(bench)
        assert "all ways: 2 of 2 prompts" in finding.notes[0]
        sizes = [int(size.replace(",", "")) for (size,) in cells(finding, "bytes on the wire")]
        whole, chunked, to_the_close, websocket = sizes
        assert whole < websocket < to_the_close < chunked
        steps = [len(points) for points in finding.figures[0].lines.values()]
        assert steps == [1, 100, 100, 100]

    async def test_bytes_are_those_that_the_socket_gave(self):
        relay = Relay()
        async with FastBench(relay) as bench:
            finding = await experiments.three_ways(bench)
        await relay.close()
        assert len(relay.counts) == 8  # 2 prompts, each in 4 ways
        by_way = [sum(relay.counts[way::4]) / 2 for way in range(4)]
        assert cells(finding, "bytes on the wire") == [(f"{size:,.0f}",) for size in by_way]

    async def test_a_text_that_differs_is_told(self):
        replies = [[Reply("", Mode.SSE, events=[Event(1.0, text)])] for text in "aab"]
        assert "0 of 1 prompts" in experiments._way_notes(replies)[0]

    async def test_a_reply_without_text_is_no_zero(self):
        with pytest.raises(ExperimentError, match="no text"):
            experiments.median([1.0, None])


class TestLeaving:
    async def test_one_that_watches_stops_and_one_that_does_not_generates_all(self, bench):
        finding = await experiments.leave(bench)
        stream, complete, naive_stream, naive_complete = cells(finding, "tokens generated")
        assert naive_stream == naive_complete == ("100",)
        # How many more words the schedule brings in the meantime is the machine's affair.
        for (watched,) in (stream, complete):
            assert int(watched.split()[-1]) < 100
        assert cells(finding, "tokens when the client left")[0] == ("10",)

    async def test_stop_over_a_websocket(self, bench):
        finding = await experiments.stop(bench)
        [(tokens, reason)] = cells(finding, "tokens generated", "finish reason")
        assert int(tokens.split()[0]) >= 10
        assert int(tokens.split()[-1]) < 100
        assert reason == "cancelled"


async def test_proxy(bench):
    finding = await experiments.proxy(bench)
    assert finding.notes == ["The same content by every path: yes."]
    assert cells(finding, "pieces") == [("100",)] * 3
    _, (buffered,), _ = cells(finding, "first text")
    # The simulated reply takes 100 ms, and all of it fits in a block.
    assert buffered.endswith(" s") or int(buffered.removesuffix(" ms")) >= 100


async def test_bytes(bench):
    finding = await experiments.piece_bytes(bench)
    # A chunk of 2024 with all of its fields and a full model name has 4 bytes more than published.
    assert cells(finding, "bytes", "published") == [
        ("23", "23"),
        ("118", "118"),
        ("261", "257"),
        ("17", "17"),
    ]


async def test_split_chars(bench):
    finding = await experiments.split_chars(bench)
    tokens = str(len(experiments.SENTENCE.encode()))  # the fake model's are bytes
    split = str(sum(len(c.encode()) for c in experiments.SENTENCE if not c.isascii()))
    assert cells(finding, "tokens", "broken pieces", "joined text equal") == [
        (tokens, split, "no"),
        (tokens, "0", "yes"),
    ]


class TestReadingSpeed:
    async def test_counts_and_measures(self, bench):
        finding = await experiments.reading_speed(bench)
        measured = dict(cells(finding, "measure", "measured"))
        texts = [text["human"] for text in experiments.ENGLISH]
        per_word = sum(len(t.encode()) for t in texts) / sum(len(t.split()) for t in texts)
        assert measured["tokens per word"] == f"{per_word:.2f}"
        assert float(measured["generated, tokens/s"]) > 0

    async def test_the_published_figures_follow_from_two(self):
        rows = experiments.reading_rows(1.38, 21.2)
        assert [measured for _, measured, _ in rows] == [
            "1.38",
            "5.5",
            "21.2",
            "3.9x",
            "3.3 s, 12.6 s",
            "19.5 s, 75.6 s",
        ]


class TestBench:
    async def test_a_server_is_started_once_for_each_set_of_flags(self, bench):
        assert await bench.server() == await bench.server()
        assert await bench.server("--naive") != await bench.server()

    async def test_servers_end_with_the_bench_however_it_ends(self):
        with contextlib.suppress(ZeroDivisionError):
            async with FastBench() as bench:
                address = urlsplit(await bench.server())
                raise ZeroDivisionError
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address.hostname, address.port)

    async def test_what_a_process_said_before_it_ended_is_the_reason(self):
        async with Bench({"model": "simulated", "rows": "many"}, quiet=True) as bench:
            with pytest.raises(ExperimentError, match=r"server\.py did not start.*--rows"):
                await bench.server()

    async def test_a_failed_reply_is_no_measurement(self, bench):
        url = await bench.server()
        with pytest.raises(ExperimentError, match="400"):
            await bench.ask(f"{url}/stream", {"prompt": ""})
        with pytest.raises(ExperimentError, match="in-band error"):
            await bench.ask(f"{url}/stream", {"prompt": "x", "fail_after": 3})


class TestRunExperiment:
    """What a finding brings beside its table."""

    FINDING = Finding(
        *(["a"], [["1"]], "1"),
        figures=[Staircase("stairs", "How it comes", {"a way": [(0.1, 1)]})],
        files={"dates.json": "{}"},
        result={"median": 1.5},
    )

    @pytest.fixture(autouse=True)
    def one(self, monkeypatch):
        async def one(bench):
            """What is measured."""
            return self.FINDING

        monkeypatch.setitem(bench_module.EXPERIMENTS, "one", one)

    async def test_figures_and_files_stand_beside_the_report(self, bench, tmp_path, capsys):
        require("matplotlib")
        found = await run_experiment(bench, "one")
        tell("one", *found, "python experiments.py one", tmp_path / "report.md")
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["dates.json", "report.md", "stairs.svg"]
        assert "![How it comes](stairs.svg)" in (tmp_path / "report.md").read_text()
        drawn = (tmp_path / "stairs.svg").read_text()
        for words in ("n = 1; model: none", report.versions(), "python experiments.py one"):
            assert words in drawn
        assert capsys.readouterr().out.splitlines()[-1] == 'RESULT {"median": 1.5}'

    async def test_without_matplotlib_it_is_said(self, bench, tmp_path, monkeypatch):
        monkeypatch.setattr(figures, "available", lambda: False)
        tell("one", *await run_experiment(bench, "one"), "", tmp_path / "report.md")
        text = (tmp_path / "report.md").read_text()
        assert "- No figures: matplotlib is not installed" in text
        assert ".svg" not in text
        assert not (tmp_path / "stairs.svg").exists()


class TestTogether:
    """Experiments that wait for schedules run at the same time as their neighbours."""

    async def test_only_neighbours_that_wait(self, monkeypatch):
        monkeypatch.setattr(bench_module, "WAITING", {"b", "c", "e"})
        assert bench_module._together(list("abcde")) == [["a"], ["b", "c"], ["d"], ["e"]]

    async def test_each_has_a_bar_of_its_own_and_a_server_starts_once(self, monkeypatch):
        started = []

        async def url(script, process, listening, told):
            started.append(script)
            await asyncio.sleep(0)
            return f"http://{len(started)}"

        async def count(bench, steps):
            bench.expect(steps)
            bar = bench._bar.get()
            url = await bench.proxy("http://upstream")
            for _ in range(steps):
                bench.step()
            return url, bar.n

        monkeypatch.setattr(bench_module, "_url", url)
        monkeypatch.setattr(bench_module, "tqdm", CountingBar)
        async with Bench() as bench:
            found = await asyncio.gather(count(bench, 2), count(bench, 5))
        assert found == [("http://1", 2), ("http://1", 5)]
        assert started == ["proxy.py"]


class CountingBar:
    """A bar that nobody sees."""

    def __init__(self, **_):
        self.n = 0

    def update(self):
        self.n += 1

    def close(self):
        pass


class TestCommand:
    async def run(self, *arguments):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "experiments.py"),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def test_prints_a_section_and_writes_the_report(self, tmp_path):
        path = tmp_path / "report.md"
        code, out, _ = await self.run("bytes", "--model", "simulated", "--report", str(path))
        assert code == 0
        assert out.startswith("## bytes\n")
        assert out.strip() in path.read_text()
        assert "`python experiments.py bytes --model simulated`" in out

    async def test_one_that_fails_does_not_keep_the_next_from_running(self, tmp_path):
        flags = ("--device", "nowhere", "--model", "no such model")
        path = tmp_path / "report.md"
        code, out, err = await self.run("stop", "bytes", *flags, "--report", str(path))
        assert code == 1
        assert out.startswith("## bytes\n")
        assert "experiments.py: stop: server.py did not start" in err

    async def test_names(self):
        names = [line.split()[0] for line in (await self.run("--list"))[1].splitlines()]
        assert names[0] == "three-ways"
        assert {"load", "stall", "not-reading", "chat", "added"} < set(names)
        code, _, err = await self.run("four-ways")
        assert code == 2
        assert "no experiment four-ways: choose from three-ways, leave" in err

    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed by Linux")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_a_signal_ends_the_servers_too(self, number, tmp_path):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "experiments.py"), "three-ways", "--model", "simulated"),
            *("--report", str(tmp_path / "report.md")),
            stderr=asyncio.subprocess.DEVNULL,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        async with asyncio.timeout(30):
            while not (pids := children.read_text().split()):  # noqa: ASYNC240 (no disk)
                await asyncio.sleep(0.01)
            process.send_signal(number)
            assert await process.wait() == 130
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


@pytest.mark.model
class TestRealModel:
    async def test_stop(self):
        require("torch")
        async with Bench(quiet=True) as bench:
            finding = await experiments.stop(bench)
        [(pieces, tokens)] = cells(finding, "pieces received", "tokens generated")
        assert pieces == "10"
        assert int(tokens.split()[-1]) < 100
        assert finding.model.startswith("SmolLM2-135M-Instruct, ")

    async def test_split_chars(self, real_model):
        _, alone, pieces = experiments.decode_both_ways(real_model, experiments.SENTENCE)
        assert any("\N{REPLACEMENT CHARACTER}" in piece for piece in alone)
        assert "".join(pieces) == experiments.SENTENCE

"""Several replies: percentiles, failures apart, two paths in turn; and the command that asks."""

import asyncio
import json
import math
import signal
import socket
import sys

import pytest
from scripted import reset, until_client_ends
from scripted import scripted as served
from test_client import DONE, TWO, document, event, piece, run, start, stream

import client
import http1
import plans
import tally
from asking import ask
from client import Options, Reply
from diagnosis import Kind
from measures import Event, Failure, Mode
from tally import Tally

USAGE = event({"usage": {"completion_tokens": 2}, "finish_reason": "stop"})
HOST = "http://host.example"
WHOLE = stream(piece("Two"), piece(" plus"), USAGE, DONE)


def reply(first=0.1, **more):
    made = Reply("http://x/stream", Mode.SSE, status=200, first_byte=0.05, **more)
    made.events = [Event(first, "a"), Event(first + 0.1, "b")]
    made.end = made.close = first + 0.2
    return made


class TestTally:
    def test_failures_are_no_latencies(self):
        found = Tally("u")
        for first in (0.1, 0.2, 0.3):
            found.add(reply(first))
        refused = reply(0.0001)
        refused.fail(Failure.STATUS, "429 Too Many Requests: busy")
        found.add(refused)
        spread = found.spread("first text")
        assert (spread.n, spread.p50, spread.max) == (3, 0.2, 0.3)
        assert (found.n, found.complete, found.failures) == (4, 3, {Failure.STATUS: 1})
        text = tally.tally_table(found)
        assert "replies               4, complete 3" in text
        assert "failed: HTTP status   1, such as: 429 Too Many Requests: busy" in text

    def test_nothing_complete_is_no_number(self):
        """Field report 147: no zero, no infinity, no traceback."""
        found = Tally("u")
        failed = reply()
        failed.fail(Failure.CONNECT, "refused")
        for _ in range(2):
            found.add(failed)
        record = json.dumps(tally.tally_record(found), allow_nan=False)
        assert json.loads(record)["percentiles"]["first_text_s"] == {
            "n": 0, "p50": None, "p95": None, "p99": None, "max": None
        }  # fmt: skip
        assert "first text                   0         n/a" in tally.tally_table(found)

    def test_percentiles_say_their_n(self):
        found = Tally("u")
        for number in range(1, 101):
            found.add(reply(number / 100))
        spread = found.spread("first text")
        assert (spread.n, spread.p50, spread.p95, spread.p99) == (100, 0.5, 0.95, 0.99)
        assert found.spread(tally.GAPS).n == 100

    def test_what_tokens_were_counted_by(self):
        found = Tally("u")
        found.add(reply(usage={"completion_tokens": 2}))
        assert tally.tally_record(found)["tokens_counted_by"] == "usage"
        found.add(reply())
        assert tally.tally_record(found)["tokens_counted_by"] == "events"
        assert found.spread("tokens").n == 1


def plan(server, n, **more):
    count = len(more.setdefault("urls", (server.url(),)))
    options = (Options(mode=Mode.SSE),) * count
    return plans.Plan(bodies=({"prompt": "Hi"},) * count, options=options, n=n, **more)


async def carried_out(given):
    taken = []
    await plans.run(given, lambda which, reply: taken.append((which, reply)))
    return taken


class TestRuns:
    async def test_warm_up_is_not_counted(self):
        async with served(*[TWO] * 5) as server:
            taken = await carried_out(plan(server, 3, warmup=2))
            assert len(server.peers) == 5
        assert [reply.complete for _, reply in taken] == [True] * 3

    async def test_as_many_at_once_as_told(self):
        """Each of three waits until all three are there."""
        together = asyncio.Event()
        there = 0

        async def gather(peer):
            nonlocal there
            there += 1
            if there == 3:
                together.set()
            await together.wait()

        async with served(*[[gather, *TWO]] * 3) as server:
            taken = await carried_out(plan(server, 3, concurrency=3))
        assert len(taken) == 3

    async def test_one_after_the_other(self):
        busy = False

        async def alone(peer):
            nonlocal busy
            assert not busy
            busy = True

        async def over(peer):
            nonlocal busy
            busy = False

        async with served(*[[alone, *TWO[:-1], over, TWO[-1]]] * 4) as server:
            assert len(await carried_out(plan(server, 4))) == 4

    async def test_a_rate_does_not_wait_for_answers(self):
        """The first is answered only when the third has come."""
        third, count = asyncio.Event(), 0

        async def step(peer):
            nonlocal count
            count += 1
            if count == 3:
                third.set()
            await third.wait()

        async with served(*[[step, *TWO]] * 3) as server:
            taken = await carried_out(plan(server, 3, rate=200.0))
        assert [reply.complete for _, reply in taken] == [True] * 3

    async def test_two_paths_take_turns_in_alternating_order(self):
        async with served(*[TWO] * 8) as server:
            given = plan(server, 4, urls=(server.url("/a"), server.url("/b")))
            taken = await carried_out(given)
        assert [which for which, _ in taken] == [0, 1, 1, 0, 0, 1, 1, 0]

    async def test_connections_are_kept_if_asked_for(self):
        async with served(*[TWO] * 3) as server:
            await carried_out(plan(server, 3, keep_alive=True))
            assert len(server.peers) == 1

    async def test_a_bad_request_is_our_mistake(self):
        with pytest.raises(ValueError, match="JSON compliant"):
            await plans.run(
                plans.Plan(urls=("http://x/",), bodies=({"x": math.nan},), options=(Options(),)),
                print,
            )


class TestCommand:
    async def test_a_table(self):
        async with served(*[WHOLE] * 5) as server:
            code, out, err = await run(server.url(), "Hi", "-n", "5", "--concurrency", "2")
        assert (code, err) == (0, "")
        text = out.decode()
        assert "replies               5, complete 5" in text
        assert "first text                   5 " in text
        assert "inter-event gaps             5 " in text
        assert "error of the dates" in text
        assert "ended by              stop 5" in text
        assert "-> 5 of 5 replies: too short to tell" in text

    async def test_json_of_one(self):
        async with served(WHOLE) as server:
            code, out, _ = await run(server.url(), "Hi", "--json")
            written = server.peer.written
        record = json.loads(out)
        assert (code, record["complete"], record["dialect"]) == (0, True, "native")
        assert record["bytes"]["received"] == written
        assert (record["tokens"], record["text_events"]) == (2, 2)
        assert record["first_text_s"] <= record["last_text_s"] <= record["close_s"]
        assert record["diagnosis"][0]["kind"] == Kind.SHORT

    async def test_json_of_many_and_of_failures(self):
        refused = document(b'{"error": {"message": "busy"}}', 429)
        async with served(WHOLE, refused, [*WHOLE[:2], reset]) as server:
            code, out, _ = await run(server.url(), "Hi", "--json", "-n", "3")
        assert code == 1
        (record,) = json.loads(out)["runs"]
        assert record["finish_reasons"] == {"stop": 1}
        assert record["failures"] == {"HTTP status": 1, "truncated": 1}
        assert record["percentiles"]["first_text_s"]["n"] == record["complete"] == 1

    @pytest.mark.skipif(sys.platform != "linux", reason="no other kernel dates what TCP receives")
    @pytest.mark.parametrize("scheme", ["http", "https"])
    async def test_the_error_of_the_dates_is_the_kernels_word(self, tls, scheme):
        listen = {"ssl": tls} if scheme == "https" else {}
        async with served(*[WHOLE] * 20, **listen) as server:
            url = server.url("/stream", scheme)
            _, out, _ = await run(url, "Hi", "-n", "20", "--json", "--insecure")
        error = json.loads(out)["runs"][0]["dating_error_s"]
        assert error["n"] >= 10  # it is switched on a moment after the first socket asks for it
        assert 0 < error["p50"] < 5

    async def test_timeline(self, tmp_path):
        async with served(WHOLE, WHOLE) as server:
            file = tmp_path / "timeline.jsonl"
            await run(server.url(), "Hi", "-n", "2", "--timeline", str(file))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(line["reply"], line["text"]) for line in lines if line["text"]] == [
            (0, "Two"), (0, " plus"), (1, "Two"), (1, " plus")
        ]  # fmt: skip
        assert lines[0]["bytes"] == len('{"text": "Two"}')
        dates = [line["at_s"] for line in lines if line["reply"] == 0]
        assert dates == sorted(dates)

    async def test_buffered_has_an_exit_code_of_its_own(self):
        async def wait(peer):
            await asyncio.sleep(0.4)  # what is held is late: more than the silence that counts

        held = b"".join(stream(*map(piece, "abcdefghijkl"), DONE))

        async def soon(peer):
            await asyncio.sleep(0.02)

        first, *rest = stream(*map(piece, "abcdefghijkl"), DONE)
        paced = [first, *(step for part in rest for step in (soon, part))]
        async with served([wait, held]) as server:
            code, out, err = await run(server.url(), "Hi")
            assert (code, out.strip()) == (3, b"abcdefghijkl")
            assert "-> held until the end" in err
        async with served([wait, held], paced) as server:
            code, out, _ = await run(server.url("/a"), "Hi", "--against", server.url("/b"))
        assert code == 3
        assert b"=> the hop is on the first path and not on the second" in out

    async def test_ctrl_c_prints_what_there_is(self):
        async with served(WHOLE, [*WHOLE[:2], until_client_ends]) as server:
            process = await start(server.url(), "Hi", "-n", "5", "--json")
            while len(server.peers) < 2 or not server.peers[1].written:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")
        (record,) = json.loads(out)["runs"]
        assert (record["replies"], record["complete"]) == (2, 1)
        assert record["failures"] == {"cancelled by us": 1}

    async def test_ctrl_c_in_the_only_reply(self):
        async with served([*WHOLE[:2], until_client_ends]) as server:
            process = await start(server.url(), "Hi")
            await process.stdout.readexactly(3)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        assert process.returncode == 130
        assert b"failed: cancelled by us: interrupted" in err
        assert b"first text" in err

    @pytest.mark.parametrize(
        ("arguments", "target", "method", "asked"),
        [
            (["/elsewhere"], "/elsewhere", "GET", None),
            (["/elsewhere", "Hi"], "/elsewhere", "POST", {"prompt": "Hi"}),
            (["/x", "--data", '{"a": 1}', "--field", "b=[2]", "--field", "c=d"], "/x", "POST",
             {"a": 1, "b": [2], "c": "d"}),
            (["/x", "Hi", "--get"], "/x?prompt=Hi", "GET", None),
            (["", "Hi", "--chat"], "/stream", "POST",
             {"messages": [{"role": "user", "content": "Hi"}], "usage": True}),
            (["/v1/chat/completions", "Hi", "--model", "m"], "/v1/chat/completions", "POST",
             {"messages": [{"role": "user", "content": "Hi"}], "stream": True,
              "stream_options": {"include_usage": True}, "model": "m"}),
            (["/v1/responses", "Hi"], "/v1/responses", "POST", {"input": "Hi", "stream": True}),
        ],
    )  # fmt: skip
    async def test_what_is_asked(self, arguments, target, method, asked):
        path, *rest = arguments
        given = client._plan(client._argument_parser().parse_intermixed_args([HOST + path, *rest]))
        async with served(WHOLE) as server:
            url = given.urls[0].replace(HOST, server.url(""))
            reply = await ask(url, given.bodies[0], given.options[0])
            request, content = server.peer.requests[0]
        assert reply.complete, reply.error
        assert (request.method, request.target) == (method, target)
        assert (json.loads(content) if content else None) == asked

    @pytest.mark.parametrize(
        ("path", "name", "value"),
        [("/v1/messages", "x-api-key", "s3"), ("/stream", "authorization", "Bearer s3")],
    )
    async def test_a_key_from_the_environment(self, path, name, value):
        async with served(WHOLE) as server:
            arguments = (server.url(path), "Hi", "--key-env", "A_KEY", "--header", "X-A: b")
            _, out, err = await run(*arguments, A_KEY="s3")
            request, _ = server.peer.requests[0]
        assert request.fields.get(name) == value
        assert request.fields.get("x-a") == "b"
        assert "s3" not in err + out.decode()

    async def test_data_from_a_file(self, tmp_path):
        file = tmp_path / "ask.json"
        file.write_text('{"question": "é"}', encoding="utf-8")
        async with served(WHOLE) as server:
            await run(server.url("/x"), "--data", f"@{file}")
            assert json.loads(server.peer.requests[0][1]) == {"question": "é"}

    async def test_a_flood_ends_on_time(self):
        """A server that never stops, in the smallest events there are: bounded, and on time."""

        async def flood(peer):
            data = http1.encode_chunk(b"data: {}\n\n" * 5000)
            while True:
                await peer.write(data)

        async with served([WHOLE[0], flood], [WHOLE[0], flood]) as server:
            code, out, _ = await run(server.url(), "Hi", "--json", "--timeout", "0.3")
        record = json.loads(out)
        assert (code, record["failure"]) in ((1, "timeout"), (1, "protocol"))
        assert record["events"] <= 2**18

    async def test_nobody_listens(self):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}/stream"
            code, out, _ = await run(url, "Hi", "-n", "2")
        assert code == 1
        assert f"failed: cannot connect 2, such as: {url.split('/')[2]}: " in out.decode()

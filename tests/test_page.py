"""The page as it is sent, and what it reports: without a browser."""

import base64
import hashlib

import pytest
from fakes import FakeModel
from serving import error_of, serving

import http1
import page
from engine import Engine
from generation import BadRequest
from options import make_options, parse_arguments
from simulated import TICKS_PER_S, SimulatedEngine

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"
ASK = {"prompt": "One, two,", "max_tokens": 4, "seed": 7}
STAND_IN = {**ASK, "model": "simulated", "delay_ms": 1, "jitter_ms": 0}


def directives(policy: str) -> dict[str, str]:
    pairs = (directive.partition(" ") for directive in policy.split("; "))
    return {name: value for name, _, value in pairs}


class TestIndex:
    async def test_a_browser_gets_the_page_and_curl_the_routes(self) -> None:
        async with serving() as running:
            for accept, html in ((HTML, True), ("TEXT/HTML;q=0.9", True), ("*/*", False)):
                answer = await running.ask("GET", "/", Accept=accept)
                assert answer.status == 200
                assert answer.content.startswith(b"<!doctype html>") == html, accept
            plain = await running.ask("GET", "/")
            head = await running.ask("HEAD", "/", Accept=HTML)
        assert b"/stream" in plain.content
        assert head.fields.get("content-type") == "text/html; charset=utf-8"
        assert head.fields.get("vary") == "Accept"

    async def test_the_policy_names_what_is_in_the_page(self) -> None:
        async with serving() as running:
            answer = await running.ask("GET", "/", Accept=HTML)
        html = answer.content.decode()
        told = directives(answer.fields.get("content-security-policy"))
        for element in ("script", "style"):
            (text,) = (
                part.partition(f"</{element}>")[0] for part in html.split(f"<{element}>")[1:]
            )
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert told[f"{element}-src"] == f"'sha256-{digest}'"
        assert told["default-src"] == "'none'"
        assert told["connect-src"] == "'self'"
        assert "unsafe" not in answer.fields.get("content-security-policy")

    def test_nothing_in_the_page_has_an_address_elsewhere(self) -> None:
        html = page.content().decode()
        assert "//cdn" not in html
        assert " src=" not in html
        assert ".innerHTML" not in html

    async def test_with_a_proxy(self) -> None:
        """A request that the page sends through the proxy is one of another origin."""
        args = parse_arguments(["--page-proxy", "http://127.0.0.1:8766/"])
        options = make_options(args).bound("127.0.0.1", 1234, False)
        assert options.proxy == "http://127.0.0.1:8766"
        async with serving(proxy=options.proxy, origins=options.access.origins) as running:
            answer = await running.ask("GET", "/", Accept=HTML)
            health = (await running.ask("GET", "/health")).json()
            stream = await running.ask("POST", "/stream", ASK, Origin="http://localhost:1234")
            other = await running.ask("POST", "/stream", ASK, Origin="http://localhost:1235")
        told = directives(answer.fields.get("content-security-policy"))
        assert told["connect-src"] == "'self' http://127.0.0.1:8766 ws://127.0.0.1:8766"
        assert health["proxy"] == "http://127.0.0.1:8766"
        assert (stream.status, other.status) == (200, 403)
        assert stream.fields.get("access-control-allow-origin") == "http://localhost:1234"

    async def test_with_keys(self) -> None:
        """The page itself is free, and is told that the rest is not."""
        async with serving(api_keys=("s3cret",)) as running:
            answer = await running.ask("GET", "/", Accept=HTML)
            health = (await running.ask("GET", "/health")).json()
        async with serving() as running:
            free = (await running.ask("GET", "/health")).json()
        assert answer.status == 200
        assert (health["needs_key"], free["needs_key"]) == (True, False)
        assert b"s3cret" not in answer.content


class TestMarks:
    async def test_stand_beside_the_server_s_own(self) -> None:
        marks = {"first_byte": 0.004, "first_text": 0.31, "first_paint": 0.32, "last_text": 1}
        async with serving() as running:
            id = (await running.ask("POST", "/complete", ASK)).fields.get("reply-id")
            (before,) = (await running.ask("GET", "/log")).json()["requests"]
            answer = await running.ask("POST", f"/log/{id}", marks)
            (after,) = (await running.ask("GET", "/log")).json()["requests"]
        assert before["page"] is None
        assert after == answer.json() == {**before, "page": marks}

    async def test_what_is_not_known_is_null(self) -> None:
        assert page.parse_marks({"first_byte": 0}) == {
            "first_byte": 0, "first_text": None, "first_paint": None, "last_text": None
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"first_byte": -1}, "first_byte"),
            ({"first_text": "1"}, "first_text"),
            ({"first_text": True}, "first_text"),
            ({"first_text": 1e9}, "first_text"),
            ({"first_text": float("nan")}, "first_text"),
            ({"second_byte": 1}, "second_byte"),
        ],
    )
    def test_refused(self, body: dict, field: str) -> None:
        with pytest.raises(BadRequest) as caught:
            page.parse_marks(body)
        assert caught.value.field == field

    async def test_of_no_reply(self) -> None:
        async with serving() as running:
            unknown = await running.ask("POST", "/log/reply-0", {})
            foreign = await running.ask("POST", "/log/reply-0", {}, Origin="http://elsewhere")
        assert (unknown.status, foreign.status) == (404, 403)
        error_of(unknown)


class TestStandIn:
    """`"model": "simulated"`, where the server has a model too."""

    async def test_has_its_own_fields_by_every_route(self) -> None:
        async with serving(Engine(FakeModel())) as running:
            stream = await running.ask("POST", "/stream", {**STAND_IN, "fail_after": 2})
            whole = await running.ask("POST", "/complete", STAND_IN)
            refused = await running.ask("POST", "/complete", {**ASK, "delay_ms": 1})
            other = await running.ask("POST", "/complete", {**ASK, "model": "x"})
            health = (await running.ask("GET", "/health")).json()
        assert stream.events()[-1].startswith('{"message"')
        assert len(whole.json()["text"].split()) == 4
        assert error_of(refused)["field"] == "delay_ms"
        assert error_of(other)["field"] == "model"
        assert health["stand_in"] is True

    async def test_the_same_words_as_the_engine_by_itself(self) -> None:
        engine = SimulatedEngine(delay_ms=0, jitter_ms=0)
        async with serving(engine) as alone, serving(Engine(FakeModel())) as running:
            one = await alone.ask("POST", "/complete", ASK)
            other = await running.ask("POST", "/complete", STAND_IN)
            health = (await alone.ask("GET", "/health")).json()
        assert one.json() == other.json()
        assert health["stand_in"] is False

    async def test_may_be_left_out(self) -> None:
        options = make_options(parse_arguments(["--no-stand-in"]))
        async with serving(Engine(FakeModel()), policy=options.policy) as running:
            refused = await running.ask("POST", "/stream", STAND_IN)
            health = (await running.ask("GET", "/health")).json()
        assert error_of(refused)["field"] == "model"
        assert (health["stand_in"], health["simulated"]) == (False, False)

    async def test_shutdown_ends_it(self) -> None:
        async with serving(Engine(FakeModel())) as running, running.connect() as peer:
            peer.request("POST", "/stream", {**STAND_IN, "max_tokens": 100_000, "delay_ms": 10})
            await peer.until(b"text")
            assert (await running.ask("GET", "/health")).json()["running"] == 1  # counted as any
            assert b"server_requests_running 1" in (await running.ask("GET", "/metrics")).content
            await running.server.stop(goodbye_s=0.1)
            await peer.until(b"shutting down")


class TestSchedule:
    async def test_an_hour_is_the_longest(self) -> None:
        async with serving() as running:
            for name in ("delay_ms", "jitter_ms", "first_delay_ms"):
                refused = await running.ask("POST", "/complete", {**ASK, name: 3_600_001})
                assert (refused.status, error_of(refused)["field"]) == (400, name)

    async def test_of_a_request(self) -> None:
        """By the server's own clock: the first word is late, and the others are not."""
        async with serving(SimulatedEngine(delay_ms=10_000)) as running:
            body = {**ASK, "delay_ms": 1, "jitter_ms": 0, "first_delay_ms": 200, "usage": True}
            answer = await running.ask("POST", "/stream", body)
            (entry,) = running.server.entries
        timings = entry.generation.timings
        assert answer.events()[-1] == "[DONE]"
        assert timings.first_token >= 0.2 - 0.5 / TICKS_PER_S
        assert timings.last_token < 10


class TestBegin:
    """An `EventSource` is told the reply's name before there is any text."""

    async def test_cut_before_the_first_piece(self) -> None:
        """Field report 35: it comes back for the same reply; no second one is begun."""
        query = "prompt=One&max_tokens=3&seed=7&resume=true"
        async with serving() as running:
            cut = await self.content(running, f"/stream?{query}&truncate_after=0")
            id = running.server.entries[0].generation.id
            assert cut.decode() == (
                f'event: begin\nid: {id}:0\nretry: 1000\ndata: {{"id": "{id}"}}\n\n'
            )
            rest = await running.ask("GET", f"/stream?{query}", Last_Event_ID=f"{id}:0")
            assert len(rest.events()) == 4
            assert rest.events()[-1] == "[DONE]"
            assert len(running.server.entries) == 1

    async def content(self, running, target: str) -> bytes:
        async with running.connect() as peer:
            peer.request("GET", target)
            await peer.head()
            try:
                while await peer.event() is not None:
                    pass
            except (http1.ProtocolError, ConnectionError):  # cut, as asked
                return peer.content
            raise AssertionError("it was not cut")

"""Who may use the server: origins of pages, CORS, API keys."""

import logging
from typing import Any

import pytest
from serving import Answer, Running, error_of, serving
from sockets import OPENING

import http1

SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}


class TestOrigins:
    """Field report 65, and RFC 6455 section 10.2: a page elsewhere may not use this server."""

    SAME = "http://127.0.0.1:8765"

    @pytest.mark.parametrize(
        "origin",
        ["http://evil.example", "http://127.0.0.1", "http://127.0.0.1:1", "null", "", "http://[",
         "x", "http://127.0.0.1:8765.evil.example", "http://evil.example/127.0.0.1:8765",
         "http://127.0.0.1:8765@evil.example", "file://"],
    )  # fmt: skip
    async def test_foreign(self, origin: str, caplog: pytest.LogCaptureFixture) -> None:
        async with serving() as running:
            for method, route in (("POST", "/complete"), ("POST", "/stream"), ("GET", "/stream")):
                answer = await self.ask(running, method, route, Origin=origin)
                assert answer.status == 403
                assert "access-control-allow-origin" not in answer.fields
                error_of(answer)
            assert (await running.ask("GET", "/log")).json()["requests"] == []
        assert not caplog.records

    @pytest.mark.parametrize("origin", [SAME, "https://127.0.0.1:8765"])
    async def test_own(self, origin: str) -> None:
        async with serving() as running:
            assert (await self.ask(running, "POST", "/complete", Origin=origin)).status == 200

    async def test_none(self) -> None:
        async with serving() as running:
            assert (await self.ask(running, "POST", "/complete")).status == 200

    async def test_null_is_not_the_origin_of_a_request_without_host(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("GET")
            peer.send(b"GET /complete?prompt=a HTTP/1.0\r\nOrigin: null\r\n\r\n")
            assert (await peer.answer()).status == 403

    @pytest.mark.parametrize(
        ("site", "status"),
        [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
    )
    async def test_an_image_or_a_link(self, site: str, status: int) -> None:
        """A plain GET carries no Origin, but costs as much."""
        async with serving() as running:
            for route in ("/complete", "/stream"):
                answer = await running.ask("GET", f"{route}?prompt=a", Sec_Fetch_Site=site)
                assert answer.status == status
            assert (await running.ask("GET", "/", Sec_Fetch_Site=site)).status == 200
        async with serving(origins=("*",)) as running:
            answer = await running.ask("GET", "/complete?prompt=a", Sec_Fetch_Site=site)
            assert answer.status == 200

    async def ask(self, running: Running, method: str, route: str, **fields: str) -> Answer:
        async with running.connect() as peer:
            peer.parser.expect(method)
            content = b'{"prompt": "a", "max_tokens": 1}' if method == "POST" else b""
            target = route if content else f"{route}?prompt=a&max_tokens=1"
            pairs = [("Host", "127.0.0.1:8765"), *fields.items()]
            peer.send(http1.encode_request(method, target, pairs, content))
            return await peer.answer()


PAGE = "http://localhost:5173"
ASKED = (
    "authorization,content-type,x-stainless-helper-method,x-stainless-retry-count,"
    "anthropic-version,x-api-key"
)


PREFLIGHT = {
    "Origin": PAGE,
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": ASKED,
}


class TestCors:
    """Field report 25, and WHATWG Fetch section 3.2."""

    @pytest.mark.parametrize("origins", [(PAGE,), ("http://other", PAGE), ("*",)])
    async def test_preflight(self, origins: tuple[str, ...]) -> None:
        async with serving(origins=origins, api_keys=("secret",)) as running:
            for route in ("/stream", "/complete", "/nope"):
                answer = await running.ask("OPTIONS", route, **PREFLIGHT)
                assert answer.status == 204
                assert answer.fields.get("access-control-allow-origin") in (PAGE, "*")
                assert "POST" in answer.fields.tokens("access-control-allow-methods") or (
                    "post" in answer.fields.tokens("access-control-allow-methods")
                )
                allowed = answer.fields.tokens("access-control-allow-headers")
                assert set(ASKED.split(",")) <= set(allowed)

    @pytest.mark.parametrize("origins", [(), ("http://other",), ("http://localhost",)])
    async def test_preflight_of_others(self, origins: tuple[str, ...]) -> None:
        async with serving(origins=origins) as running:
            answer = await running.ask("OPTIONS", "/stream", **PREFLIGHT)
        assert answer.status == 403
        assert not [name for name, _ in answer.fields if name.lower().startswith("access")]

    @pytest.mark.parametrize(
        ("method", "target", "body", "status"),
        [
            ("POST", "/stream", {"prompt": "a"}, 200),
            ("POST", "/complete", {"prompt": "a"}, 200),
            ("POST", "/stream", {"prompt": ""}, 400),
            ("POST", "/stream", {"prompt": "a" * 2_000_000}, 413),
            ("POST", "/complete", {"prompt": "a", "fail_after": 1}, 500),
            ("GET", "/nope", None, 404),
            ("DELETE", "/stream", None, 405),
            ("GET", "/health", None, 200),
            ("GET", "/log", None, 200),
        ],
    )
    async def test_every_answer_can_be_read(
        self, method: str, target: str, body: Any, status: int
    ) -> None:
        async with serving(origins=(PAGE,)) as running:
            answer = await running.ask(method, target, body, Origin=PAGE)
            assert answer.status == status
            assert answer.fields.get_all("access-control-allow-origin") == [PAGE]
            assert "origin" in answer.fields.tokens("vary")

    async def test_without_a_key_it_can_be_read_too(self) -> None:
        async with serving(origins=(PAGE,), api_keys=("secret",)) as running:
            answer = await running.ask("POST", "/stream", {"prompt": "a"}, Origin=PAGE)
        assert answer.status == 401
        assert answer.fields.get("access-control-allow-origin") == PAGE


class TestKeys:
    KEYS = ("first-key", "schlüssel")

    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            ({"Authorization": "Bearer first-key"}, 200),
            ({"Authorization": "bearer  first-key"}, 200),
            ({"x_api_key": "first-key"}, 200),
            ({"x_api_key": "schlüssel".encode().decode("latin-1")}, 200),
            ({"Authorization": "Basic Zm9v", "x_api_key": "first-key"}, 200),
            ({}, 401),
            ({"Authorization": "Bearer"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Bearer first-key2"}, 401),
            ({"Authorization": "Bearer FIRST-KEY"}, 401),
            ({"Authorization": "Bearer \xff\xfe"}, 401),
            ({"Authorization": "first-key"}, 401),
            ({"Authorization": "Basic first-key"}, 401),
            ({"x_api_key": ""}, 401),
            ({"x_api_key": "wrong"}, 401),
            ({"Cookie": "key=first-key"}, 401),
        ],
        ids=str,
    )
    async def test_keys(self, fields: dict[str, str], status: int) -> None:
        async with serving(api_keys=self.KEYS) as running:
            for method, target, body in (
                ("POST", "/complete", {"prompt": "a", "max_tokens": 1}),
                ("GET", "/stream?prompt=a&max_tokens=1", None),
                ("GET", "/log", None),
            ):
                answer = await running.ask(method, target, body, **fields)
                assert answer.status == status
                if status == 401:
                    assert answer.fields.get("www-authenticate")
                    error_of(answer)

    async def test_what_needs_none(self) -> None:
        async with serving(api_keys=self.KEYS) as running:
            for target in ("/", "/health"):
                assert (await running.ask("GET", target)).status == 200

    async def test_a_key_is_never_told(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        bearer = "Bearer first-key"
        async with serving(api_keys=("first-key",)) as running:
            await running.ask("POST", "/complete", SEEDED, Authorization=bearer)
            await running.ask("POST", "/complete", {"prompt": ""}, Authorization=bearer)
            await running.ask("POST", "/complete", SEEDED, Authorization=bearer + "2")
            log = await running.ask("GET", "/log", Authorization=bearer)
            health = await running.ask("GET", "/health")
        assert b"first-key" not in log.content + health.content
        assert "first-key" not in caplog.text

    async def test_a_websocket_without_a_key(self) -> None:
        async with serving(api_keys=self.KEYS) as running, running.connect() as peer:
            answer = await peer.ask("GET", "/ws", **OPENING)
            assert answer.status == 401

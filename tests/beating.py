"""Servers that are silent for longer than a heartbeat, in each mode of `--sse-heartbeat`."""

import re
from contextlib import AbstractAsyncContextManager

from serving import Running, quick, serving

from delivery import Policy
from simulated import SimulatedEngine

ROUTES = ("chat", "completions", "responses", "messages")
PATHS = dict(zip(ROUTES, ("chat/completions", *ROUTES[1:]), strict=True))
# What breaks the silence on each route: a comment, or an event that says nothing. Responses have
# no such event, messages have no comments.
HEARTBEATS: dict[str, dict[str, str | None]] = {
    "comment": {route: "event" if route == "messages" else "comment" for route in ROUTES},
    "event": {route: "comment" if route == "responses" else "event" for route in ROUTES},
    "off": dict.fromkeys(ROUTES),
}
PING = '{"type": "ping"}'


def beating(mode: str) -> AbstractAsyncContextManager[Running]:
    """A heartbeat every 0.2 s; the first word comes after six, each other one after one.

    Two are waited for, so that a machine that stops for most of a second changes nothing.
    """
    return serving(
        SimulatedEngine(first_delay_ms=1000, delay_ms=300, jitter_ms=0),
        settings=quick(heartbeat_s=0.2),
        policy=Policy(heartbeats=mode != "off"),
        heartbeat_events=mode == "event",
    )


def heartbeat(content: bytes) -> str | None:
    """What broke the silence before the text, at least twice; each is what it should be."""
    told = []
    for block in content.decode().split("\n\n"):
        data = block.partition("data: ")[2]
        if block == ":":
            told.append("comment")
        elif '"delta": {}' in data or '"text": "", "logprobs"' in data or data == PING:
            told.append("event")
        elif re.search(r'"(delta|text|content)": "[^"]', data):
            break
    if PING in content.decode():
        told.remove("event")  # one is always there
    assert len(set(told)) <= 1
    assert len(told) != 1
    return told[0] if told else None

"""An engine that has no model: it relays each reply from an OpenAI-compatible server.

The same `submit` and `Generation` as `engine.py`; behind it is vLLM, SGLang, the server of
llama.cpp, `transformers serve`, or a gateway in front of many of them. Everything that stands
before the engine (routes, resuming, heartbeats, limits, the watch on the client) stays as it is.

    submit --> POST /v1/chat/completions   {"messages": [...], "stream": true, ...}
               POST /v1/completions        {"prompt": "One,", "stream": true, ...}
           <-- 200, text/event-stream      `Generation.accepted`: now our own head may leave
               data: {"choices": [{"delta": {"content": " two"}}]}      a piece
               data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}
               data: {"choices": [], "usage": {"prompt_tokens": 2, ...}}
               data: [DONE]                                             the end
    cancel --> the connection is closed

One request, one connection: closing it is the only way that all these servers have to stop a
reply, and one that is shared or kept could not be closed. A paused reply is not read, so the
sender's own window holds it back.

What goes wrong is a status as long as our head is not written, and an error in-band after that:

    400, 413, 422   the client's own mistake, in the upstream server's words
    429             with its Retry-After
    504             nothing came for `timeout_s`: no connection, no head, no event
    502             everything else: refused, unreachable, cut, not HTTP, not JSON, 401, 404, 5xx,
                    a redirect; the log has the reason, the client has safe words

A reply is complete if it has a finish reason or `[DONE]`; without either the end is an error,
however regular the end of the message. `content_filter` is an end too in the dialects that have a
word for it, and an error (422) in the others. Nothing is tried twice: a request whose answer was
lost may be running all the same, and the client knows best whether that matters.

Foreign habits that are taken: no first chunk with a role, `content: null`, `choices: []`, usage in
every chunk, comments, every line end, no `[DONE]`, a whole JSON body instead of a stream, content
in parts, other choices beside ours. Reasoning (`reasoning_content`) is not part of the reply; its
tokens are part of the usage.

Usage comes last, so that the prompt's tokens are known at the end and not before: Anthropic's
`message_start` says 0, and its `message_delta` what is right, which their SDKs take over. Without
usage from upstream the counts stay 0: an event may hold several tokens, so events are not counted.

A client may ask for any model that upstream lists; what it calls "default" is `--upstream-model`,
or the first of the list.

RFC 9110 sections 15.6.3 and 15.6.5 (gateway errors). Not here: connections (`outbound.py`), the
choice among several upstream servers (a balancer's task), a tokenizer. This is the last file of
the tour.
"""

import asyncio
import contextlib
import json
import logging
import re
import ssl
import time
from collections.abc import Iterator
from typing import Any

import http1
import sse
from generation import (
    MAX_TOKENS,
    SHUTDOWN,
    BadRequest,
    EngineDown,
    Filtered,
    Generation,
    GenerationError,
    QueueFull,
    SamplingParams,
)
from outbound import Answer, Outbound, parse_json

log = logging.getLogger("upstream")

# The list of models that was got so long ago is asked for anew when somebody wants one that is not
# in it. A name that nobody serves costs upstream no more than that.
LIST_S = 5.0
# Of silence. It may be reading a long prompt, or letting the request wait.
TIMEOUT_S = 120.0
# For usage and [DONE] to follow a finish reason: the text is complete already.
LINGER_S = 5.0
MAX_EVENT_BYTES = 1024 * 1024
# So much of an upstream server's words is shown.
MAX_MESSAGE_CHARACTERS = 500
# No reply has more; what a broken server counts must not break our own sums.
MAX_COUNT = 2**53

# The upstream server's finish reasons in our words. Others (abort) mean that the reply is not what
# the model would have said: an error, never an end. So does "filtered", but there are dialects that
# have a word for it.
FINISH_REASONS = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "length": "length",
    "content_filter": "filtered",
}

# What its other refusals mean to a client, who is not to see its words.
SAFE_WORDS = {
    401: "the upstream server refused this server's key",
    403: "the upstream server refused this server's key",
    404: "the upstream server does not know the address or the model",
    504: "the upstream server did not answer in time",
}
# A server without a list of its models, which is no fault: it has one.
NO_LIST = (404, 405, 501)
NO_FIELDS = http1.Fields()


class UpstreamError(GenerationError):
    """The upstream server refused or failed; the text is safe to show."""

    type = "upstream_error"

    def __init__(self, message: str, status: int = 502, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        if status < 500:
            self.type = "overloaded" if status == 429 else "invalid_request_error"
        if status == 429:
            known = retry_after is not None and re.fullmatch(r"[0-9]{1,6}", retry_after)
            self.fields = (("Retry-After", str(retry_after) if known else "1"),)


class UpstreamEngine:
    """Relays to the server at `url`. See the module's docstring.

    `model` None asks the server for the first that it has. `timeout_s` bounds each silence,
    `max_waiting` the requests that it has not yet taken. ValueError when the URL or the key can't
    be used.
    """

    failure: str | None = None
    cache_bytes = 0  # the cache is elsewhere
    context = MAX_TOKENS  # upstream refuses what is too long

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_waiting: int = 64,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.outbound = Outbound(url, key, timeout_s, tls)
        self.model = model
        self.listed: tuple[str, ...] = ()  # the models that the server has, once it was asked
        self.max_waiting = max_waiting
        self._listed_at = -LIST_S
        self._relays: set[Relay] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests that the upstream server has not yet taken."""
        return sum(not relay.accepted.is_set() for relay in self._relays)

    @property
    def running(self) -> int:
        """Replies that come from it."""
        return len(self._relays) - self.waiting

    def start(self) -> None:
        """Nothing to start: each reply has a task of its own on the event loop."""

    def encode(self, prompt: str | list[dict[str, Any]]) -> list[Any]:
        """Return what `submit` takes: here the prompt as it is, since its tokens are upstream's.

        Messages stay messages; plain text becomes a list of one string.
        """
        return [prompt] if isinstance(prompt, str) else prompt

    def submit(
        self, prompt: list[Any], params: SamplingParams, model: str | None = None
    ) -> Generation:
        """As `Engine.submit`. `prompt` is what `encode` returned, or token ids.

        `model` is one of `listed`; None for the one of `model_name`.
        """
        if self._closed:
            raise EngineDown("the server is shutting down")
        if not prompt:
            raise BadRequest("the prompt is empty", "prompt")
        if params.logprobs is not None:
            raise BadRequest("logprobs are not relayed", "logprobs")
        if self.waiting >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests are waiting already")
        relay = Relay(self, prompt, params, model)
        self._relays.add(relay)
        return relay.generation

    def forget(self, relay: "Relay") -> None:
        """Called by a relay that has ended."""
        self._relays.discard(relay)

    def cancel_all(self, reason: str) -> None:
        """Cancel what waits and what runs."""
        for relay in list(self._relays):
            relay.generation.cancel(reason)

    def close(self, timeout: float = 0) -> None:
        """Cancel everything."""
        self._closed = True
        self.cancel_all(SHUTDOWN)

    @property
    def closed(self) -> bool:
        """There is no thread to wait for."""
        return self._closed

    async def model_name(self) -> str:
        """The model to ask for: as told, or the first that the server names, or "default"."""
        if self.model is None:
            await self.list_models()
            if not self.listed:
                return "default"  # asked again next time: it may still be loading
            self.model = self.listed[0]
        return self.model

    async def list_models(self) -> None:
        """See to it that `listed` is not older than `LIST_S`. Raises `UpstreamError`."""
        if time.monotonic() - self._listed_at < LIST_S:
            return
        with in_safe_words():
            async with self.outbound.exchange("GET", "/models") as (head, answer):
                if head.status == 200:
                    self.listed = _model_names(await answer.json())
                elif head.status not in NO_LIST:
                    raise _failure(head.status, "", head.fields)
        self._listed_at = time.monotonic() if self.listed else -LIST_S


class Relay:
    """One reply on its way from the upstream server to its `Generation`."""

    def __init__(
        self,
        engine: UpstreamEngine,
        prompt: list[Any],
        params: SamplingParams,
        model: str | None = None,
    ) -> None:
        self.generation = Generation(0, self._flags_changed)
        self.accepted = self.generation.accepted = asyncio.Event()
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._model = model
        self._finish_reason: str | None = None
        self._reading = asyncio.Event()  # cleared while paused
        self._reading.set()
        self._task = asyncio.create_task(self._run(), name=f"relay {self.generation.id}")
        self._task.add_done_callback(self._ended)

    def _flags_changed(self) -> None:
        if self.generation.cancel_reason is not None:
            self._task.cancel()  # which closes the connection on its way out
        elif self.generation.paused:
            self._reading.clear()
        else:
            self._reading.set()

    def _ended(self, task: asyncio.Task[str]) -> None:
        generation = self.generation
        self._engine.forget(self)
        if task.cancelled():
            finish_reason = "cancelled"
        elif (error := task.exception()) is None:
            finish_reason = task.result()
        else:
            finish_reason = "error"
            if not isinstance(error, UpstreamError | Filtered):
                log.error("a relay failed", exc_info=error)
                error = UpstreamError("internal error", 500)
            generation.failure, generation.error = error, str(error)
        generation.deliver("", finish_reason)
        self.accepted.set()

    async def _run(self) -> str:
        """Relay the reply; its finish reason. Raises `UpstreamError` or `Filtered` only."""
        with in_safe_words():
            path, body = self._request(self._model or await self._engine.model_name())
            exchange = self._engine.outbound.exchange("POST", path, json.dumps(body).encode())
            async with exchange as (head, answer):
                media_type = await _checked(head, answer)
                self.generation.timings.queued = self._since_submit()
                if media_type == "text/event-stream":
                    self.accepted.set()
                    await self._relay(answer)
                else:
                    self._take(await answer.json())
        if self._finish_reason is None:
            raise UpstreamError("the upstream server's reply broke off without an end")
        if self._finish_reason == "filtered":
            raise Filtered("the upstream server's filter stopped the reply (content_filter)")
        return self._finish_reason

    def _request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body. Of the sampling fields that not every server knows, those in use."""
        params = self._params
        body: dict[str, Any] = {
            "model": model,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.max_tokens < self._engine.context:  # else no limit was asked for
            body["max_tokens"] = params.max_tokens
        if params.top_k:
            body["top_k"] = params.top_k
        if params.repetition_penalty != 1:
            body["repetition_penalty"] = params.repetition_penalty
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        if params.schema is not None:
            schema = {"name": "reply", "schema": params.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(self._prompt[0], dict):
            return "/chat/completions", {**body, "messages": self._prompt}
        is_text = isinstance(self._prompt[0], str)
        return "/completions", {**body, "prompt": self._prompt[0] if is_text else self._prompt}

    async def _relay(self, answer: Answer) -> None:
        """Deliver each piece in the read that completed its event, up to the end."""
        parser = sse.Parser(MAX_EVENT_BYTES)
        try:
            while (data := await answer.part()) is not None:
                for event in parser.feed(data):
                    if event.data == "[DONE]":
                        self._finish_reason = self._finish_reason or "stop"
                        return
                    if event.data:
                        self._take(parse_json(event.data), event.type)
                if self._finish_reason is not None:
                    answer.patience_s = min(answer.patience_s, LINGER_S)
                await self._reading.wait()
        except (OSError, http1.ProtocolError):
            if self._finish_reason is None:
                raise

    def _take(self, chunk: Any, event_type: str = "message") -> None:
        """Take in one chunk of a stream, or a whole reply: they differ in the name of the text."""
        if not isinstance(chunk, dict):
            raise UpstreamError("the upstream server sent what is no JSON object")
        if chunk.get("error") or "error" in (event_type, chunk.get("object")):
            raise _failure(*_error(chunk))
        self._take_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            # One reply was asked for: of a server that gives several the others are not ours.
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
        for part in text if isinstance(text, list) else [text]:  # Mistral's reasoners send parts
            if isinstance(part, dict) and part.get("type") == "text":
                part = part.get("text")
            if isinstance(part, str) and part:
                self._take_text(part)
        if reason := choice.get("finish_reason"):
            self._finish_reason = FINISH_REASONS.get(str(reason))
            if self._finish_reason is None:
                words = _on_the_wire(str(reason)[:100])
                raise UpstreamError(f"the upstream server ended the reply: {words}")

    def _take_text(self, text: str) -> None:
        timings = self.generation.timings
        timings.last_token = self._since_submit()
        if timings.first_token is None:
            timings.prefill = timings.first_token = timings.last_token
        self.generation.deliver(_on_the_wire(text))

    def _take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):  # the last one counts: some send it with every chunk
            for name in ("prompt_tokens", "completion_tokens"):
                count = usage.get(name)
                if type(count) is int and 0 <= count <= MAX_COUNT:
                    setattr(self.generation, name, count)

    def _since_submit(self) -> float:
        return time.monotonic() - self.generation.submitted


@contextlib.contextmanager
def in_safe_words() -> Iterator[None]:
    """Let out nothing but `UpstreamError`; what happened goes to the log."""
    try:
        yield
    except TimeoutError as error:
        raise UpstreamError("the upstream server did not answer in time", 504) from error
    except OSError as error:
        log.warning("the connection to the upstream server: %s", error)
        raise UpstreamError("the connection to the upstream server failed") from error
    except (http1.ProtocolError, sse.EventTooLong) as error:
        log.warning("the upstream server's answer: %s", error)
        raise UpstreamError("the upstream server's answer broke off or is not valid") from error


async def _checked(head: http1.Response, answer: Answer) -> str:
    """The media type of an answer that holds a reply; `UpstreamError` for any other."""
    if head.status != 200:
        # What goes with 401 and 403 may repeat the key: not even for the log.
        quiet = head.status < 400 or head.status in (401, 403)
        words = "" if quiet else await _words(answer)
        raise _failure(head.status, words, head.fields)
    if head.fields.tokens("content-encoding") not in ([], ["identity"]):
        raise UpstreamError("the upstream server's answer is compressed, unasked")
    media_type = (head.fields.get("content-type") or "").partition(";")[0].strip().lower()
    if media_type not in ("text/event-stream", "application/json"):
        raise UpstreamError("the upstream server's answer is no stream of events")
    return media_type


async def _words(answer: Answer) -> str:
    """What an error says of itself; nothing where that does not come: the status says enough."""
    answer.patience_s = min(answer.patience_s, LINGER_S)
    try:
        return _error(await answer.json())[1]
    except (OSError, http1.ProtocolError):  # TimeoutError is an OSError
        return ""


def _failure(status: int, words: str, fields: http1.Fields = NO_FIELDS) -> UpstreamError:
    """An upstream server's status in our words; in its own only for the client's own mistakes."""
    log.warning("upstream: %d %r %r", status, words, fields.get("location"))
    if status in (400, 413, 422):
        return UpstreamError(words or "the upstream server refused the request", status)
    if status == 429:
        return UpstreamError("the upstream server is busy", 429, fields.get("retry-after"))
    if 300 <= status < 400:
        return UpstreamError("the upstream server is elsewhere: it redirects")
    return UpstreamError(
        SAFE_WORDS.get(status, "the upstream server failed"), 504 if status == 504 else 502
    )


def _error(body: Any) -> tuple[int, str]:
    """Status and message of an error: as OpenAI, an older vLLM, or FastAPI tells it.

    The status is what vLLM and llama.cpp call `code`; 500 where there is none.
    """
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": error}
    code, words = error.get("code"), error.get("message") or error.get("detail")
    words = _on_the_wire(words[:MAX_MESSAGE_CHARACTERS]) if isinstance(words, str) else ""
    return code if isinstance(code, int) else 500, words


def _on_the_wire(text: str) -> str:
    """Half a surrogate pair can stand in JSON, and nowhere on our own wire."""
    return text.encode("utf-8", "replace").decode()


def _model_names(body: Any) -> tuple[str, ...]:
    models = body.get("data") if isinstance(body, dict) else None
    if not isinstance(models, list):
        return ()
    names = [model.get("id") for model in models if isinstance(model, dict)]
    # One that can't be written could not be asked for, either.
    return tuple(n for n in names if isinstance(n, str) and n and n == _on_the_wire(n))

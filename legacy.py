"""OpenAI's older dialect: completions, a text that is continued.

    {"model": "default", "stream": true, "prompt": ["One, two,", "A, b,"]}

POST /v1/completions
        data: {"id": ..., "choices": [{"index": 0, "text": "Two", ... "finish_reason": null}]}
        data: {"id": ..., "choices": [{"index": 0, "text": "", ... "finish_reason": "stop"}]}
        data: [DONE]
    or  data: {"error": {"message": "the model failed", "type": "server_error", ...}}

A prompt is a text, or the ids of its tokens. A request may have several: each gets a reply of its
own, which is generated beside the others and told under its own `index` as it comes. All of them
are one reply to the client: one id, one usage, and one failure ends all.

With `echo` the text begins with the prompt.

Not here: `best_of`, `suffix`; `echo` of token ids or with log probabilities: refused by name.

OpenAI API reference: Completions (legacy).
Read next: `responses.py`.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from asks import Ask, flag, without_nulls
from chats import refuse
from completions import (
    COMMENT,
    UNSUPPORTED,
    Chunks,
    finish_reason,
    openai_error,
    sampling_of,
    told_with,
    usage_of,
)
from connection import Exchange
from delivery import Delivery
from engine import Prompt
from generation import BadRequest, Generation
from models import Served
from outlet import Outlet
from telling import Entry, to_the_end

UNSUPPORTED_TEXT: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "best_of": (1,),
    "suffix": ("",),
}
# What the reference says for a request that names no number.
DEFAULT_TOKENS = 16
MAX_PROMPTS = 20


def _prompts(body: Mapping[str, Any]) -> tuple[Prompt, ...]:
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must be a text, token ids, or 1 to {MAX_PROMPTS}", "prompt")
    for each in prompts:
        if not (isinstance(each, str) or _is_ids(each)):
            raise BadRequest("prompt must be a text, token ids, or a list of either", "prompt")
        if not each:
            raise BadRequest("prompt must not be empty", "prompt")
    return tuple(prompts)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id) is int for id in prompt)


class TextChunks(Chunks):
    """The chunks of one choice; those of several share the id of the first, `lead`."""

    kind = "text_completion"
    prefix = "cmpl-"

    def __init__(
        self,
        served: Served,
        ask: Ask,
        generation: Generation,
        lead: Generation | None = None,
        index: int = 0,
    ) -> None:
        super().__init__(served, ask, lead or generation)
        self._generation = generation
        self._alone = lead is None
        self._index = index
        self._offset = 0  # characters told of by log probabilities
        self.heartbeat = self._text("") if served.heartbeat_events else COMMENT

    def begin(self) -> bytes:
        """The prompt, if its echo was asked for."""
        return self._text(str(self._ask.prompt)) if self._ask.echo else b""

    def piece(self, text: str, id: str | None = None) -> bytes:
        """A piece of the text."""
        return self._text(text)

    def closing(self, generations: Sequence[Generation]) -> bytes:
        """As of every reply; of several told together, `closing_all` closes the stream once."""
        return super().closing(generations) if self._alone else b""

    def closing_all(self, generations: Sequence[Generation]) -> bytes:
        """What follows the last finish of several."""
        return super().closing(generations)

    def _finish(self, reason: str) -> bytes:
        return self._text("", reason)

    def _text(self, text: str, reason: str | None = None) -> bytes:
        logprobs, self._offset = _logprobs(self._ask, self._generation, self._offset)
        return self._chunk(
            {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        )


def _logprobs(
    ask: Ask, generation: Generation, offset: int
) -> tuple[dict[str, list[Any]] | None, int]:
    """The log probabilities of the tokens that came since the last call, if they were asked for;
    and where in the text the next token begins."""
    tokens = generation.take_logprobs() if ask.params.logprobs is not None else []
    if not tokens:
        return None, offset
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    told: dict[str, list[Any]] = {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # As the reference has it: the token that was drawn is always among them.
        "top_logprobs": [{t.token: t.logprob for t in (*token.top, token)} for token in tokens],
        "text_offset": offsets,
    }
    return told, offset


class Text:
    """The dialect of `/v1/completions`."""

    filter_is_an_end = True

    def __init__(self, served: Served) -> None:
        self.served = served

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; fields that nobody knows are ignored."""
        body = {"max_tokens": DEFAULT_TOKENS, **without_nulls(body)}
        model = self.served.model(body)
        refuse(body, UNSUPPORTED_TEXT)
        stream = flag(body, "stream")
        prompts = _prompts(body)
        echo = flag(body, "echo")
        if echo and ("logprobs" in body or not all(isinstance(p, str) for p in prompts)):
            raise BadRequest("echo is for texts, and without logprobs", "echo")
        return Ask(
            prompts[0],
            sampling_of(body, self.served, "logprobs"),
            stream,
            model,
            prompts=prompts,
            echo=echo,
            **told_with(body, self.served, stream),
        )

    def events(self, ask: Ask, generation: Generation) -> TextChunks:
        """What tells one streamed reply."""
        return TextChunks(self.served, ask, generation)

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """A whole reply."""
        return self.bodies([ask], [generation], [text])

    def bodies(
        self, asks: Sequence[Ask], generations: Sequence[Generation], texts: Sequence[str]
    ) -> dict[str, Any]:
        """Whole replies, one a prompt."""
        choices = [
            {
                "index": index,
                "text": f"{ask.prompt}{text}" if ask.echo else text,
                "logprobs": _logprobs(ask, generation, 0)[0],
                "finish_reason": finish_reason(ask, generation),
            }
            for index, (ask, generation, text) in enumerate(
                zip(asks, generations, texts, strict=True)
            )
        ]
        return {
            "id": generations[0].id.replace("reply-", "cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": asks[0].model,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
            "usage": usage_of(generations),
        }

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return openai_error(status, message, type, field)


# --- Several prompts in one request ------------------------------------------------------------


class Several:
    """The handler of `/v1/completions`: a reply to one prompt, or to each of several."""

    def __init__(self, delivery: Delivery, dialect: Text) -> None:
        self._delivery = delivery
        self._dialect = dialect

    async def create(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        ask = await self._delivery.ask(exchange, self._dialect)
        if len(ask.prompts) == 1:
            await self._delivery.answer(exchange, self._dialect, ask)
            return
        asks = [replace(ask, prompt=prompt) for prompt in ask.prompts]
        with ExitStack() as running:  # what goes wrong with one cancels the others
            entries = []
            for each in asks:
                entry = await self._delivery.submit_checked(exchange, each)
                running.enter_context(entry.generation)
                entries.append(entry)
            if ask.stream:
                await self._stream(exchange, asks, entries)
            else:
                await self._complete(exchange, asks, entries)

    async def _complete(
        self, exchange: Exchange, asks: Sequence[Ask], entries: Sequence[Entry]
    ) -> None:
        self._delivery.watch(exchange, *entries)
        texts = [
            await self._delivery.text(entry, ask, self._dialect)
            for ask, entry in zip(asks, entries, strict=True)
        ]
        generations = [entry.generation for entry in entries]
        self._delivery.answer_json(exchange, self._dialect.bodies(asks, generations, texts))

    async def _stream(
        self, exchange: Exchange, asks: Sequence[Ask], entries: Sequence[Entry]
    ) -> None:
        lead = entries[0].generation
        chunks = [
            TextChunks(self._dialect.served, ask, entry.generation, lead, index)
            for index, (ask, entry) in enumerate(zip(asks, entries, strict=True))
        ]
        self._delivery.start(exchange, lead, chunks[0].heartbeat)
        self._delivery.watch(exchange, *entries)
        outlet = self._delivery.outlet(exchange, exchange, None, asks[0].simulation)
        telling = self._side_by_side(asks, entries, chunks, outlet)
        if await to_the_end(exchange, outlet, telling):
            exchange.finish()

    async def _side_by_side(
        self,
        asks: Sequence[Ask],
        entries: Sequence[Entry],
        chunks: Sequence[TextChunks],
        outlet: Outlet,
    ) -> None:
        """Tell all replies as they come, until all have ended or one has failed."""
        until_failure = UntilFailure(outlet)

        async def tell(ask: Ask, entry: Entry, events: TextChunks) -> None:
            await self._delivery.tell(entry, ask, events, until_failure)
            until_failure.failed |= not _is_whole(entry.generation)

        tasks = {
            asyncio.create_task(tell(*each)) for each in zip(asks, entries, chunks, strict=True)
        }
        waiting = tasks
        try:
            while waiting and not until_failure.failed:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not until_failure.failed:
            closing = chunks[0].closing_all([entry.generation for entry in entries])
            outlet.put(outlet.frame(closing))


class UntilFailure:
    """Passes on what is put until one of several replies has failed: that ends them all."""

    def __init__(self, outlet: Outlet) -> None:
        self.failed = False
        self.frame = outlet.frame
        self.ready = outlet.ready
        self._put = outlet.put

    def put(self, data: bytes) -> bool:
        """Pass on."""
        return self.failed or self._put(data)


def _is_whole(generation: Generation) -> bool:
    return generation.filtered or generation.finish_reason in ("stop", "length")

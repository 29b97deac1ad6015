"""Structured output: of all tokens, those that keep a reply a prefix of a valid JSON document.

    {"type": "object",                  the reply so far      what may come next
     "properties": {                    ""                    {   {"   {"ci   ...
       "city": {"type": "string"},      {"city": "Par         is   is"   is",   any text, ...
       "rainy": {"type": "boolean"}},   {"city": "Paris",     "   " (a space first)   "ra   ...
     "required": ["city", "rainy"]}     ... "rainy": tr       ue   u
                                        ... "rainy": true     }

A JSON schema is compiled to a grammar. After each token a parser of that grammar walks through the
vocabulary, arranged as a tree of bytes, and marks the tokens that it could read on with; the others
are ruled out before the draw. So even the smallest model gives JSON that fits, though not
necessarily sense. Both are `llguidance`'s work: an Earley parser over derivatives of regular
expressions, some 50 microseconds a token (https://github.com/guidance-ai/llguidance).

What is allowed is narrower than JSON, since a small model that may write white space or digits for
ever does so. Outside of strings there is no white space but one space after a comma or a colon, as
models write it, and no line end. No run of digits that may end goes on beyond 17, which tell any
double from all others (RFC 8259 section 6 expects no more of a reader).

A model may talk on in a string or an array until it comes to its token limit. Near that limit the
way out is kept in sight: ids that would complete the document from here. A token after which there
is no way out that is short enough is not taken, but the next one of the way out is.

    {"city": "Par         seven ids left, way out of six: "   ,"   ra   iny   ":   true}
                          one more of the city's name may come, if it leaves that way open

So a document is cut short only where the limit has no room for a short one. (The way out that is
found is not always the shortest there is; from within a `pattern` none may be found.)

Which schemas: draft 2020-12 as far as llguidance goes, which is more than OpenAI's strict mode asks
for (https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md): objects, arrays,
strings with `pattern` and common `format`s, numbers with limits, `enum`, `const`, `anyOf`, `$ref`
into `$defs`. Properties come in the schema's order. What it doesn't know to enforce is refused,
never passed over, except words that are no keywords of JSON schema. Refused besides is what a
stranger could keep a processor busy with for minutes: see `_check`.

Not here: other grammars than JSON's; tokens that are the only ones possible are sampled like all
others, though a server in a hurry could write them down without asking the model.

Read next: `lm.py`, which draws among the tokens that are left.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from weights import ModelError

Ids = npt.NDArray[np.intp]

# The way out is looked for when so many ids are left, and one for each of the schema's characters:
# to end what one token may begin, an object with all that it must have, takes fewer ids than that.
REACH = 256
# What is tried first on the way out, in this order; in a string only its end.
_CLOSING = tuple(bytes([byte]) for byte in b'}]":0ntf-,[{')

# Compiled schemas that are kept; the largest take 8 MB each.
KEPT_GRAMMARS = 16
# Compiling takes time in proportion, some 50 ms for this; OpenAI allows 120,000 for names alone.
MAX_CHARACTERS = 100_000
# An automaton that divides by n has n states, and 9999 took 30 ms each time it occurred.
MAX_MULTIPLE_DIGITS = 3
# Checking that these exclude each other takes a millisecond a pair.
MAX_PATTERN_PROPERTIES = 16
# The parser keeps four items for each property that may come next, of 2,000 in all; and each of
# them costs every step.
MAX_OPTIONAL_PROPERTIES = 400

# The longest run of digits in a reply: so many tell any double from all others.
MAX_DIGITS = 17
# So much of a schema's own words is repeated in an error.
MAX_MESSAGE_CHARACTERS = 200

# Where a schema holds further schemas: by name, in a list, or one.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
# What makes one value meet several schemas, and what takes an automaton: see `_check`.
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_AUTOMATA = ("pattern", "format", "multipleOf")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")


class Vocabulary:
    """The tokens of a model, as a tree of bytes for grammars to be matched with; thread-safe."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.eos_ids = sorted(id for id in eos_ids if id < len(tokenizer))
        try:
            self._tokenizer = from_tokenizer(tokenizer, eos_token=self.eos_ids or None)
        except ValueError as error:
            raise ModelError(
                f"no schema can be matched with the model's tokenizer ({error}): choose another"
            ) from error
        raws = [self.raw(id) for id in range(self._tokenizer.vocab_size)]
        self.digits = np.array([id for id, raw in enumerate(raws) if raw[:1].isdigit()], np.intp)
        ids = {raw: id for id, raw in enumerate(raws) if len(raw) == 1}
        self.closing = [ids[raw] for raw in _CLOSING if raw in ids]
        self.quotes = [ids[b'"']] if b'"' in ids else []
        self._grammar = lru_cache(KEPT_GRAMMARS)(self._compile)

    def raw(self, token: int) -> bytes:
        """Return a token's bytes, a special one's name; none for an id without a token."""
        known = token < self._tokenizer.vocab_size
        return self._tokenizer.decode_bytes([token]) if known else b""

    def constraint(self, schema: Mapping[str, Any]) -> "SchemaConstraint":
        """Return a constraint at its start; ValueError when the schema can't be followed.

        The first time it takes a millisecond; 60 for 2,000 properties, 3 s for the worst there is.
        The compiler leaves other threads running meanwhile.
        """
        # Not sorted: the order of the properties is part of what is asked for.
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from error
        return SchemaConstraint(self, self._grammar(text).deep_copy(), REACH + len(text))

    def _compile(self, text: str) -> LLMatcher:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"the schema has more than {MAX_CHARACTERS:,} characters")
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                text,
                overrides={  # What the schema itself says under "x-guidance" is overruled.
                    "item_separator": ", ?",
                    "key_separator": ": ?",
                    "whitespace_flexible": False,
                    "lenient": False,
                },
            )
        except ValueError as error:  # Nested too deeply; half a surrogate pair.
            raise ValueError(f"the schema can't be read: {error}") from error
        _check(json.loads(text))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_logit_bias()  # Some faults show only now, and some a little later.
            begun = matcher.deep_copy()
            begun.try_consume_tokens(self._tokenizer.tokenize_str('{"'))
            matcher = begun if begun.is_error() else matcher
        if matcher.is_error():
            line = matcher.get_error().partition("\n")[0]
            if line == "NoExtensionBias":
                line = "no document fits it"
            raise ValueError(f"the schema can't be followed: {line[:MAX_MESSAGE_CHARACTERS]}")
        return matcher


class SchemaConstraint:
    """Where one reply stands in its schema's grammar; for one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, reach: int) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._reach = reach
        self._way_out: list[int] | None = None  # ids, the end of the reply included if it takes one
        self._lost = False  # no way out was short enough
        # The document's last bytes, complete strings left out: with a quote, it is in a string.
        self._tail = b""

    @property
    def finished(self) -> bool:
        """Whether the document is complete and nothing can follow it."""
        return self._matcher.is_stopped()

    def allowed(self) -> Ids:
        """Return the ids that may come next, ascending.

        The end of the reply is among them where the document may end and may go on: `12`.
        Raises RuntimeError when the grammar proves too intricate to be followed.
        """
        # In an error the library allows the end, which would make half a document look whole.
        mask = np.array(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8))
        self._check_matcher()
        if not self._matcher.is_accepting():
            # Some tokenizers hold their end of a reply for plain text.
            mask[self._vocabulary.eos_ids] = 0
        ids = np.flatnonzero(mask)
        if len(self._tail) == MAX_DIGITS and self._tail.isdigit():
            others = np.setdiff1d(ids, self._vocabulary.digits)
            return others if len(others) else ids
        return ids

    def accept(self, token: int) -> None:
        """Take note of the id that was chosen; RuntimeError when it was not allowed."""
        self._matcher.consume_token(token)
        self._check_matcher()
        self._tail = _tail(self._tail + self._vocabulary.raw(token))

    def in_time(self, token: int, left: int) -> int:
        """Return `token`, or the one to take in its place so that the document ends in time.

        `token` is one of those allowed, `left` how many the reply may still have, this one
        included. What is returned has to be taken.
        """
        if left > self._reach or self._lost or token in self._vocabulary.eos_ids:
            return token
        if self._way_out is None:
            self._way_out = self._find_way_out([], left)
            if self._way_out is None:
                self._lost = True
                return token
        # Within a string most tokens leave the way out as it is, which is soon seen.
        if len(self._way_out) < left and self._completes([token, *self._way_out]):
            return token
        after = self._find_way_out([token], left - 1)
        if after is None:
            token, *after = self._way_out
        self._way_out = after
        return token

    def _completes(self, ids: list[int]) -> bool:
        """Whether the document is complete after these."""
        walk = self._matcher.deep_copy()
        ends = ids[-1] in self._vocabulary.eos_ids
        text = ids[:-1] if ends else ids
        if walk.try_consume_tokens(text) < len(text):
            return False
        complete: bool = walk.is_accepting() if ends else walk.is_stopped()
        return complete

    def _find_way_out(self, ids: list[int], limit: int) -> list[int] | None:
        """Return at most `limit` ids that complete the document after `ids`, or None."""
        walk = self._matcher.deep_copy()
        walk.try_consume_tokens(ids)
        tail = _tail(self._tail + b"".join(map(self._vocabulary.raw, ids)))
        found: list[int] = []
        while not walk.is_stopped() and len(found) <= limit:
            if walk.is_accepting():
                found += self._vocabulary.eos_ids[:1]
                break
            step = self._step_out(walk, b'"' in tail)
            if walk.try_consume_tokens(step) < len(step):
                return None
            found += step
            tail = _tail(tail + b"".join(map(self._vocabulary.raw, step)))
        return found if len(found) <= limit else None

    def _step_out(self, walk: LLMatcher, in_string: bool) -> list[int]:
        """What closes something if it can, else what has to come, else anything that may."""
        closing = self._vocabulary.quotes if in_string else self._vocabulary.closing
        for id in closing:
            if walk.validate_tokens([id]):
                return [id]
        forced: list[int] = walk.compute_ff_tokens()
        if forced:
            return forced
        allowed = np.flatnonzero(np.frombuffer(walk.compute_logit_bias(), np.uint8))
        return [int(allowed[0])]

    def _check_matcher(self) -> None:
        if self._matcher.is_error():
            line = self._matcher.get_error().partition("\n")[0]
            raise RuntimeError(f"the schema could not be followed: {line}")


def _tail(text: bytes) -> bytes:
    """The end of a document without its complete strings: with a quote, it ends in a string."""
    tail = _STRING.sub(b"", text)
    return tail if b'"' in tail else tail[-MAX_DIGITS:]


def _check(schema: object) -> None:
    """Refuse what takes minutes to compile, with ValueError that says where it is.

    To meet two regular expressions at once, an automaton needs the product of their states, and n
    of them the product of all. Schemas meet where one object combines them (`allOf`, or two of
    `$ref`, `anyOf`, ... side by side), so that is limited to what can't multiply automata.
    """
    for where, part in _parts(schema):
        try:
            _check_part(part)
        except ValueError as error:
            raise ValueError(f"{error}, at {where}") from None


def _check_part(part: dict[str, Any]) -> None:
    combining = [name for name in _COMBINING if name in part]
    if len(combining) > 1:
        raise ValueError(f"{' and '.join(combining)} side by side are not supported")
    for name in _AUTOMATA:
        if combining and name in part:
            raise ValueError(f"{name} beside {combining[0]} is not supported")
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        raise ValueError("allOf of more than one schema is not supported")
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        raise ValueError("$ref must be # or #/$defs/NAME")
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise ValueError(f"patternProperties must be at most {MAX_PATTERN_PROPERTIES}")
    if _optional(part) > MAX_OPTIONAL_PROPERTIES:
        limit = f"more than {MAX_OPTIONAL_PROPERTIES} properties that are not required"
        raise ValueError(f"{limit} are not supported")
    digits = Decimal(str(_number(part.get("multipleOf")))).normalize().as_tuple().digits
    if len(digits) > MAX_MULTIPLE_DIGITS:
        raise ValueError(f"multipleOf must have at most {MAX_MULTIPLE_DIGITS} digits")


def _parts(schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, itself first, with its place; schemas that are `true` left out.

    The place is a JSON pointer as a fragment (RFC 6901 section 6), cut where names are long.
    """
    waiting = [("#", schema)]
    while waiting:
        where, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield where, part
        inner: list[tuple[object, Any]] = [(name, part[name]) for name in _SINGLE if name in part]
        for name in _NAMED:
            if isinstance(part.get(name), dict):
                inner += [(f"{name}/{key}", value) for key, value in part[name].items()]
        for name in _LISTED:
            if isinstance(part.get(name), list):
                inner += [(f"{name}/{place}", value) for place, value in enumerate(part[name])]
        waiting += [(f"{where}/{name}"[:MAX_MESSAGE_CHARACTERS], value) for name, value in inner]


def _optional(part: dict[str, Any]) -> int:
    """How many properties need not be there; 0 where the compiler will refuse what is given."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return 0
    return len(properties) - sum(isinstance(name, str) and name in properties for name in required)


def _number(value: object) -> int | float:
    """A number as it is, anything else, which the compiler will refuse, as 1."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 1

"""JSON schemas: what is allowed, what is refused, and that real replies fit."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Sequence

import pytest
import tiny
from fakes import EOS, FakeModel
from require import require

require("torch")
require("llguidance")
transformers = require("transformers")
jsonschema = require("jsonschema")

import constraint  # noqa: E402
import lm  # noqa: E402
from engine import Engine  # noqa: E402
from generation import BadRequest, Generation, GenerationError, SamplingParams  # noqa: E402
from weights import ModelError  # noqa: E402

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}


def obj(**properties):
    """An object as OpenAI's strict mode wants it: all required, nothing else allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array(items, **limits):
    return {"type": "array", "items": items, **limits}


FLAT = obj(name=STRING, age=INTEGER, member=BOOLEAN)
NESTED = obj(
    title=STRING,
    author=obj(name=STRING, born={**INTEGER, "minimum": 1500, "maximum": 2020}),
    publisher=obj(city=STRING, address=obj(street=STRING, number=INTEGER)),
)
ENUMS = obj(
    color={"enum": ["red", "green", "blue"]},
    size={"enum": [1, 2, 3, None]},
    mood={"type": "string", "enum": ["grün", 'sehr "gut"']},
)
ARRAYS = obj(
    items=array(obj(name=STRING, price=NUMBER), minItems=1),
    tags=array(STRING),
)
NUMBERS = obj(
    x=NUMBER,
    y={**NUMBER, "minimum": -1, "maximum": 1},
    n={**INTEGER, "minimum": 0, "maximum": 9},
    half={**NUMBER, "multipleOf": 0.5},
)
SCHEMAS = {"flat": FLAT, "nested": NESTED, "enums": ENUMS, "arrays": ARRAYS, "numbers": NUMBERS,
           "any": {"type": "object"}}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_tiny_model(tmp_path_factory.mktemp("constraint") / "tiny-llama")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return constraint.Vocabulary(tokenizer, frozenset({0, 2}))


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Text to ids, a byte each."""
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


def outcome(vocabulary, ids: Sequence[int], schema) -> str:
    """ "complete", "open" (may end, may go on), "prefix", or "refused"."""
    walk = vocabulary.constraint(schema)
    for id in ids:
        if walk.finished or id not in walk.allowed():
            return "refused"
        walk.accept(id)
    if walk.finished:
        return "complete"
    return "open" if 2 in walk.allowed() else "prefix"


DOCUMENTS = [
    ("flat", FLAT, '{"name":"x","age":3,"member":true}', "complete"),
    ("half of it", FLAT, '{"name":"x","age":3', "prefix"),
    ("a space after , and :", FLAT, '{"name": "x", "age": 3, "member": false}', "complete"),
    ("two spaces", FLAT, '{"name":  ', "refused"),
    ("a space before :", FLAT, '{"name" ', "refused"),
    ("a space before a name", FLAT, "{ ", "refused"),
    ("a line end", FLAT, '{"name":\n', "refused"),
    ("a space first", FLAT, " ", "refused"),
    ("the order is the schema's", FLAT, '{"a', "refused"),
    ("required", FLAT, "{}", "refused"),
    ("nothing additional", FLAT, '{"name":"x","age":3,"member":true,', "refused"),
    ("optional", {**FLAT, "required": ["age"]}, '{"age":3}', "complete"),
    ("additional", {"type": "object", "additionalProperties": INTEGER}, '{"q":3}', "complete"),
    ("any object", {"type": "object"}, '{"q": [1, {"r": null}], "s": {}}', "complete"),
    ("any object, no array", {"type": "object"}, "[", "refused"),
    ("anything", {}, '[1, "x"]', "complete"),
    ("any characters", STRING, '"é 😀 \\n \\" \\\\"', "complete"),
    ("a bare line end", STRING, '"\n', "refused"),
    ("half a surrogate pair", STRING, '"\\ud800', "refused"),
    ("half a character", STRING, '"é', "prefix"),
    ("enum", ENUMS, '{"color":"red","size":null,"mood":"grün"}', "complete"),
    ("not in the enum", ENUMS, '{"color":"y', "refused"),
    ("a control character", {"const": "a\x01"}, '"a\\u0001"', "complete"),
    ("a number may go on", INTEGER, "12", "open"),
    ("no zero first", INTEGER, "01", "refused"),
    ("no plus", INTEGER, "+", "refused"),
    ("no fraction", INTEGER, "1.", "refused"),
    ("no NaN", NUMBER, "N", "refused"),
    ("an exponent", NUMBER, "-1.5e-7", "open"),
    ("below the maximum", {**INTEGER, "maximum": 12}, "13", "refused"),
    ("17 digits", NUMBER, "1" * 17, "open"),
    ("18 digits", NUMBER, "1" * 18, "refused"),
    ("17 and a fraction", NUMBER, "1" * 17 + "." + "1" * 17, "open"),
    ("18 of a fraction", NUMBER, "0." + "1" * 18, "refused"),
    ("18 where it must be", {"const": 10**17}, "1" + "0" * 17, "complete"),
    ("18 in a string", array(STRING), '["\\"' + "1" * 18 + '"]', "complete"),
    ("18 after a string", array({}), '["\\\\", ' + "1" * 18, "refused"),
    ("items", array(INTEGER, minItems=1, maxItems=2), "[1, 2]", "complete"),
    ("too few", array(INTEGER, minItems=1), "[]", "refused"),
    ("too many", array(INTEGER, maxItems=2), "[1,2,", "refused"),
    ("anyOf", {"anyOf": [STRING, {"type": "null"}]}, "null", "complete"),
    ("types", {"type": ["boolean", "integer"]}, "true", "complete"),
    ("pattern", {**STRING, "pattern": "^[a-c]{2}$"}, '"ab"', "complete"),
    ("pattern missed", {**STRING, "pattern": "^[a-c]{2}$"}, '"ad', "refused"),
    ("length", {**STRING, "maxLength": 2}, '"abc', "refused"),
    ("format", {**STRING, "format": "date"}, '"2024-02-29"', "complete"),
    (
        "recursion",
        {"$ref": "#/$defs/n", "$defs": {"n": obj(c=array({"$ref": "#/$defs/n"}))}},
        '{"c":[{"c":[]}]}',
        "complete",
    ),
    (
        "x-guidance is overruled",
        {**FLAT, "x-guidance": {"whitespace_flexible": True}},
        "{ ",
        "refused",
    ),
]


@pytest.mark.parametrize(
    ("schema", "text", "expected"), [case[1:] for case in DOCUMENTS], ids=[c[0] for c in DOCUMENTS]
)
def test_documents(vocabulary, ids, schema, text, expected):
    given = ids(text)[:-1] if expected == "prefix" and not text.isascii() else ids(text)
    assert outcome(vocabulary, given, schema) == expected


DEEP = {}
for _ in range(200):
    DEEP = {"items": DEEP}
BOTTOMLESS = {}
for _ in range(100_000):
    BOTTOMLESS = {"items": BOTTOMLESS}


def optional(count):
    return {"type": "object", "properties": {f"name {n}": STRING for n in range(count)}}


REFUSED = [
    ("unknown type", {"type": "strin"}, "Invalid type"),
    ("not", {"not": STRING}, 'Unimplemented keys: \\["not"\\]'),
    ("if", {"if": STRING}, "Unimplemented"),
    ("uniqueItems", array(STRING, uniqueItems=True), "Unimplemented"),
    ("lenient is overruled", {"x-guidance": {"lenient": True}, "not": STRING}, "Unimplemented"),
    ("unknown format", {**STRING, "format": "zzz"}, "Unknown format"),
    ("look-ahead", {**STRING, "pattern": "(?=x)y"}, "regex"),
    ("properties", {"properties": 5}, "properties must be an object"),
    ("patternProperties", {"patternProperties": 5}, "can't be followed"),
    ("items", {"items": 5}, "object or boolean"),
    ("multipleOf", {"multipleOf": "x"}, "multipleOf"),
    ("nothing fits", {**INTEGER, "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ("nothing fits: enum", {"enum": []}, "Unsatisfiable"),
    ("nothing fits: loop", {"$ref": "#"}, "no document fits"),
    (
        "nothing fits: no end",
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "no doc",
    ),
    ("no such definition", {"$ref": "#/$defs/nope"}, "does not exist"),
    ("someone else's definition", {"$ref": "http://example.com/x"}, "\\$ref must be"),
    ("a definition elsewhere", {"$ref": "#/default", "default": STRING}, "\\$ref must be"),
    ("a reference that is none", {"$ref": 5}, "\\$ref must be"),
    ("not JSON", {"const": {1, 2}}, "not JSON"),
    ("NaN", {"const": float("nan")}, "not JSON"),
    ("half a surrogate pair", {"const": "\ud800"}, "can't be read"),
    ("deep", DEEP, "recursion"),
    ("bottomless", BOTTOMLESS, "not JSON"),
    ("long", {"enum": ["x" * 100_000]}, "100,000 characters"),
    # What would take minutes and more.
    ("automata meet", {"allOf": [{**STRING, "pattern": "x"}] * 2}, "allOf of more than one"),
    ("inside", obj(a=array({"allOf": [STRING] * 2})), "supported, at #/properties/a/items"),
    ("in a definition", {"$defs": {"a": {"allOf": [STRING] * 2}}}, "at #/\\$defs/a"),
    ("in an alternative", {"anyOf": [{"allOf": [STRING] * 2}]}, "at #/anyOf/0"),
    ("by reference", {"$ref": "#", "pattern": "x"}, "pattern beside \\$ref"),
    ("by alternative", {"anyOf": [STRING], "multipleOf": 3}, "multipleOf beside anyOf"),
    ("references meet", {"$ref": "#", "allOf": [STRING]}, "\\$ref and allOf side by side"),
    ("long division", {**NUMBER, "multipleOf": 1237}, "at most 3 digits"),
    ("patterns meet", {"patternProperties": {f"^{i}$": {} for i in range(17)}}, "at most 16"),
    ("all may come next", optional(401), "more than 400 properties that are not required"),
    ("further down", obj(a=array(optional(401))), "not supported, at #/properties/a/items"),
    ("together", {"anyOf": [optional(400)] * 2}, "items; max is 2000"),
]


@pytest.mark.parametrize(
    ("schema", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(vocabulary, schema, message):
    with pytest.raises(ValueError, match=message) as caught:
        vocabulary.constraint(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "schema",
    [
        obj(allOf=STRING, pattern=STRING, **{"$ref": STRING}),  # Names of properties are names.
        {"allOf": [FLAT], "description": "as pydantic writes a field's reference"},
        {"const": {"allOf": [1, 2], "multipleOf": 12345}},
        {**NUMBER, "multipleOf": 0.125},
        optional(400),
        obj(**{f"name {n}": STRING for n in range(2000)}),
        {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True},
    ],
)
def test_not_refused(vocabulary, ids, schema):
    walk = vocabulary.constraint(schema)
    assert len(walk.allowed())
    for id in ids('{"') if schema.get("type") == "object" else ():
        walk.accept(id)
        assert len(walk.allowed())


def drawn(vocabulary, schema, limit: int, draw: random.Random):
    """Ids at random up to a limit; None when the document is not complete by then."""
    walk = vocabulary.constraint(schema)
    text = []
    for left in range(limit, 0, -1):
        id = walk.in_time(draw.choice(walk.allowed().tolist()), left)
        if id in vocabulary.eos_ids:
            return text
        text.append(id)
        walk.accept(id)
        if walk.finished:
            return text
    return None


NODE = obj(value=STRING, children=array({"$ref": "#/$defs/node"}))
ENDLESS = {
    **SCHEMAS,
    "a string": STRING,
    "a number": NUMBER,
    "anything": {},
    "wide items": array(obj(**{f"field {n}": STRING for n in range(9)})),
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "optional": {"type": "object", "properties": {"a": STRING, "next": {"$ref": "#"}}},
    "at least": obj(a={**STRING, "minLength": 9}, b=array(INTEGER, minItems=4)),
    "a pattern": obj(a={**STRING, "pattern": "^[a-c]{3,9}-x$"}),
}


class TestConstraint:
    def test_an_id_that_is_not_allowed_is_an_error_and_stays_one(self, vocabulary, ids):
        walk = vocabulary.constraint(FLAT)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="could not be followed"):
                walk.accept(ids("x")[0])
            with pytest.raises(RuntimeError, match="could not be followed"):
                walk.allowed()

    def test_two_replies_walk_apart(self, vocabulary, ids):
        first, second = vocabulary.constraint(FLAT), vocabulary.constraint(FLAT)
        first.accept(ids("{")[0])
        assert list(second.allowed()) == ids("{")
        assert list(first.allowed()) == ids('"')

    def test_an_end_that_is_a_text_as_well_ends_no_half_document(self, tokenizer, ids):
        percent = ids("%")[0]
        vocabulary = constraint.Vocabulary(tokenizer, frozenset({2, percent}))
        assert outcome(vocabulary, ids('"%'), STRING) == "refused"

    def test_ids_ascend_and_none_is_special(self, vocabulary):
        allowed = vocabulary.constraint({}).allowed()
        assert list(allowed) == sorted(allowed)
        assert min(allowed) > 2

    def test_a_schema_is_compiled_once_and_few_are_kept(self, tokenizer, monkeypatch):
        monkeypatch.setattr(constraint, "KEPT_GRAMMARS", 3)
        vocabulary = constraint.Vocabulary(tokenizer, frozenset({2}))
        for name in "aababcdeaa":
            vocabulary.constraint(obj(**{name: STRING}))
        assert vocabulary._grammar.cache_info()[:] == (4, 6, 3, 3)

    def test_from_many_threads_at_once(self, vocabulary, ids):
        found = []

        def work(i):
            schema = obj(**{f"name{i % 5}": STRING})
            found.append(outcome(vocabulary, ids(f'{{"name{i % 5}":"x"}}'), schema))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == ["complete"] * 40

    @pytest.mark.parametrize("name", SCHEMAS)
    def test_whatever_is_drawn_the_document_fits(self, vocabulary, tokenizer, name):
        draw = random.Random(name)
        for _ in range(10):
            walk, reply = vocabulary.constraint(SCHEMAS[name]), []
            while not walk.finished:
                allowed = list(walk.allowed())
                # Of the bytes of a string few are its end: it is taken often.
                ends = [id for id in allowed if vocabulary.raw(id) in (b'"', b"}", b"]", b",")]
                reply.append(draw.choice(ends if ends and draw.random() < 0.3 else allowed))
                walk.accept(reply[-1])
            jsonschema.validate(json.loads(tokenizer.decode(reply)), SCHEMAS[name])

    @pytest.mark.parametrize("name", ENDLESS)
    def test_whatever_is_drawn_it_ends_in_time(self, vocabulary, tokenizer, name):
        """At every limit that has room for the way out from the start, and at no smaller one."""
        schema = ENDLESS[name]
        at_least = len(vocabulary.constraint(schema)._find_way_out([], 1000))
        for room in [*range(12), 50, 300]:
            text = drawn(vocabulary, schema, at_least + room, random.Random(room))
            jsonschema.validate(json.loads(tokenizer.decode(text)), schema)
        assert drawn(vocabulary, schema, at_least - 1, random.Random(1)) is None

    def test_what_has_room_is_left_alone(self, vocabulary, ids):
        walk = vocabulary.constraint(FLAT)
        text = ids('{"name": "x", "age": 3, "member": true}')
        for left, id in zip(range(len(text), 0, -1), text, strict=True):
            assert walk.in_time(id, left) == id
            walk.accept(id)
        assert walk.finished

    def test_a_tokenizer_that_grammars_can_t_be_matched_with(self):
        tokenizers = require("tokenizers")
        words = {"[UNK]": 0, "a": 1, "##b": 2, "<end>": 3}
        backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
        backend.decoder = tokenizers.decoders.WordPiece()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(ModelError, match="choose another"):
            constraint.Vocabulary(tokenizer, frozenset({3}))


async def collect(generation: Generation) -> str:
    return "".join([piece async for piece in generation])


TEXT = '{"a": "é", "b": [1, 2]}'
CONST = {"const": {"a": "é", "b": [1, 2]}}


class TestEngine:
    async def ask(self, model, prompt="x", **params):
        engine = Engine(model)
        engine.start()
        try:
            generation = engine.submit(prompt, SamplingParams(**{"schema": CONST, **params}))
            return await collect(generation), generation
        finally:
            engine.close()

    async def test_the_reply_ends_by_itself(self):
        text, generation = await self.ask(FakeModel())
        assert text == TEXT
        assert generation.finish_reason == "stop"
        assert generation.completion_tokens == len(text.encode())

    async def test_cut_at_the_token_limit(self):
        length = len(TEXT.encode())
        text, generation = await self.ask(FakeModel(), max_tokens=length - 1)
        assert (text, generation.finish_reason) == (TEXT[:-1], "length")
        text, generation = await self.ask(FakeModel(), max_tokens=length)
        assert (text, generation.finish_reason) == (TEXT, "stop")

    async def test_what_a_stop_string_holds_is_given_out_at_the_end(self):
        text, generation = await self.ask(FakeModel(), stop=("}\n",))
        assert (text, generation.matched_stop) == (TEXT, None)

    async def test_a_stop_string_still_cuts(self):
        text, generation = await self.ask(FakeModel(), stop=(', "b',))
        assert (text, generation.finish_reason) == ('{"a": "é"', "stop")

    async def test_only_the_reply_with_the_schema_is_kept_to_it(self):
        engine = Engine(FakeModel())
        engine.start()
        free = SamplingParams(max_tokens=30, seed=1)
        alone = await collect(engine.submit("x", free))
        held = SamplingParams(schema=CONST)
        mixed = [engine.submit("x", params) for params in (free, held, free)]
        assert await asyncio.gather(*map(collect, mixed)) == [alone, TEXT, alone]
        engine.close()

    async def test_a_schema_that_can_t_be_followed_names_its_field(self):
        with pytest.raises(BadRequest, match="needs a const") as caught:
            await self.ask(FakeModel(), schema={})
        assert caught.value.field == "schema"

    async def test_a_fault_of_the_constraint_ends_its_reply_alone(self, monkeypatch):
        monkeypatch.setattr("fakes.FakeConstraint.allowed", lambda self: [EOS - 1])
        with pytest.raises(GenerationError):
            await self.ask(FakeModel())


WAYS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1, "top_p": 1},
    {"temperature": 2, "top_k": 3, "top_p": 0.5},
]
SHORT = obj(
    name={**STRING, "maxLength": 5}, on=BOOLEAN, n=array({"enum": [1, 22, "é"]}, maxItems=3)
)


class TestTinyModel:
    """A random model on real grammars: nonsense that fits."""

    async def replies(self, folder, rows, fixed=False):
        model = lm.LanguageModel.load(
            str(folder), device="cpu", dtype="float32", rows=rows, context=200
        )
        model.fixed = fixed
        engine = Engine(model)
        engine.start()
        given = [
            SamplingParams(max_tokens=120, seed=seed, schema=SHORT, **params)
            for seed, params in enumerate(WAYS * 2)
        ]
        try:
            generations = [engine.submit("some prompt", params) for params in given]
            texts = await asyncio.gather(*map(collect, generations))
        finally:
            engine.close()
        assert {generation.finish_reason for generation in generations} == {"stop"}
        return texts

    @pytest.mark.parametrize("fixed", [False, True])
    async def test_all_fit_and_are_the_same_in_company(self, folder, fixed):
        alone = await self.replies(folder, 1, fixed)
        for text in alone:
            jsonschema.validate(json.loads(text), SHORT)
        assert await self.replies(folder, 5, fixed) == alone
        assert len(set(alone)) > 2


QUESTIONS = {
    "flat": "Describe a person as JSON.",
    "nested": "Describe a book as JSON.",
    "enums": "Pick a color, a size and a mood, as JSON.",
    "arrays": "Write a shopping list as JSON.",
    "numbers": "Give me some numbers as JSON.",
    "any": "Describe a city as JSON.",
}


@pytest.mark.model
class TestRealModel:
    NUMBER = int(os.environ.get("CONSTRAINED_GENERATIONS", "8"))

    async def test_at_temperature_1_all_parse_and_fit(self, real_model):
        engine = Engine(real_model)
        engine.start()

        async def ask(seed: int) -> None:
            name = list(SCHEMAS)[seed % len(SCHEMAS)]
            params = SamplingParams(
                max_tokens=80, temperature=1, top_p=1, seed=seed, schema=SCHEMAS[name]
            )  # little: of unbounded strings and arrays, many would never end by themselves
            generation = engine.submit([{"role": "user", "content": QUESTIONS[name]}], params)
            text = await collect(generation)
            assert generation.finish_reason == "stop", f"{name}, seed {seed}: {text}"
            jsonschema.validate(json.loads(text), SCHEMAS[name])

        try:
            for start in range(0, self.NUMBER, 8):
                batch = range(start, min(start + 8, self.NUMBER))
                await asyncio.gather(*map(ask, batch))
        finally:
            engine.close()

    async def test_deterministic_alone_and_in_company(self, real_model):
        real_model.fixed = True
        engine = Engine(real_model)
        engine.start()

        def ask(name: str, **others: object) -> Generation:
            params = {"max_tokens": 24, "temperature": 1, "seed": 5, "schema": SCHEMAS[name]}
            prompt = [{"role": "user", "content": QUESTIONS[name]}]
            return engine.submit(prompt, SamplingParams(**{**params, **others}))

        try:
            alone = await collect(ask("flat"))
            company = [ask("flat"), ask("arrays"), ask("enums", schema=None), ask("flat")]
            texts = await asyncio.gather(*map(collect, company))
        finally:
            engine.close()
            real_model.fixed = False
        assert texts[0] == texts[3] == alone

    def test_every_token_s_bytes_are_its_text(self, real_model):
        """What the grammar is matched with, and what log probabilities tell, is what is written."""
        for id in range(0, 49152, 7):
            name, raw = real_model.token(id)
            assert raw.decode(errors="replace") == real_model.text([id])
            assert name

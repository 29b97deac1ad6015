"""What the providers' requests have in common: turns in parts, tools, formats, sampling.

    content  "Hi"  or  [{"type": "text", "text": "Hi"}]       -> text_of        -> "Hi"
    tools, tool_choice                                        -> chosen_tool    -> the one to call
    messages, and the one to call                             -> calling        -> messages
    a format (text, json_object, json_schema)                 -> format_schema  -> a JSON schema
    max_tokens, temperature ... by each provider's names      -> parse_sampling -> SamplingParams

Three rules hold for all of them. A field that nobody knows is ignored, since clients of every kind
send their own. One that is known and can't be had here is refused by its name, unless its value
asks for nothing. More tokens than the context holds may be asked for: the context is the limit.

The function that has to be called is described to the model, in a system message: the reply is only
its arguments. (Chat templates that know of tools ask for a call with its name around them, which
the constraint rules out.) A format is not: it is enforced, and what the model is told of it is the
client's to say, as OpenAI has it.

Not here: what differs, which stands with each format. Read next: `completions.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asks import stops
from generation import MAX_TOKENS, BadRequest, SamplingParams

# What a provider's client gets that does not say: as much as the context holds, drawn from the
# model's own distribution.
DEFAULTS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0}
# OpenAI's top_p begins at 0, ours above it. Both leave the likeliest token alone.
LEAST_TOP_P = 1e-9
# A schema without any of these fits what is no object, too, whatever its properties.
SAYS_WHAT = ("type", "const", "enum", "$ref", "anyOf", "allOf", "oneOf")
ANY_OBJECT: dict[str, Any] = {"type": "object"}

Object = Mapping[str, Any]


def refuse(body: Object, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `BadRequest` for a field that is known and not supported.

    Each comes with the values that ask for nothing and are let through.
    """
    for name, harmless in unsupported.items():
        if name in body and not any(_same(body[name], value) for value in harmless):
            raise BadRequest(f"{name} is not supported here", name)


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)  # True is 1 to Python


def objects(body: Object, name: str, within: str = "") -> list[tuple[str, Object]]:
    """The objects of a list that has to be there, each with its place in words.

    `within` is the place of `body` itself, where that is not the request.
    """
    items = body.get(name)
    name = within + name
    if not isinstance(items, list) or not items:
        raise BadRequest(f"{name} must be a list that is not empty", name)
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"{name}[{number}] must be an object", f"{name}[{number}]")
    return [(f"{name}[{number}]", item) for number, item in enumerate(items)]


def text_of(content: object, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a content: a string, or a list of parts of these kinds, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be a string or a list of parts", where)
    return "\n".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: object, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of one part."""
    if not isinstance(part, dict) or part.get("type") not in kinds:
        kind = part.get("type") if isinstance(part, dict) else None
        what = f"parts of type {kind[:100]!r}" if isinstance(kind, str) else "such parts"
        message = f"{where}: {what} are not supported here; send {' or '.join(kinds)}"
        raise BadRequest(message, where)
    name = "refusal" if part["type"] == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{name} must be a string", f"{where}.{name}")
    return text


@dataclass(frozen=True)
class Tool:
    """A function that may be called: in our words, where its schema stands, and as it was given."""

    name: str
    description: str
    schema: Object
    where: str
    given: Object


def tool_of(given: Object, where: str, key: str, default: Object | None) -> Tool:
    """Check a function; `key` is where its dialect has the schema, which is `default` if absent."""
    name, description = given.get("name"), given.get("description")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be a string", f"{where}.name")
    if not isinstance(description, str | None):
        raise BadRequest(f"{where}.description must be a string", f"{where}.description")
    at = f"{where}.{key}"
    if given.get(key) is None and default is not None:
        given = {**given, key: default}
    schema = schema_of(given, key, at) or default or ANY_OBJECT
    if schema.get("type", "object") != "object":  # arguments have names
        raise BadRequest(f"{at}.type must be object", f"{at}.type")
    if not any(keyword in schema for keyword in SAYS_WHAT):
        schema = {"type": "object", **schema}
    return Tool(name, description or "", schema, at, given)


def given_tools(body: Object, read: Callable[[Object, str], Tool]) -> list[Tool]:
    """The tools of a request; `read` knows the form that a dialect gives them."""
    if body.get("tools", []) == []:
        return []
    return [read(tool, where) for where, tool in objects(body, "tools")]


def chosen_tool(tools: list[Tool], choice: str, name: object = None) -> Tool | None:
    """The tool that has to be called: the one named, or the only one where one is "required".

    With "auto" the model may always answer in words, and so it does.
    """
    if choice in ("auto", "none"):
        return None
    if choice == "required":
        if len(tools) != 1:
            raise BadRequest("tool_choice must name one of several tools", "tool_choice")
        return tools[0]
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise BadRequest("tool_choice names a tool that is not among tools", "tool_choice")
    return tool


def calling(chat: list[dict[str, Any]], tool: Tool | None) -> list[dict[str, Any]]:
    """The chat with words on the function that the reply has to call, if there is one."""
    if tool is None:
        return chat
    described = f": {tool.description}" if tool.description else "."
    text = (
        f"Call the function {tool.name}{described}\n"
        f"Its parameters, as a JSON schema: {json.dumps(tool.schema, ensure_ascii=False)}\n"
        "Answer with the JSON object of its arguments and nothing else."
    )
    # Many templates take one system message, and only as the first.
    if chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def format_schema(format: object, where: str, at: str) -> Object | None:
    """The JSON schema that a format asks for, which stands at `at`; None for text."""
    kind = format.get("type") if isinstance(format, dict) else format
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema" or not isinstance(format, dict):
        raise BadRequest(f"{where} must be text, json_object or json_schema", where)
    return schema_of(format, "schema", at)


def schema_of(holder: Object, name: str, where: str) -> Object:
    """A JSON schema that has to be an object."""
    schema = holder.get(name)
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} must be an object", where)
    return schema


def _in_our_range(given: Object) -> dict[str, Any]:
    """What a provider's range has and ours has not: a seed is theirs with a sign (64 bits), top_p
    may be 0; and vLLM's clients say -1 where there is no top_k."""
    ours: dict[str, Any] = {}
    seed, top_k, top_p = (given.get(name) for name in ("seed", "top_k", "top_p"))
    if type(seed) is int and -(2**63) <= seed < 0:
        ours["seed"] = seed + 2**64
    if type(top_k) is int and top_k == -1:
        ours["top_k"] = 0
    if type(top_p) in (int, float) and top_p == 0:
        ours["top_p"] = LEAST_TOP_P
    return ours


def parse_sampling(
    body: Object, names: Mapping[str, str], schema: Object | None = None
) -> SamplingParams:
    """Read the sampling fields; `names` says what each is called by the provider."""
    given = {ours: body[theirs] for theirs, ours in names.items() if theirs in body}
    tokens = given.get("max_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        given["max_tokens"] = min(tokens, MAX_TOKENS)
    given.update(_in_our_range(given))
    if schema is not None:
        given["schema"] = schema
    try:
        if "stop" in given:
            given["stop"] = stops(given["stop"])
        return SamplingParams(**{**DEFAULTS, **given})
    except BadRequest as error:
        theirs = {ours: theirs for theirs, ours in names.items()}.get(error.field or "")
        if theirs is None or error.field is None:
            raise
        raise BadRequest(str(error).replace(error.field, theirs, 1), theirs) from error

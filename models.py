"""What is served: the model's names, and what holds for every reply on the providers' routes.

    GET /v1/models           OpenAI's list, or Anthropic's to a request with `anthropic-version`
    GET /v1/models/NAME      one of them

One model is served, by the name that `/health` tells; "default" is another name for it, and
`--alias` gives it more, so that a program with a name built in can be pointed here. Behind
`--upstream` these are names for one of the models there, and the others have their own. A reply
calls the model what its request did.

OpenAI API reference: Models. Anthropic API reference: Models.
Read next: `chats.py`, what their requests have in common.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from generation import MAX_TOKENS, BadRequest

DEFAULT = "default"
ANY = "*"  # as an alias: every name will do
MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True)
class Served:
    """One model and its settings, the same for each of the providers' dialects.

    `context`: tokens of prompt and reply together. `default_tokens`: for a request that does not
    say how many it wants; None for as many as the context holds. `simulation_names`: what can be
    asked of the simulated engine. `heartbeat_events`: a silence is broken by an event that
    says nothing instead of a comment, where there is such an event. `pad`: see `obfuscation` in
    `completions.py`. `listed`: the names that another server has for its models, behind which this
    one stands.
    """

    name: str = DEFAULT
    aliases: tuple[str, ...] = ()
    context: int = MAX_TOKENS
    default_tokens: int | None = None
    simulation_names: tuple[str, ...] = ()
    heartbeat_events: bool = False
    pad: bool = False
    listed: Callable[[], Sequence[str]] = tuple
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> list[str]:
        """Every name that a request may give, the model's own first."""
        aliases = (alias for alias in self.aliases if alias != ANY)
        return list(dict.fromkeys([*self.listed(), self.name, DEFAULT, *aliases]))

    @property
    def fingerprint(self) -> str:
        """The same as long as the same model is served in the same way."""
        facts = f"{self.name} {self.context}"
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:10]}"

    def knows(self, name: str) -> bool:
        """Whether the model is served by this name."""
        return name in self.names or (ANY in self.aliases and 0 < len(name) <= MAX_NAME_CHARACTERS)

    def model(self, body: Mapping[str, Any]) -> str:
        """The name that a request gives the model; its own to one that gives none."""
        name = body.get("model", self.name)
        if not isinstance(name, str):
            raise BadRequest("model must be a string", "model")
        if not self.knows(name):
            names = " or ".join(repr(name) for name in self.names)
            message = (
                f"the model {name[:MAX_NAME_CHARACTERS]!r} is not served here; ask for {names}"
            )
            raise BadRequest(message, "model", "model_not_found")
        return name

    def max_tokens(self, asked: Any = None) -> Any:
        """How many tokens a reply may have: what was asked for, as it is.

        The engine ends it where its context ends; what is no number, `SamplingParams` refuses.
        """
        return (self.default_tokens or self.context) if asked is None else asked


def openai_model(served: Served, name: str) -> dict[str, Any]:
    """A model as OpenAI describes it."""
    return {"id": name, "object": "model", "created": served.created, "owned_by": "local"}


def openai_models(served: Served) -> dict[str, Any]:
    """All names, in OpenAI's shape."""
    return {"object": "list", "data": [openai_model(served, name) for name in served.names]}


def anthropic_model(served: Served, name: str) -> dict[str, Any]:
    """A model as Anthropic describes it."""
    context = served.context if served.context < MAX_TOKENS else None
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(served.created))
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None,
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


def anthropic_models(served: Served) -> dict[str, Any]:
    """All names, in Anthropic's shape: one page that has them all."""
    models = [anthropic_model(served, name) for name in served.names]
    return {
        "data": models,
        "has_more": False,
        "first_id": models[0]["id"],
        "last_id": models[-1]["id"],
    }

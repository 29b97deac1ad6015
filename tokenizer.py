"""Prompts: a chat or a text to token ids, and ids to text.

    [{"role": "user", "content": "Hi"}] -> chat template -> "<|im_start|>user\\nHi<|im_end|>\\n..."
                                        -> tokenizer -> [1, 4093, 198, 26843, 2, 198, ...]

A model knows who speaks by special tokens, ids that no text has of its own. Here only the template
writes them. Where a client's text spells one, `<|im_end|>` in a message or in a plain prompt, it is
encoded as the characters it is made of: no message can end itself and go on in another role.

To that end a character that no valid text can hold is put into the client's `<|im_end|>` before the
template sees it. Afterwards every special token found is the template's; the text between them is
freed of that character and encoded by a tokenizer that is blind to special tokens.

A chat whose last message is the assistant's is continued: the template ends inside that message,
and the reply goes on where it left off.

Not here: tools, images and other parts of a message than its text; cutting ids into pieces of text
(`detokenizer.py`).

Read next: `sampling.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from weights import ModelError

Message = Mapping[str, object]

# What a message's role may be: templates paste it between their markers as it is.
ROLES = ("system", "user", "assistant", "tool")

# A lone surrogate. No valid text holds one, so that it marks a place in a client's text safely.
GUARD = "\ud800"


class ChatTokenizer:
    """The tokenizer and the chat template: prompts to ids, ids to text, in any thread."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ModelError("the model has no fast tokenizer (tokenizer.json): choose another")
        self._template = tokenizer
        self._marked: Tokenizer = tokenizer.backend_tokenizer
        self._marked.no_truncation()
        self._marked.no_padding()
        # The same, blind to special tokens: two, since the switch is not an argument of a call.
        self._plain = Tokenizer.from_str(self._marked.to_str())
        self._plain.encode_special_tokens = True
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: i for i, token in added if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return a prompt's ids; see `LanguageModel.encode`."""
        if isinstance(prompt, str):
            # A tokenizer that begins every text with a special token does so here too.
            ids = _ids(self._plain, _checked(prompt, "the prompt"), add_special_tokens=True)
        else:
            ids = self._encode_chat(_checked_chat(prompt))
        if not ids:
            raise ValueError("the prompt is empty")
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; see `LanguageModel.text`."""
        text: str = self._marked.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode_chat(self, chat: list[dict[str, str]]) -> list[int]:
        if not self._template.chat_template:
            raise ValueError("the model has no chat template: send a text instead of messages")
        guarded = [{**m, "content": self._special_re.sub(_guard, m["content"])} for m in chat]
        begun = chat[-1]["role"] == "assistant"  # the reply: continue it
        try:
            rendered = self._template.apply_chat_template(
                guarded,
                tokenize=False,
                add_generation_prompt=not begun,
                continue_final_message=begun,
            )
        except (TemplateError, TypeError) as error:  # Templates say no by raise_exception("...").
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except ValueError as error:  # transformers did not find the last message in what it made
            raise ValueError("the chat template can't end inside a reply to continue") from error
        if guarded == chat:
            return _ids(self._marked, rendered)
        # Cut at the special tokens, which are all the template's; unguard the text between them.
        ids: list[int] = []
        start = 0
        for match in self._special_re.finditer(rendered):
            ids += _ids(self._plain, rendered[start : match.start()].replace(GUARD, ""))
            ids.append(self._special[match[0]])
            start = match.end()
        return ids + _ids(self._plain, rendered[start:].replace(GUARD, ""))


def _guard(match: re.Match[str]) -> str:
    return match[0][0] + GUARD + match[0][1:]


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # The call for batches lets other threads run; `encode` would stop them, a second for 2 MB.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _checked(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half a surrogate pair, which is no character") from None
    return text


def _checked_chat(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return the role and content of each message; the template is given nothing else."""
    if not messages:
        raise ValueError("messages is empty")
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{number}] is not an object")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"messages[{number}].role is not one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"messages[{number}].content is not a string")
        what = f"messages[{number}].content"
        chat.append({"role": str(role), "content": _checked(content, what)})
    return chat

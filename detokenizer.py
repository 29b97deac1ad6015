"""Token ids to pieces of text that never split a character, and the stop strings that end them.

A tokenizer's `decode` is made for whole texts; ids decoded one at a time go wrong:

    tokens            one at a time     together     kind
    [E4 BD] [A0]      "�" "�"           "你"         byte-level: a token is any run of bytes
    [▁Hello] [▁you]   "Hello" "you"     "Hello you"  SentencePiece: a text's first space is dropped
    <0x41> <0xE4>     "A" "�"           "��"         byte fallback: a bad byte spoils its whole run
    [</s>]            ""                ""           special: skipped, even within a character

**Piece law.** For any ids, the joined pieces and the final flush equal `decode(all ids)`; nothing
sent is taken back; no piece ends in half a character. To decode the whole text again for each token
would do, in quadratic time. Here a short window of ids is decoded, and what it shows beyond the
text already sent is the next piece:

    ids     ... forgotten ... | context   E4 BD   A0
    window                    |  " how      你"           decoded again for each token
    sent    ------------------------->|                   the next piece: "你"

The context, one id or more, keeps the window from being the start of a text, where a space would be
dropped. The art is to know where a window may start:

- When its text does not end in U+FFFD, no byte is pending, and the last id is context enough.
- If it ends so for long, in a run of invalid bytes, anywhere: UTF-8 heals itself. Decoders that
  start at different places agree from the fourth byte on, so with enough ids kept, they differ
  only in text that was sent before.
- Never inside a run of byte tokens, where the tokenizer decodes byte fallback as the `tokenizers`
  library does: one bad byte turns all of the run into U+FFFD, back to its first. There a run, be
  it a lone <0x0A>, is held to its end. That delays some text, which the law demands.

A text may hold U+FFFD of its own; it looks like half a character and is sent a little later.

Not here: ids to token strings and bytes (the tokenizer's work: all is asked of `decode`, so every
tokenizer serves); clusters such as emoji joined by ZWJ, which arrive character by character.
Read next: `weights.py`, with which the model begins.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Half a character is three bytes at most, shown as one U+FFFD or as one for each byte.
MAX_HALF = 3

# Ids kept when the window is cut among halves, each of a byte or more: three bytes until decoders
# agree, and nine that the (at most three) held U+FFFD can stand for.
WINDOW = 12

# Texts of tokens that are remembered: most of a reply is made of few.
KNOWN_TOKENS = 2**14

# Where `_spoiler` looks for byte tokens: vocabularies have them near the start.
BYTE_TOKENS_BELOW = 1024


class Detokenizer:
    """Pieces of one text from its ids, one at a time, in constant time for each.

    `decode` is the tokenizer's, with special tokens skipped and no clean-up of spaces. Pass the
    same callable for every text: what it reveals of its kind is remembered.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # characters of the decoded window

    def add(self, token_id: int) -> str:
        """Return the text that is certain now and was not before; often "" within a character."""
        alone = _alone(self._decode, token_id)
        # A special token has no text; a space that is dropped alone shows when there are two.
        if not alone and not self._decode([token_id, token_id]):
            return ""
        self._window.append(token_id)
        if self._is_byte_token(token_id, alone):
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._add_half(text)
        piece = text[self._sent :]
        self._window = [token_id]
        self._sent = len(alone)
        return piece

    def finish(self) -> str:
        """Return what is still held, half a character as U+FFFD; the next id starts a new text."""
        piece = self._decode(self._window)[self._sent :] if self._window else ""
        self._window = []
        self._sent = 0
        return piece

    def _add_half(self, text: str) -> str:
        """Send what is certain of a text that may end in half a character."""
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HALF, len(text) - self._sent)
        piece = text[self._sent : len(text) - held]
        if len(self._window) >= 2 * WINDOW:
            self._window = self._window[-WINDOW:]
            text = self._decode(self._window)
        self._sent = len(text) - held
        return piece

    def _is_byte_token(self, token_id: int, alone: str) -> bool:
        """Whether this is a byte token that a bad neighbour would spoil, with its whole run."""
        if len(alone) > 1:
            return False
        spoiler = _spoiler(self._decode)
        if spoiler is None:
            return False
        return alone == REPLACEMENT or _spoils(self._decode, token_id, spoiler)


@lru_cache(maxsize=KNOWN_TOKENS)
def _alone(decode: Decode, token_id: int) -> str:
    return decode([token_id])


@lru_cache(maxsize=4)
def _spoiler(decode: Decode) -> int | None:
    """Return the id of half a character that spoils byte tokens beside it, None if none does.

    Tells byte fallback from the kinds that decode each character for itself, once per tokenizer.
    """
    halves, others = [], []
    for token_id in range(BYTE_TOKENS_BELOW):
        try:
            text = decode([token_id])
        except (LookupError, ValueError):  # past the vocabulary
            break
        if text == REPLACEMENT:
            halves.append(token_id)
        elif len(text) <= 1:
            others.append(token_id)
    if halves and any(_spoils(decode, token_id, halves[0]) for token_id in others):
        return halves[0]
    return None


def _spoils(decode: Decode, token_id: int, half: int) -> bool:
    return decode([token_id, half]) == 2 * REPLACEMENT


class StopStrings:
    """Ends a text before the first stop string, across any pieces; feed it the reply alone.

    The match that ends earliest wins; of those that end together, the longest. Text that may be
    the beginning of a stop string is held, and no more than that.

    Each stop string is matched by the algorithm of Knuth, Morris and Pratt, in time linear in the
    text whatever the text is: a character costs O(1) for each stop string on average, and a call
    O(longest stop string) besides, to copy what is held.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        # For each stop, how many of its characters the text now ends with.
        self._lengths = [0] * len(stops)
        self._held = ""

    def add(self, piece: str) -> str:
        """Return what may be sent; after a match the text up to it, then always ""."""
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        if not self._held and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            self.matched = self._advance(character)
            if self.matched is not None:
                self._held = ""
                return text[: end - len(self.matched)]
        certain = len(text) - max(self._lengths)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text still held: the reply ended, so no stop string will come of it."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Match one more character; return the longest stop string that ends with it."""
        matched = None
        for index, (stop, failure) in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = failure[length - 1]
            length += stop[length] == character
            self._lengths[index] = length
            if length == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest proper prefix that it also ends with."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        length += stop[length] == stop[index]
        table[index] = length
    return table

"""The diagnosis: a verdict on made-up dates is exact, and the tables say what each shape means."""

import random

import pytest

import diagnosis
from diagnosis import Kind, compare, diagnose, kinds
from measures import Arrival, ByteCount, Event, Failure, Mode, Reply

EVENT_BYTES = 27


def reply(dates, head=0.01, mode=Mode.SSE, **more):
    """A complete reply with text events at these dates, a read for each date."""
    made = Reply("http://x/stream", mode, status=200, first_byte=head, **more)
    made.events = [Event(at, "and ", "", EVENT_BYTES) for at in dates]
    content = 0
    for at in sorted(set(dates)):
        size = EVENT_BYTES * dates.count(at)
        content += size
        made.arrivals.append(Arrival(at, size, content))
    made.end = made.close = dates[-1] if dates else 1.0
    made.received = ByteCount(100, 0, content)
    return made


def steady(count, gap, first=0.05, jitter=0.0, seed=1):
    draw = random.Random(seed)
    dates, at = [], first
    for _ in range(count):
        dates.append(at)
        at += gap * (1 + draw.uniform(-jitter, jitter))
    return dates


def read_every(dates, tick):
    """The dates of a reader who looks only so often: what came since then comes together."""
    return [round(-(-at // tick) * tick, 9) for at in dates]


def blocks(dates, events):
    """The dates behind a hop that passes on so many events at a time, and the rest at the end."""
    last = len(dates) - 1
    return [dates[min(i // events * events + events - 1, last)] for i in range(len(dates))]


def spread_out(dates, s=0.0001):
    """Events of one burst in reads of their own, one behind the other."""
    return [at + i * s / 10 for i, at in enumerate(dates)]


WORDS = steady(120, 0.033, jitter=0.25)

PACES = [
    ("one by one", WORDS, [Kind.WELL]),
    ("5 a second, one thinks so", steady(30, 0.17), [Kind.WELL]),
    ("500 a second", steady(200, 0.002), [Kind.WELL]),
    ("500 a second, some in one read", read_every(steady(200, 0.002), 0.02), [Kind.WELL]),
    ("500 a second, a busy reader", read_every(steady(200, 0.002, first=0.4), 0.1), [Kind.WELL]),
    ("after a long prefill", steady(200, 0.002, first=5), [Kind.WELL]),
    ("held", [4.0] * 120, [Kind.HELD]),
    ("held, in several reads", spread_out([4.0] * 120), [Kind.HELD]),
    ("held but for the first", [0.05, *[4.0] * 119], [Kind.HELD]),
    ("blocks", blocks(WORDS, 30), [Kind.BUFFERED]),
    ("blocks and a rest", blocks(WORDS, 50), [Kind.BUFFERED]),
    ("blocks of a quick stream", blocks(steady(1000, 0.002), 178), [Kind.BUFFERED]),
    ("blocks, one of them soon after another",
     [*[0.4] * 16, *[0.49] * 16, *[0.9] * 16, *[1.2] * 16, *[1.5] * 16], [Kind.BUFFERED]),
    ("blocks, and a rest that trickles",
     [*[0.4] * 16, *[0.7] * 16, *[1.0] * 16, *[1.3 + i / 1000 for i in range(33)]],
     [Kind.BUFFERED]),
    ("two hiccups at the beginning", [*[0.4] * 10, *[0.6] * 10, *steady(80, 0.002, first=0.8)],
     [Kind.WELL]),
    ("two bursts around a steady stream",
     [*[0.4] * 30, *steady(40, 0.01, first=0.7), *[1.4] * 30], [Kind.WELL]),
    ("a window of 250 ms", blocks(steady(100, 0.05), 5), [Kind.BUFFERED]),
    ("four at a time is a batch", blocks(steady(100, 0.05), 4), [Kind.WELL]),
    ("one stall", [*steady(50, 0.03), *steady(50, 0.03, first=5)], [Kind.STALLS]),
    ("a stall, then what waited", [*steady(50, 0.03), *[5.0] * 20, *steady(50, 0.03, first=5.03)],
     [Kind.STALLS]),
    ("slow", steady(30, 0.2), [Kind.SLOW, Kind.WELL]),
    ("slow and stalling", [*steady(20, 0.2), *steady(20, 0.2, first=9)], [Kind.STALLS, Kind.SLOW]),
    ("few", steady(5, 0.03), [Kind.SHORT]),
    ("few at once", [2.0] * 7, [Kind.SHORT]),
    ("all at once, early", [0.05] * 50, [Kind.SHORT]),
    ("one", [2.0], [Kind.SHORT]),
    ("late", steady(60, 0.03, first=3), [Kind.LATE, Kind.WELL]),
]  # fmt: skip


@pytest.mark.parametrize(("dates", "expected"), [p[1:] for p in PACES], ids=[p[0] for p in PACES])
def test_paces(dates, expected):
    head = 0.01 if Kind.LATE in expected or dates[0] < 1 else dates[0]
    assert kinds(reply(dates, head)) == expected


def test_a_late_head_is_no_late_text():
    assert kinds(reply(steady(60, 0.03, first=3), head=2.9)) == [Kind.WELL]


def test_the_head_tells_what_was_held():
    early, late = (diagnose(reply([4.0] * 120, head))[0] for head in (0.01, 4.0))
    assert "the head came at 10.0 ms" in early.evidence
    assert "the head came with them" in late.evidence
    assert "120 of 120 text events within 0.0 ms, after 4,000.0 ms of silence" in early.evidence


@pytest.mark.parametrize("block", [1024, 4096, 8192, 16384])
def test_the_block_is_named(block):
    """A hop that passes on full blocks: the bytes of each burst are the block's size."""
    count = 4 * block // EVENT_BYTES
    dates = steady(count, 0.05)
    whole = [
        min((i * EVENT_BYTES // block + 1) * block // EVENT_BYTES, count - 1) for i in range(count)
    ]
    made = reply([dates[i] for i in whole])
    ends = sorted({e.at for e in made.events})
    made.arrivals = [
        Arrival(at, block, min((i + 1) * block, count * EVENT_BYTES)) for i, at in enumerate(ends)
    ]
    (diagnosis,) = diagnose(made)
    assert diagnosis.kind is Kind.BUFFERED
    assert f"each holds {block:,} bytes: blocks of {block // 1024} KiB" in diagnosis.evidence


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ([4096, 4096, 4096], 4096),
        ([3800, 4096, 4096], 4096),  # the head took some of the first buffer
        ([3248, 3250, 3247], 4096),  # chunk framing behind the hop took the rest
        ([1500, 900, 4000], None),
        ([8192], 8192),
        ([4096, 12288, 4096, 8192], 4096),  # blocks that came close to each other
        ([2979, 3000, 3072], 4096),
        ([300], None),
        ([], None),
        ([10_000_000], None),
    ],
)
def test_block_sizes(sizes, block):
    assert diagnosis.block_size(sizes) == block


ENDINGS = [
    ("truncated", Failure.TRUNCATED, [Kind.CUT, Kind.WELL]),
    ("clean, without a last word", Failure.NO_END_MARKER, [Kind.CUT, Kind.WELL]),
    ("an error in the stream", Failure.IN_BAND, [Kind.FAILED, Kind.WELL]),
    ("too long", Failure.TIMEOUT, [Kind.FAILED, Kind.WELL]),
    ("protocol", Failure.PROTOCOL, [Kind.FAILED, Kind.WELL]),
    ("left", Failure.CANCELLED, [Kind.WELL]),
]


@pytest.mark.parametrize(
    ("failure", "expected"), [e[1:] for e in ENDINGS], ids=[e[0] for e in ENDINGS]
)
def test_endings(failure, expected):
    made = reply(WORDS)
    made.fail(failure, "words")
    made.end = None
    assert kinds(made) == expected


REFUSALS = (Failure.CONNECT, Failure.TLS, Failure.STATUS, Failure.REDIRECT, Failure.CODING)


@pytest.mark.parametrize("failure", REFUSALS)
def test_refusals(failure):
    made = reply([])
    made.fail(failure, "words")
    (diagnosis,) = diagnose(made)
    assert diagnosis.kind is Kind.REFUSED
    assert f"{failure}: words" in diagnosis.evidence


def test_no_marker_but_a_last_word():
    made = reply(WORDS, finish_reason="stop")
    made.end = None
    assert kinds(made) == [Kind.NO_MARKER, Kind.WELL]


def test_plain_text_has_no_marker():
    made = reply(WORDS, mode=Mode.TEXT)
    made.end = None
    assert kinds(made) == [Kind.WELL]


def test_compressed():
    assert kinds(reply(WORDS, coding="gzip")) == [Kind.COMPRESSED, Kind.WELL]
    assert kinds(reply([4.0] * 120, coding="gzip")) == [Kind.HELD, Kind.COMPRESSED]


def test_a_coding_that_is_not_decoded_is_timed_by_its_bytes():
    made = reply(WORDS, coding="br")
    made.events.clear()
    made.fail(Failure.CODING, "br is not decoded here")
    refused, compressed = diagnose(made)
    assert (refused.kind, compressed.kind) == (Kind.REFUSED, Kind.COMPRESSED)
    assert "its bytes came in 120 reads, 50.0 ms to" in compressed.evidence


@pytest.mark.parametrize("beats", [{"comments": 3}, {"pings": 3}])
@pytest.mark.parametrize("failure", [None, Failure.TIMEOUT])
def test_heartbeats_only(beats, failure):
    made = reply([], **beats)
    if failure:
        made.fail(failure, "not complete after 5 s")
    assert Kind.HEARTBEATS in kinds(made)
    assert "3 heartbeats" in str(diagnose(made)[-1])


def test_an_empty_reply():
    assert kinds(reply([])) == [Kind.SHORT]


def test_a_whole_document_is_no_stream():
    assert kinds(reply([2.0], mode=Mode.JSON)) == [Kind.NOT_A_STREAM]
    made = reply([])
    made.fail(Failure.NOT_A_STREAM, "content of type application/json")
    assert kinds(made) == [Kind.NOT_A_STREAM]


def test_left_before_it_could_be_judged():
    made = reply(WORDS[:2], left=0.1)
    made.fail(Failure.CANCELLED, "left by close after 2 pieces")
    assert kinds(made) == [Kind.SHORT]


def test_reasoning_is_a_sign_of_life():
    """Thoughts stream for four seconds, then the text comes fast: nothing was held."""
    made = reply([4.0] * 40)
    made.events = [Event(at, "", "thought") for at in WORDS] + made.events
    assert kinds(made) == [Kind.WELL]


def test_no_false_alarm_at_any_rate():
    """100 steady streams at 5 to 500 events a second, by readers who look seldom or often."""
    draw = random.Random(5)
    for _ in range(100):
        rate = 5 * 100 ** draw.random()
        dates = steady(draw.randint(20, 400), 1 / rate, draw.uniform(0.01, 3), 0.5, draw.random())
        tick = draw.choice([0.0005, 0.005, 0.02, 0.05])
        found = kinds(reply(read_every(dates, tick), head=dates[0]))
        slow = (dates[-1] - dates[0]) / (len(dates) - 1) > 0.18
        assert found == [Kind.SLOW] * slow + [Kind.WELL], (rate, len(dates), tick)


def test_no_hop_is_missed():
    """The same streams behind a hop that collects: 100 of 100 are found out."""
    draw = random.Random(6)
    for _ in range(100):
        rate = 5 * 100 ** draw.random()
        dates = steady(400, 1 / rate, draw.uniform(0.2, 3), 0.5, draw.random())
        events = draw.randint(max(5, round(rate * 0.4)), 400)
        found = kinds(reply(spread_out(blocks(dates, events), 0.001)))
        assert found[0] in diagnosis.KEPT, (rate, events, found)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (Kind.BUFFERED, Kind.WELL, "between them buffers"),
        (Kind.HELD, Kind.SLOW, "between them buffers"),
        (Kind.WELL, Kind.HELD, "on the second path"),
        (Kind.HELD, Kind.BUFFERED, "in the server itself"),
        (Kind.WELL, Kind.WELL, "alike: streams well"),
        (Kind.SLOW, Kind.WELL, "neither path buffers"),
        (Kind.CUT, Kind.WELL, "can't be compared"),
        (Kind.HELD, Kind.REFUSED, "can't be compared"),
        (Kind.FAILED, Kind.HELD, "can't be compared"),
        (Kind.BUFFERED, Kind.SHORT, "can't be compared"),
        (Kind.NOT_A_STREAM, Kind.BUFFERED, "can't be compared"),
        (Kind.REFUSED, Kind.REFUSED, "can't be compared"),
    ],
)
def test_which_side_of_the_hop(first, second, words):
    assert words in compare(first, second)


def test_the_verdict_is_that_of_most():
    well, held = [Kind.WELL], [Kind.HELD]
    assert diagnosis.verdict([well, held, held]) is Kind.HELD
    assert diagnosis.verdict([well, well, held]) is Kind.WELL
    assert diagnosis.verdict([well, held]) is Kind.HELD
    buffered = [Kind.BUFFERED]
    assert diagnosis.verdict([well, held, well, buffered, well, buffered, held]) is Kind.HELD


@pytest.mark.parametrize("rate", [500, 1000, 2000, 3000])
@pytest.mark.parametrize("first", [0.2, 3])
def test_the_fastest_models_are_no_hop(rate, first):
    dates = steady(400, 1 / rate, first, 0.3)
    for seen in (dates, read_every(dates, 0.001)):
        assert kinds(reply(seen, head=first)) == [Kind.WELL]


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_speculative_decoding_is_no_hop(tokens):
    dates = [0.3 + 0.06 * step for step in range(40) for _ in range(tokens)]
    assert kinds(reply(spread_out(dates))) == [Kind.WELL]


@pytest.mark.parametrize(("rate", "expected"), [(10, Kind.BUFFERED), (200, Kind.WELL)])
def test_blocks_of_few_events(rate, expected):
    """1 KiB holds four chunks of a provider; where that takes 20 ms it is nobody's trouble."""
    made = reply([])
    for number, at in enumerate(steady(200, 1 / rate, first=0.4), 1):
        ends = number * 250
        if ends // 1024 > (ends - 250) // 1024:
            made.arrivals.append(Arrival(at, 1024, ends // 1024 * 1024))
        full = -(-ends // 1024) * 1024  # the block that holds the event's end
        made.events.append(Event(0.4 + (-(-full // 250) - 1) / rate, "and ", "", 250))
    assert kinds(made)[0] is expected
    if expected is Kind.BUFFERED:
        assert "blocks of 1 KiB" in str(diagnose(made)[0])


def test_a_window_of_time_is_not_taken_for_a_block():
    dates = read_every(steady(200, 0.033, first=0.4, jitter=0.25), 1.0)
    (diagnosis,) = diagnose(reply(dates))
    assert diagnosis.kind is Kind.BUFFERED
    assert "a window of time" in diagnosis.evidence


def texts(*dated, mode=Mode.SSE):
    made = reply([at for at, _ in dated], head=dated[0][0], mode=mode)
    made.events = [Event(at, text, "", len(text)) for at, text in dated]
    return made


SENTENCE = "It is a sentence of some ten words, as one reads. "


@pytest.mark.parametrize("mode", [Mode.SSE, Mode.TEXT])
def test_an_event_may_be_a_sentence(mode):
    """Quicker than it is read, though more than 180 ms an event."""
    assert kinds(texts(*((0.4 + 0.6 * i, SENTENCE) for i in range(20)), mode=mode)) == [Kind.WELL]
    slow = kinds(texts(*((0.4 + 3.0 * i, SENTENCE) for i in range(20)), mode=mode))
    assert slow == [Kind.SLOW, Kind.WELL]


def test_plain_text_is_judged_by_its_length():
    """What one read gave is one event, however much it is."""
    held = diagnose(texts((4.0, SENTENCE * 60), mode=Mode.TEXT))
    assert [each.kind for each in held] == [Kind.HELD]
    assert "pieces of 32 characters" in held[0].evidence
    blocks_of_text = [(1.0 + 2 * i, "x" * 4096) for i in range(5)]
    assert kinds(texts(*blocks_of_text, mode=Mode.TEXT)) == [Kind.BUFFERED]
    words = [(0.05 + 0.03 * i, "and ") for i in range(50)]
    assert kinds(texts(*words, mode=Mode.TEXT)) == [Kind.WELL]


def test_few_large_events_are_the_servers():
    (diagnosis,) = diagnose(texts((4.0, SENTENCE * 60)))
    assert diagnosis.kind is Kind.SHORT
    assert "3,000 characters in so few events" in diagnosis.words

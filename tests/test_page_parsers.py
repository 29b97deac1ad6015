"""The page's parsers, in a real browser: events, meaning, JSON and Markdown before their end."""

import base64
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from browser import Tab, opened
from serving import serving
from test_sse import CASES, TABLES

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tab(chromium: Any) -> AsyncIterator[Tab]:
    async with serving() as running, opened(chromium, running) as tab:
        yield tab


# --- Events: field reports 42 to 55, 159, 160 ---

# Whole, byte by byte, at every two-way split (of a long one at some), and in threes and sevens.
PARSE_ALL_WAYS = """cases => {
  const told = [];
  for (const [name, input, want] of cases) {
    const bytes = Uint8Array.from(atob(input), c => c.charCodeAt(0));
    const parse = size_or_cut => {
      const parser = new Parser(), events = [];
      for (let at = 0; at < bytes.length;) {
        const to = typeof size_or_cut === "number" ? at + size_or_cut
          : at < size_or_cut[0] ? size_or_cut[0] : bytes.length;
        events.push(...parser.feed(bytes.slice(at, to)));
        at = to;
      }
      events.push(...parser.end());
      return JSON.stringify({events, retry: parser.retry, id: parser.lastEventId});
    };
    const ways = [bytes.length || 1, 1, 3, 7];
    const step = Math.ceil(bytes.length / 600);
    for (let cut = 1; cut < bytes.length; cut += step) ways.push([cut]);
    const results = new Set(ways.map(parse));
    if (results.size > 1) told.push(`${name}: ${[...results].slice(0, 2)}`);
    const {events, retry, id} = JSON.parse([...results][0]);
    const got = JSON.stringify(events);
    if (got !== JSON.stringify(want.events)) told.push(`${name}: ${got}`);
    if (want.retry && !want.retry.includes(retry)) told.push(`${name}: retry ${retry}`);
    if (want.id !== undefined && want.id !== id) told.push(`${name}: id ${id}`);
  }
  return told;
}"""


async def test_the_shared_table(tab: Tab) -> None:
    if not CASES.exists():
        pytest.skip(f"shared checks absent: {CASES}")
    cases = [
        [
            case["name"],
            case["input_base64"],
            {
                "events": case["events"],
                "retry": [case["retry"], case.get("retry_alt", case["retry"])],
                "id": case["final_id"],
            },
        ]
        for case in json.loads(CASES.read_text())
    ]
    assert len(cases) > 50
    assert await tab.do(PARSE_ALL_WAYS, cases) == []


async def test_the_python_parser_s_tables(tab: Tab) -> None:
    cases = [
        [
            f"{table}/{name}",
            base64.b64encode(raw).decode(),
            {
                "events": [
                    {"type": e.type, "data": e.data, "lastEventId": e.last_event_id} for e in events
                ]
            },
        ]
        for table, rows in TABLES.items()
        for name, raw, events in rows
    ]
    assert len(cases) > 40
    assert await tab.do(PARSE_ALL_WAYS, cases) == []


async def test_half_a_character_at_the_end(tab: Tab) -> None:
    """Field report 159: the one decoder is flushed; what it still held ends no event."""
    script = """() => {
      const parser = new Parser();
      parser.feed(Uint8Array.of(...new TextEncoder().encode("data: a"), 0xf0, 0x9f));
      return [parser.inEvent, parser.end(), parser.line];
    }"""
    assert await tab.do(script) == [True, [], "data: a\ufffd"]


async def test_a_long_line_costs_linear_time(tab: Tab) -> None:
    """Field report 53: ten times the length in ten times the time, not in a hundred times."""
    script = """() => {
      const piece = new TextEncoder().encode("x".repeat(1000));
      const parse = pieces => {
        const parser = new Parser(), start = performance.now();
        parser.feed(new TextEncoder().encode("data: "));
        for (let i = 0; i < pieces; i++) parser.feed(piece);
        const [event] = parser.feed(new TextEncoder().encode("\\n\\n"));
        return [event.data.length, performance.now() - start];
      };
      return [parse(300), parse(3000)];
    }"""
    (short, _), (long, took_ms) = await tab.do(script)
    assert (short, long) == (300_000, 3_000_000)
    assert took_ms < 5000  # quadratic, it would be minutes


async def test_an_event_without_end_is_given_up(tab: Tab) -> None:
    """Field report 54."""
    script = """() => {
      const parser = new Parser(1000), line = new TextEncoder().encode("data: xxxxx\\n");
      try { for (let i = 0; i < 1000; i++) parser.feed(line); }
      catch (error) { return [error instanceof Broken, error.message]; }
    }"""
    assert await tab.do(script) == [True, "an event of more than 1000 characters"]


# --- Meaning: field reports 55, 166 ---

NOTHING: dict[str, Any] = {}
MEANINGS = [
    ("plain", "message", '{"text": "Two"}', {"text": "Two"}),
    ("bare", "message", '"Two"', {"text": "Two"}),
    ("done", "message", "[DONE]", {"end": True}),
    ("named", "token", '{"text": "Two"}', {"text": "Two"}),
    ("named-done", "done", '{"finish_reason": "stop"}', {"reason": "stop", "end": True}),
    (
        "websocket-done",
        "message",
        '{"done": true, "id": "reply-1"}',
        {"end": True, "id": "reply-1"},
    ),
    ("begin", "begin", '{"id": "reply-1"}', {"id": "reply-1"}),
    ("error", "error", '{"message": "no"}', {"error": "no"}),
    ("error-in-words", "error", "no", {"error": "no"}),
    ("error-in-band", "message", '{"error": {"message": "quota"}}', {"error": "quota"}),
    ("error-string", "message", '{"error": "quota"}', {"error": "quota"}),
    ("error-null", "message", '{"error": null, "text": "a"}', {"text": "a"}),
    ("not-json", "message", "{oops", {"error": "not JSON: {oops"}),
    ("unknown-not-json", "heartbeat", "{oops", NOTHING),
    ("number", "message", "7", NOTHING),
    ("null", "message", "null", NOTHING),
    ("text-is-no-string", "message", '{"text": 7}', {"error": 'text is not a string: {"text": 7}'}),
    ("prototype", "message", '{"type": "__proto__"}', NOTHING),
    ("role-only", "message", '{"choices": [{"delta": {"role": "assistant"}}]}', NOTHING),
    ("no-role", "message", '{"choices": [{"delta": {"content": "a"}}]}', {"text": "a"}),
    ("null-content", "message", '{"choices": [{"delta": {"content": null}}]}', {"text": None}),
    ("completion", "message", '{"choices": [{"text": "a", "finish_reason": null}]}', {"text": "a"}),
    (
        "length",
        "message",
        '{"choices": [{"delta": {}, "finish_reason": "length"}]}',
        {"reason": "length"},
    ),
    (
        "usage-without-choices",
        "message",
        '{"choices": [], "usage": {"completion_tokens": 3}}',
        {"usage": {"completion_tokens": 3}},
    ),
    (
        "anthropic",
        "content_block_delta",
        '{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}',
        {"text": "a"},
    ),
    (
        "anthropic-json",
        "content_block_delta",
        '{"type": "content_block_delta", "delta": {"partial_json": "{"}}',
        {"text": "{"},
    ),
    ("anthropic-ping", "ping", '{"type": "ping"}', NOTHING),
    ("anthropic-start", "message_start", '{"type": "message_start", "message": {}}', NOTHING),
    ("anthropic-stop", "message_stop", '{"type": "message_stop"}', {"end": True}),
    (
        "anthropic-error",
        "error",
        '{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}',
        {"error": "busy"},
    ),
    (
        "responses",
        "response.output_text.delta",
        '{"type": "response.output_text.delta", "delta": "a"}',
        {"text": "a"},
    ),
    (
        "responses-incomplete",
        "response.incomplete",
        '{"type": "response.incomplete", "response":'
        ' {"incomplete_details": {"reason": "max_output_tokens"}}}',
        {"end": True, "reason": "max_output_tokens"},
    ),
    (
        "responses-failed",
        "response.failed",
        '{"type": "response.failed", "response": {"error": {"message": "no"}}}',
        {"error": "no"},
    ),
    ("responses-error", "error", '{"type": "error", "message": "no"}', {"error": "no"}),
]


async def test_meanings(tab: Tab) -> None:
    cases = [[type, data] for _, type, data, _ in MEANINGS]
    told = await tab.do("cases => cases.map(([type, data]) => meaning(type, data))", cases)
    for (name, _, _, want), got in zip(MEANINGS, told, strict=True):
        said = {key: value for key, value in got.items() if value or key in want}
        assert said == want, name


PROVIDERS = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "One two"}],
        "max_tokens": 20,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "prompt": "One two",
        "max_tokens": 20,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"input": "One two", "max_output_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "One two"}], "max_tokens": 20},
}


@pytest.mark.parametrize("path", PROVIDERS)
async def test_each_dialect_of_the_server(tab: Tab, path: str) -> None:
    body = {"model": "simulated", "stream": True, **PROVIDERS[path]}
    script = """async ([path, body]) => {
      const request = {base: "", path, body};
      const run = new Run(WAYS.fetch, request, performance.now(), () => {});
      await run.go();
      const {state, words, tokens, text} = run;
      return {state, words, tokens, count: text.split(" ").length};
    }"""
    told = await tab.do(script, [path, body])
    assert told["state"] == "done", told
    assert told["count"] == 20
    assert told["tokens"] == 20


# --- JSON before its end: field report 161 ---

GROW = """documents => documents.map(text => {
  const told = [], parser = new PartialJson();
  let shown = [];
  const keys = value => value && typeof value === "object" ? Object.keys(value).flatMap(
    key => [key, ...keys(value[key]).map(inner => `${key}/${inner}`)]) : [];
  for (let at = 0; at < text.length; at++) {
    parser.feed(text[at]);
    const now = JSON.stringify(parser.value);
    if (now !== undefined && !now.isWellFormed()) told.push(`half a pair at ${at}`);
    if (/\\\\ud[89a-f]/i.test(now)) told.push(`half a pair at ${at}`);
    const has = keys(parser.value);
    for (const key of shown) if (!has.includes(key)) told.push(`${key} was lost at ${at}`);
    shown = has;
    const anew = new PartialJson();
    anew.feed(text.slice(0, at + 1));
    const atOnce = JSON.stringify(anew.value);
    if (atOnce !== now) told.push(`in one go it is ${atOnce} at ${at}`);
  }
  parser.feed(" ");
  const last = JSON.stringify(parser.value);
  if (last !== JSON.stringify(JSON.parse(text))) told.push(last);
  if (parser.broken) told.push("broken");
  if (parser.growing !== null) told.push(`still growing: ${parser.growing}`);
  return told;
})"""
ENTRY_161 = r'{"a":"x\\n\u2705\ud83d\ude00","n":-1.5e3,"t":[true,null,{"k":""}]}'


def some_documents() -> list[str]:
    draw = random.Random(161)

    def value(depth: int) -> Any:
        kind = draw.choice("snlbod" if depth < 3 else "snlb")
        match kind:
            case "s":
                return "".join(
                    draw.choice('ab"\\/\n\t\x00é✅😀\u2028') for _ in range(draw.randrange(9))
                )
            case "n":
                return draw.choice([0, -1, 12, 1.5, -2e-7, 1e300, 10**15])
            case "l" | "b":
                return draw.choice([True, False, None])
            case "o":
                return [value(depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(["a", "b", "", "__proto__", "é"]) + str(i): value(depth + 1)
                for i in range(draw.randrange(4))}  # fmt: skip

    return [
        json.dumps(value(0), ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
        for _ in range(150)
    ]


async def test_every_prefix_of_json(tab: Tab) -> None:
    documents = [ENTRY_161, '{"__proto__": {"x": 1}}', '"a"', "-0.5E-2", "[]", "{ }", " [ 1 , 2 ] "]
    documents += some_documents()
    for document, told in zip(documents, await tab.do(GROW, documents), strict=True):
        assert told == [], document


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r'{"a": "x\u27', {"a": "x"}),
        (r'{"a": "x\ud83d', {"a": "x"}),
        (r'{"a": "x\ud83d\ude0', {"a": "x"}),
        (r'{"a": "x\ud83d\ude00', {"a": "x😀"}),
        (r'{"a": "x\ud83dy', {"a": "x\ufffdy"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": -', {}),
        ('{"a": 1.', {"a": 1}),
        ('{"a": 15e', {"a": 15}),
        ('{"a": tru', {}),
        ('{"a', {}),
        ('{"a":', {}),
    ],
)
async def test_what_is_shown_of_a_prefix(tab: Tab, text: str, shown: Any) -> None:
    script = "text => { const p = new PartialJson(); p.feed(text); return [p.value, p.broken]; }"
    assert await tab.do(script, text) == [shown, False]


async def test_what_is_no_json_is_kept_and_marked(tab: Tab) -> None:
    texts = ["", "x", '{"a": 1,}', '{"a": 01}', '{"a": 1 "b"', "[1,]", '{"a": "b\n"}',
             '{"a": "\\x"}', "[1] 2", '{"a": +1}', '{"a": nulx', "{,", "}", '{"a": 1]', "[1}",
             '{"a": "\\u12g4"}', "1.e5 ", "[" * 100_000]  # fmt: skip
    script = """texts => texts.map(text => {
      const parser = new PartialJson();
      for (const char of text) parser.feed(char);
      parser.feed(' "more');
      return [parser.broken, parser.value?.a ?? null];
    })"""
    told = await tab.do(script, texts)
    assert [broken for broken, _ in told] == [text not in ("", "[" * 100_000) for text in texts]
    assert told[2] == [True, 1]


async def test_json_without_end_in_the_form(tab: Tab) -> None:
    """A server that speaks past the schema: fields of any kind and depth, or no object at all."""
    texts = ['{"title": ' + "[" * 100_000, '{"title": ' + '{"a":' * 50_000, '{"title": [[1], {}, 2',
             "null", "[1]", '"title"', '{"title": {"a": [1]}, "ships": null, "x": 1}']  # fmt: skip
    script = """texts => texts.map(text => {
      const view = new FormView(document.createElement("div"), SCHEMA);
      for (let at = 0; at < text.length; at += 9999) view.add(text.slice(at, at + 9999));
      view.end();
      return [...view.fields.values()].slice(0, 3).map(field => field.textContent).join("/");
    })"""
    told = await tab.do(script, texts)
    assert told == ["…//", "a//", "…, …, 2//", "//", "//", "//", "a//null"]


async def test_mutations_of_json_never_throw(tab: Tab) -> None:
    draw = random.Random(7)
    texts = []
    for document in some_documents():
        at = draw.randrange(len(document))
        texts.append(
            document[:at] + draw.choice('{}[]",:\\ue1-tnf ') + document[at + draw.randrange(2) :]
        )
    script = """texts => texts.forEach(text => {
      const parser = new PartialJson();
      for (const unit of text.split("")) { parser.feed(unit); void parser.growing; }
    })"""
    await tab.do(script, texts)


# --- Markdown before its end ---

MARKDOWN = [
    ("paragraph", "One\ntwo", "<p>One\ntwo</p>"),
    ("paragraphs", "One\n\nTwo\n", "<p>One</p><p>Two</p>"),
    ("crlf", "One\r\n\r\nTwo\r\n", "<p>One</p><p>Two</p>"),
    ("heading", "## A *b* ##\ntext", "<h2>A <em>b</em></h2><p>text</p>"),
    ("not-a-heading", "#tag", "<p>#tag</p>"),
    ("rule", "a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    (
        "list",
        "- a\n- b\n  - c\n- d",
        "<ul><li><span>a</span></li><li><span>b</span><ul><li><span>c</span></li></ul></li>"
        "<li><span>d</span></li></ul>",
    ),
    (
        "numbers",
        "3. a\n4. b\n",
        '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>',
    ),
    ("loose-list", "- a\n\n- b", "<ul><li><span>a</span></li><li><span>b</span></li></ul>"),
    ("item-goes-on", "- a\n  b", "<ul><li><span>a\nb</span></li></ul>"),
    (
        "two-lists",
        "- a\n1. b",
        '<ul><li><span>a</span></li></ul><ol start="1"><li><span>b</span></li></ol>',
    ),
    ("fence", "```py\na *b*\n\n# c\n```\nd", "<pre><code>a *b*\n\n# c\n</code></pre><p>d</p>"),
    ("fence-open", "```\na\n``", "<pre><code>a\n``\n</code></pre>"),
    ("tilde-fence", "~~~\n```\n~~~", "<pre><code>```\n</code></pre>"),
    ("quote", "> a\n> *b*\n\nc", "<blockquote>a\n<em>b</em></blockquote><p>c</p>"),
    (
        "table",
        "| a | b |\n|---|:-:|\n| 1 | **2** |\n\nx",
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>"
        "<td><strong>2</strong></td></tr></tbody></table><p>x</p>",
    ),
    (
        "table-rules",
        "|a|\n| :-: \n|1|\n\n|a|\n|-|-|",
        "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"
        "<table><thead><tr><th>a</th></tr></thead><tbody></tbody></table>",
    ),
    ("no-table-rule", "|a|\n|--|x", "<p>|a|\n|--|x</p>"),
    ("no-table", "| a |\nb", "<p>| a |\nb</p>"),
    ("no-table-at-the-end", "| a |", "<p>| a |</p>"),
    ("code", "`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    ("strong-in-em", "*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
    ("stars-alone", "2 * 3 * 4", "<p>2 * 3 * 4</p>"),
    ("snake", "snake_case_name _em_", "<p>snake_case_name <em>em</em></p>"),
    ("escaped", r"\*a\* \# b", "<p>*a* # b</p>"),
    ("unclosed", "**a", "<p>**a</p>"),
    (
        "link",
        "[a](https://b.example/c?d=1)",
        '<p><a href="https://b.example/c?d=1" rel="noopener noreferrer nofollow"'
        ' target="_blank">a</a></p>',
    ),
    (
        "link-title",
        '[a]( <https://b.example/> "t")',
        '<p><a href="https://b.example/" rel="noopener noreferrer nofollow"'
        ' target="_blank">a</a></p>',
    ),
    ("no-link", "[a](https://b.example/x<y)", "<p>[a](https://b.example/x&lt;y)</p>"),
    ("long-heading", "# " + "a " * 1000, "<p># " + "a " * 999 + "a </p>"),
    (
        "script-link",
        "[a](javascript:alert(1)) [a](javascript:x) [b](data:x)",
        "<p>[a](javascript:alert(1)) a b</p>",
    ),
    ("relative-link", "[a](/log) [b](//x.example/)", "<p>a b</p>"),
    ("image", "![a](file:///x)", "<p>a</p>"),
    (
        "html",
        "<img src=x onerror=alert(1)></script>",
        "<p>&lt;img src=x onerror=alert(1)&gt;&lt;/script&gt;</p>",
    ),
]
RENDER = """([text, sizes]) => {
  const root = document.createElement("div"), markdown = new Markdown(root);
  let at = 0, i = 0;
  while (at < text.length) {
    const size = sizes[i++ % sizes.length];
    markdown.add(text.slice(at, at + size));
    at += size;
  }
  markdown.end();
  return root.innerHTML;
}"""


@pytest.mark.parametrize(("name", "text", "html"), MARKDOWN, ids=[m[0] for m in MARKDOWN])
async def test_markdown(tab: Tab, name: str, text: str, html: str) -> None:
    assert await tab.do(RENDER, [text, [len(text)]]) == html
    for sizes in ([1], [2], [3, 1], [5]):
        assert await tab.do(RENDER, [text, sizes]) == html, sizes


async def test_markdown_in_any_pieces(tab: Tab) -> None:
    """All of the table and long texts, one after the other, cut at random: the same document."""
    draw = random.Random(5)
    words = " ".join(
        draw.choice(["word", "*em*", "**strong**", "`code`", "a*b", "_x"]) for _ in range(500)
    )
    texts = [draw.choice(MARKDOWN)[1] for _ in range(30)]
    texts += [
        "```\n" + "long line " * 200 + "\nnext\n```",
        words,
        "> " + words,
        "- " + "plain " * 400,
    ]
    for round in range(3):
        draw.shuffle(texts)
        text = "\n\n".join(texts)
        whole = await tab.do(RENDER, [text, [len(text)]])
        sizes = [draw.randrange(1, 40) for _ in range(50)]
        assert await tab.do(RENDER, [text, sizes]) == whole, round


async def test_finished_blocks_are_left_alone(tab: Tab) -> None:
    """Nodes of finished blocks are the same ones to the end; only the last block's change."""
    text = "# A\n\n" + "".join(
        f"Paragraph *{i}*.\n\n- item {i}\n- b\n\n```\ncode\n```\n\n" for i in range(20)
    )
    script = """async text => {
      const root = document.createElement("div"), markdown = new Markdown(root);
      let changed = 0, gone = 0;
      const kept = [];
      const observer = new MutationObserver(records => {
        for (const {target} of records) {
          const at = [...root.children].findIndex(child => child.contains(target));
          if (at >= 0 && at < root.children.length - 2) changed++;
        }
      });
      observer.observe(root, {subtree: true, childList: true, characterData: true});
      for (const char of text) {
        markdown.add(char);
        await null;  // the observer is told
        for (const node of [...root.children].slice(kept.length, -2)) kept.push(node);
        kept.forEach((node, i) => { if (root.children[i] !== node) gone++; });
      }
      return {changed, gone, kept: kept.length};
    }"""
    told = await tab.do(script, text)
    assert told["changed"] == told["gone"] == 0
    assert told["kept"] > 50


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("```py\nprint(", "<pre><code>print(</code></pre>"),
        ("| a | b |\n|---|---|\n| 1 | *2", "<td>1</td><td><em>2</em></td>"),
        ("It is **ver", "<p>It is <strong>ver</strong></p>"),
        ("See `co", "<p>See <code>co</code></p>"),
        ("See [the page](https://x.exam", "<p>See the page</p>"),
        ("Text\n#", "<p>Text</p>"),
        ("- a\n-", "<ul><li><span>a</span></li></ul>"),
        ("```\na\n``", "<pre><code>a\n</code></pre>"),
        ("| a | b", "<th>a</th><th>b</th>"),
    ],
)
async def test_what_has_begun_shows_as_it_grows(tab: Tab, text: str, html: str) -> None:
    script = """text => {
      const root = document.createElement("div"), markdown = new Markdown(root);
      for (const char of text) markdown.add(char);
      return root.innerHTML;
    }"""
    assert html in await tab.do(script, text)


async def test_a_paragraph_without_end_is_redrawn_in_part(tab: Tab) -> None:
    script = """() => {
      const root = document.createElement("div"), markdown = new Markdown(root);
      const p = () => root.firstElementChild.childNodes;
      for (let i = 0; i < 5000; i++) markdown.add("word ");
      const early = [...p()].slice(0, 10);
      for (let i = 0; i < 500; i++) markdown.add("*word* ");
      const same = early.every((node, i) => p()[i] === node);
      return {same, redrawn: p().length - markdown.open.nodes, length: root.textContent.length};
    }"""
    told = await tab.do(script)
    assert told["same"]
    assert told["redrawn"] < 600
    assert told["length"] == 5000 * 5 + 500 * 5


# Each of them, asked of a careless pattern or layout, would take minutes, or the browser's stack.
HOSTILE = {
    **{mark: mark * (9_000 // len(mark)) for mark in ("*a ", "**a ", "`a ", "[a ", "_a ", "[a](")},
    "table rule": f"|a\n|{'-' * 60}x\n",
    "table rule with bars": f"|a\n|{'-|:' * 60}x\n",
    "spaces": " " * 50_000 + "x",
    "spaces after a mark": f"#{' ' * 50_000}x{' #' * 50_000}",
    "labels around an address": "[" * 700 + "](" + "x" * 1200,
    "spaces in an address": "[" * 700 + "](" + " " * 1200,
    "a heading without end": "# " + "*a " * 15_000,
    "a cell without end": "| a |\n|---|\n| " + "*a " * 15_000,
    "a head without end": "| " + "*a " * 15_000,
    "a fence without end": "```" + "a " * 15_000,
    "lists in lists": "".join("  " * depth + "- a\n" for depth in range(600)),
    "numbered lists in lists": "".join(
        "  " * i + ("1. a\n" if i % 2 else "- a\n") for i in range(600)
    ),
    "quotes in quotes": ">" * 5_000 + " a",
    "bars": "|" * 9_000 + "\n" + "|-" * 900 + "\n",
    "control characters": "".join(map(chr, range(32))) * 100 + "\u202e\u2066abc" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_text_has_a_bound(tab: Tab, name: str) -> None:
    """Whatever a model writes, no addition to it takes long, and it is laid out."""
    text = HOSTILE[name]
    script = """([text, size]) => {
      const root = document.createElement("div"), markdown = new Markdown(root);
      document.body.append(root);
      let longest = 0;
      for (let at = 0; at < text.length; at += size) {
        const start = performance.now();
        markdown.add(text.slice(at, at + size));
        longest = Math.max(longest, performance.now() - start);
      }
      const deep = root.querySelector("li ".repeat(21)) !== null;
      const shown = [root.scrollHeight, root.textContent.length, deep];
      markdown.end();
      root.remove();
      return [longest, ...shown];
    }"""
    for size in (len(text) // 200 + 1, len(text)):
        longest_ms, height, shown, deep = await tab.do(script, [text, size])
        assert longest_ms < 5000  # far above what it takes
        assert height > 0
        assert not deep
        assert shown > len(text.replace(" ", "")) / 4 or "lists" in name or "rule" in name

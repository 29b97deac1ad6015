"""The experiment of the page: what the browser adds to the first text, and whether it keeps up.

    page          the page against the raw client; and 5,000 events as fast as they come

Words on a schedule, so the server's own dates are known; client and page take turns. What each adds
is counted from the server's first token, by one machine's clocks: its first text, since the request
was sent, less the server's first token, since the request was taken. Both begin on loopback, so the
way there is the same small part of both.

The browser is the system's Chromium, driven by Playwright (`requirements-dev.txt`); without either
nothing is measured, and the report says so.

Read with it: `page.html`. Read next: `models.py`, with which the providers' formats begin.
"""

import importlib.util
import shutil
from collections.abc import Sequence
from typing import Any

from bench import Bench, ExperimentError, experiment
from measures import Reply, percentile
from report import Finding, milliseconds
from workload import median

ROUNDS = 20
SCHEDULE = ("--delay-ms=20", "--jitter-ms=0", "--first-delay-ms=100")
BODY = {"prompt": "The old lighthouse stood", "max_tokens": 10, "seed": 7}
EVENTS = 5000
EVENT_ROUNDS = 3
FRAME_MS = 1000 / 60
# As `tests/browser.py` has them: a browser that does nothing of its own.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]

# One lane of the race by itself, and what it dated; seconds.
FIRST_TEXT = """async body => {
  const lane = race[1], all = lane.request;
  lane.request = () => ({base: "", path: "/stream", body: {...body, ...STREAM}});
  await lane.start();
  lane.request = all;
  const {run} = lane;
  if (run.state !== "done") throw new Error(run.words);
  const server = run.timings.first_token;
  return {first: run.since(run.firstText), paint: run.since(run.firstPaint), server};
}"""

# The longest task that kept the page from answering (the browser tells of those above 50 ms).
EVENTS_AT_ONCE = """async body => {
  const long = [], start = performance.now();
  const watch = new PerformanceObserver(list => long.push(...list.getEntries()));
  watch.observe({type: "longtask"});
  const lane = race[1], all = lane.request;
  lane.request = () => ({base: "", path: "/stream", body: {...body, ...STREAM}});
  await lane.start();
  lane.request = all;
  await sleep(100);  // entries are handed over later
  long.push(...watch.takeRecords());
  const {run} = lane, span = (run.lastText - run.firstText) / 1000;
  return {rate: (run.events - 1) / span, long: long.map(entry => entry.duration)};
}"""


@experiment("page")
async def page(bench: Bench) -> Finding:
    """What the browser adds to the first text, and whether the page keeps up with 5,000 events."""
    header = ["measure", "median", "p95", "most", "goal", "n"]
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        why = "Not measured: it needs Chromium and Playwright (see requirements-dev.txt)."
        return Finding(header, [], "0", [why])
    from playwright.async_api import async_playwright

    url = await bench.simulated(*SCHEDULE)
    bench.expect(2 * ROUNDS + EVENT_ROUNDS, "page")
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=FLAGS)
        tab = await browser.new_page()
        await tab.goto(url)
        await tab.evaluate("ready")
        await tab.evaluate(FIRST_TEXT, BODY)  # what a browser does first is slower than the rest
        raw, seen = [], []
        for _ in range(ROUNDS):
            raw.append(await bench.ask(f"{url}/stream", {**BODY, "usage": True}))
            seen.append(await tab.evaluate(FIRST_TEXT, BODY))
            bench.step()
        fast = {**BODY, "max_tokens": EVENTS, "delay_ms": 0, "first_delay_ms": 0}
        runs = []
        for _ in range(EVENT_ROUNDS):
            runs.append(await tab.evaluate(EVENTS_AT_ONCE, fast))
            bench.step()
        version = browser.version
        await browser.close()
    return _finding(header, raw, seen, runs, version)


def _finding(
    header: Sequence[str],
    raw: Sequence[Reply],
    seen: Sequence[dict[str, float]],
    runs: Sequence[dict[str, Any]],
    version: str,
) -> Finding:
    client = [_added(reply) for reply in raw]
    browser = [one["first"] - one["server"] for one in seen]
    paint = [one["paint"] - one["first"] for one in seen]
    longest = [max(run["long"], default=0.0) / 1000 for run in runs]
    more = median(browser) - median(client)
    rates = ", ".join(f"{run['rate']:,.0f}" for run in runs)
    return Finding(
        header,
        [
            _row("raw client: first text after the server's first token", client, "n/a"),
            _row("page: the same", browser, "10 ms more than the client"),
            _row(
                "page: from first text to first paint", paint, f"{2 * FRAME_MS:.0f} ms (two frames)"
            ),
            _row(f"longest task in {EVENTS:,} events (0: none above 50 ms)", longest, "50 ms"),
        ],
        f"{ROUNDS} replies of each, in turn, and {EVENT_ROUNDS} of {EVENTS:,} events",
        [
            f"The page's first text comes {milliseconds(more)} later than the raw client's.",
            f"Events a second in the {EVENT_ROUNDS} runs: {rates}.",
            f"Chromium {version}, headless, painted without a GPU.",
        ],
        "simulated, 20 ms a word, the first after 120 ms",
    )


def _added(reply: Reply) -> float:
    server = (reply.timings or {}).get("first_token")
    if server is None or reply.first_text is None:
        raise ExperimentError("a reply without a first token")
    return reply.first_text - float(server)


def _row(what: str, values: Sequence[float], goal: str) -> list[str]:
    p95 = percentile(values, 95)
    return [what, *map(milliseconds, (median(values), p95, max(values))), goal, str(len(values))]

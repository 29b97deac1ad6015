"""The client's numbers beside an independent instrument's, on the same fixed schedule.

    python -m venv aiperf && aiperf/bin/pip install 'aiperf==0.13.*'
    python tests/against_aiperf.py aiperf/bin/aiperf --tokenizer FOLDER [-n 30]

FOLDER is any tokenizer's, such as the default model's in `~/.cache/llm-streaming`: it makes up the
prompts, which here are not looked at.

Not a test: it needs 300 MB of other people's packages, and a machine that is otherwise idle. Ends
with 1 if a median of first text or of the time per output token is 3% or more apart.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKENS = 100
APART = 0.03


def client(url: str, n: int) -> dict[str, float]:
    command = [sys.executable, str(HERE.parent / "client.py"), url + "/v1/chat/completions", "Hi"]
    command += ["--model", "clocked", "-n", str(n), "--warmup", "2", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    spreads = found["runs"][0]["percentiles"]
    first, token = spreads["first_text_s"], spreads["time_per_output_token_s"]
    assert first["n"] == token["n"] == n
    return {"first text": first["p50"] * 1000, "time per output token": token["p50"] * 1000}


def aiperf(program: str, tokenizer: str, url: str, n: int, folder: str) -> dict[str, float]:
    command = [program, "profile", "--url", url, "--model", "clocked", "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", tokenizer, "--use-server-token-count"]
    command += ["--concurrency", "1", "--request-count", str(n), "--warmup-request-count", "2"]
    command += ["--isl", "16", "--osl", str(TOKENS), "--ui", "none", "--artifact-dir", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"aiperf: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    (file,) = Path(folder).rglob("profile_export.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    replies = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]

    def median(name: str) -> float:
        values = [reply["metrics"][name]["value"] for reply in replies]
        assert len(values) == n
        return statistics.median(values)

    return {
        "first text": median("time_to_first_token"),
        "time per output token": median("inter_token_latency"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("aiperf")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("-n", type=int, default=30)
    args = parser.parse_args()
    command = [sys.executable, str(HERE / "clocked.py"), "--events", str(TOKENS)]
    command += ["--first-ms", "500"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            ours = client(url, args.n)
            theirs = aiperf(args.aiperf, args.tokenizer, url, args.n, folder)
        finally:
            server.terminate()
    apart = {name: abs(ours[name] / theirs[name] - 1) for name in ours}
    print(f"{'medians, n = ' + str(args.n):<24}{'client.py':>12}{'aiperf':>12}{'apart':>9}")
    for name in ours:
        print(f"{name:<24}{ours[name]:>9.2f} ms{theirs[name]:>9.2f} ms{apart[name]:>9.2%}")
    return 0 if max(apart.values()) < APART else 1


if __name__ == "__main__":
    sys.exit(main())

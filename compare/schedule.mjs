// What with_node.mjs has to deliver: the words and the schedule of simulated.py.
//
// The same request gives the same words at the same times.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";

const WORDS = JSON.parse(readFileSync(new URL("words.json", import.meta.url), "utf8"));
const [FACTOR, PRIME] = [2469, 65521]; // of the random numbers

export class Failed extends Error {}

// A number from 1 to PRIME - 1, of which the next are made.
const firstDraw = (seed) =>
  (createHash("sha256").update(seed).digest().readUInt32BE(0) % (PRIME - 1)) + 1;

export class Words {
  constructor(flags) {
    this.flags = flags;
    this.running = 0;
    this.number = 0;
  }

  // A reply word by word; throws Failed where fail_after asks for it.
  async *reply({ prompt, max_tokens = 100, seed, fail_after }) {
    const { delay, jitter, firstDelay } = this.flags;
    const parts = prompt.split(/\s+/).filter(Boolean);
    const ids = parts.map((word) => Buffer.from(word).reduce((sum, byte) => sum + byte, 0));
    this.number += 1;
    let drawn = firstDraw(`${this.flags.seed}/${seed ?? this.number}/[${ids.join(", ")}]`);
    let due = performance.now() + firstDelay;
    this.running += 1;
    try {
      for (let index = 0; index < max_tokens; index++) {
        drawn = (drawn * FACTOR) % PRIME;
        due += delay + jitter * ((2 * drawn) / PRIME - 1);
        await sleep(Math.max(0, Math.ceil(due - performance.now())));
        if (index === fail_after) throw new Failed();
        drawn = (drawn * FACTOR) % PRIME;
        const word = WORDS[drawn % WORDS.length];
        yield index ? ` ${word}` : word[0].toUpperCase() + word.slice(1);
      }
    } finally {
      this.running -= 1;
    }
  }
}

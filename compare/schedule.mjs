// What with_node.mjs has to deliver: the words and the schedule of simulated.py.
//
// The same request gives the same words at the same times, so the draws have to be Python's: a
// Mersenne Twister (Matsumoto and Nishimura, 1998) that is seeded by a text and its SHA-512, as
// `random.Random(text)` is. As little of it as is needed here.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";

const WORDS = JSON.parse(readFileSync(new URL("words.json", import.meta.url), "utf8"));
const N = 624;
const M = 397;

export class Failed extends Error {}

class Random {
  constructor(text) {
    // One large number, most significant byte first, as 32-bit words, the least significant first.
    const bytes = Buffer.from(text);
    const all = Buffer.concat([bytes, createHash("sha512").update(bytes).digest()]).reverse();
    const key = [];
    for (let at = 0; at < all.length; at += 4) {
      key.push(Buffer.concat([all.subarray(at, at + 4), Buffer.alloc(3)]).readUInt32LE(0));
    }
    while (key.length > 1 && key.at(-1) === 0) key.pop();
    this.state = new Uint32Array(N);
    this.index = N;
    this.seed(19650218);
    this.mix(key);
  }

  seed(number) {
    const state = this.state;
    state[0] = number;
    for (let i = 1; i < N; i++) {
      state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
    }
  }

  mix(key) {
    const state = this.state;
    let i = 1;
    const turn = (factor, added) => {
      const previous = state[i - 1] ^ (state[i - 1] >>> 30);
      state[i] = (state[i] ^ Math.imul(previous, factor)) + added;
      if (++i === N) {
        state[0] = state[N - 1];
        i = 1;
      }
    };
    for (let k = 0; k < Math.max(N, key.length); k++) {
      turn(1664525, key[k % key.length] + (k % key.length));
    }
    for (let k = 1; k < N; k++) turn(1566083941, -i);
    state[0] = 0x80000000;
  }

  twist() {
    const state = this.state;
    for (let i = 0; i < N; i++) {
      const y = (state[i] & 0x80000000) | (state[(i + 1) % N] & 0x7fffffff);
      state[i] = state[(i + M) % N] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.index = 0;
  }

  bits32() {
    if (this.index === N) this.twist();
    let y = this.state[this.index++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  random() {
    const [a, b] = [this.bits32() >>> 5, this.bits32() >>> 6];
    return (a * 67108864 + b) / 9007199254740992;
  }
}

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
    const draw = new Random(`${this.flags.seed}/${seed ?? this.number}/[${ids.join(", ")}]`);
    let due = performance.now() + firstDelay;
    this.running += 1;
    try {
      for (let index = 0; index < max_tokens; index++) {
        due += delay + jitter * (2 * draw.random() - 1);
        await sleep(Math.max(0, Math.ceil(due - performance.now())));
        if (index === fail_after) throw new Failed();
        const word = WORDS[Math.floor(draw.random() * WORDS.length)];
        yield index ? ` ${word}` : word[0].toUpperCase() + word.slice(1);
      }
    } finally {
      this.running -= 1;
    }
  }
}

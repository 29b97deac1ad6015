// The same two endpoints with Node's http module.
//
//     node compare/with_node.mjs --port 0
//
// A client that leaves closes the response: after each word that is looked at, on both routes.

import { createServer } from "node:http";
import { json } from "node:stream/consumers";
import { parseArgs } from "node:util";
import { Failed, Words } from "./schedule.mjs";

const { values } = parseArgs({
  options: {
    port: { type: "string", default: "8770" },
    seed: { type: "string", default: "42" },
    "delay-ms": { type: "string", default: "33" },
    "jitter-ms": { type: "string", default: "8" },
    "first-delay-ms": { type: "string", default: "0" },
  },
});
const words = new Words({
  seed: values.seed,
  delay: Number(values["delay-ms"]),
  jitter: Number(values["jitter-ms"]),
  firstDelay: Number(values["first-delay-ms"]),
});
const FAILURE = { message: "the simulated model failed, as asked", type: "model_error" };
const NUMBERS = ["max_tokens", "seed", "fail_after", "truncate_after"];

function answer(response, status, value) {
  response.writeHead(status, { "Content-Type": "application/json" });
  response.end(JSON.stringify(value));
}

// What a request asks for; throws a TypeError or SyntaxError that says what is wrong.
async function parse(request) {
  const ask = await json(request);
  if (typeof ask?.prompt !== "string" || !ask.prompt.trim()) {
    throw new TypeError("prompt must be a text");
  }
  for (const [name, value] of Object.entries(ask)) {
    if (name !== "prompt" && !NUMBERS.includes(name)) throw new TypeError(`unknown field: ${name}`);
    if (name !== "prompt" && !Number.isInteger(value)) {
      throw new TypeError(`${name} must be a whole number`);
    }
  }
  if (ask.max_tokens < 1) throw new TypeError("max_tokens must be at least 1");
  return ask;
}

async function stream(response, ask) {
  response.writeHead(200, {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
  });
  response.flushHeaders();
  let number = 0;
  try {
    for await (const word of words.reply(ask)) {
      if (response.destroyed) return;
      if (number++ === ask.truncate_after) return response.destroy();
      response.write(`data: ${JSON.stringify({ text: word })}\n\n`);
    }
    response.end("data: [DONE]\n\n");
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    response.end(`event: error\ndata: ${JSON.stringify(FAILURE)}\n\n`);
  }
}

async function complete(response, ask) {
  let text = "";
  try {
    for await (const word of words.reply(ask)) {
      if (response.destroyed) return;
      text += word;
    }
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    return answer(response, 500, { error: FAILURE });
  }
  const reply = { text, finish_reason: "length" };
  if (ask.truncate_after <= (ask.max_tokens ?? 100)) return cutShort(response, reply);
  answer(response, 200, reply);
}

// Half of an answer, then the end of the connection.
function cutShort(response, value) {
  const body = Buffer.from(JSON.stringify(value));
  response.writeHead(200, { "Content-Type": "application/json", "Content-Length": body.length });
  response.write(body.subarray(0, body.length / 2), () => response.destroy());
}

const routes = { "/stream": stream, "/complete": complete };

const server = createServer(async (request, response) => {
  if (request.method === "GET" && request.url === "/health") {
    return answer(response, 200, { status: "ok", running: words.running });
  }
  const route = routes[request.url];
  if (!route) return answer(response, 404, { error: { message: "there is nothing here" } });
  if (request.method !== "POST") {
    return answer(response, 405, { error: { message: "POST only" } });
  }
  try {
    await route(response, await parse(request));
  } catch (error) {
    if (response.headersSent || response.destroyed) return response.destroy();
    answer(response, 400, { error: { message: error.message } });
  }
});
server.listen({ port: Number(values.port), host: "127.0.0.1", backlog: 1024 }, () => {
  console.log(`http://127.0.0.1:${server.address().port}`);
});

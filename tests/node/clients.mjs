// The providers' clients for Node, on demand. A line of input is a JSON list of calls, which are
// made side by side; a line of output is the list of what came of each:
//
//   {"client": "openai", "base": "http://...", "method": "chat.completions.create", "args": [...]}
//   {"events": [...], "value": ..., "final": ..., "error": null}
//
// `events` is what the client yields where it yields anything, `value` what it returns otherwise.
// `final` names the method of a stream that gives its sum. `abortAfter` aborts the call when so
// many events that tell a piece of the reply have come. Nothing of a client is replaced.

import { createInterface } from 'node:readline'

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import Anthropic from '@anthropic-ai/sdk'
import * as ai from 'ai'
import OpenAI from 'openai'

// Its warnings are among what it tells; they would stand between the lines of output.
globalThis.AI_SDK_LOG_WARNINGS = false

const sdks = {
  openai: (base, key) => new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: 0 }),
  anthropic: (base, key) => new Anthropic({ baseURL: base, apiKey: key, maxRetries: 0 }),
}

// Each gives a model of `ai`, for one route of the server.
const models = {
  'ai chat': (name, options) => compatible(options).chatModel(name),
  'ai completions': (name, options) => compatible(options).completionModel(name),
  'ai responses': (name, options) => createOpenAI(options).responses(name),
  'ai messages': (name, options) => createAnthropic(options)(name),
}

const compatible = (options) =>
  createOpenAICompatible({
    name: 'here',
    includeUsage: true,
    supportsStructuredOutputs: true,
    ...options,
  })

async function call(asked) {
  const told = { events: [], value: null, final: null, error: null }
  try {
    await (asked.client in sdks ? callSdk : callAi)(asked, told)
  } catch (error) {
    told.error = inWords(error)
  }
  return told
}

// The providers' own clients: a method of the client, by its path.
async function callSdk({ client, base, key = 'none', method, args, final, abortAfter }, told) {
  const controller = new AbortController()
  const path = method.split('.')
  const name = path.pop()
  const owner = path.reduce((object, key) => object[key], sdks[client](base, key))
  const result = await owner[name](...args, { signal: controller.signal })
  if (!(Symbol.asyncIterator in result)) {
    told.value = result
    return
  }
  await collect(result, told, controller, abortAfter)
  if (final) told.final = await result[final]()
}

// `ai`: a function of the library and a model. It has its own words for a reply, and with
// `includeRawChunks` it yields, beside them, the events that it was told.
async function callAi({ client, base, key = 'none', method, args: [ask], abortAfter }, told) {
  const controller = new AbortController()
  const asked = {
    ...ask,
    model: models[client](ask.model, { baseURL: `${base}/v1`, apiKey: key }),
    maxRetries: 0,
    abortSignal: controller.signal,
  }
  if (ask.tools) {
    const entries = Object.entries(ask.tools)
    asked.tools = Object.fromEntries(
      entries.map(([name, schema]) => [name, ai.tool({ inputSchema: ai.jsonSchema(schema) })]),
    )
  }
  if (ask.output) asked.output = ai.Output.object({ schema: ai.jsonSchema(ask.output) })
  if (method === 'generateText') {
    const result = await ai.generateText(asked)
    const { text, toolCalls, finishReason, usage, warnings, response } = result
    told.value = { text, toolCalls, finishReason, usage, warnings, body: response.body }
    if (ask.output) told.final = result.output
    return
  }
  const result = ai.streamText({ ...asked, includeRawChunks: true, onError() {} })
  await collect(result.fullStream, told, controller, abortAfter)
  if (ask.output) told.final = await result.output
}

async function collect(stream, told, controller, abortAfter) {
  let pieces = 0
  for await (const event of stream) {
    told.events.push(event.error instanceof Error ? { ...event, error: inWords(event.error) } : event)
    if (isPiece(event) && ++pieces === abortAfter) controller.abort()
  }
}

const isPiece = (event) =>
  event.choices?.[0]?.delta?.content ||
  event.choices?.[0]?.text ||
  event.type === 'response.output_text.delta' ||
  event.type === 'content_block_delta' ||
  event.type === 'text-delta'

// The names that the clients' documentation gives to what an error says.
const inWords = ({ name, constructor, message, status, statusCode, code, param, type, error }) => ({
  name: name === 'Error' ? constructor.name : name,
  message,
  status: status ?? statusCode ?? null,
  code,
  param,
  type: type ?? error?.error?.type,
})

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await Promise.all(JSON.parse(line).map(call))))
}

// The openai JavaScript client's fixed script against one server. Prints what it saw as JSON; the Python test judges it.
// node openai_client.mjs BASE_URL API_KEY MODEL
import OpenAI from "openai";

const [, , baseURL, apiKey, model] = process.argv;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Sag etwas über Käse 🧀" }];
const settings = { model, temperature: 0, max_tokens: 40 };

async function refused(promise) {
  try {
    await promise;
    return { refused: false };
  } catch (error) {
    return { refused: true, kind: error.constructor.name, status: error.status, param: error.param, code: error.code, message: error.message };
  }
}

async function gather(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function chatStream(extra = {}) {
  return gather(await client.chat.completions.create({ ...settings, messages, stream: true, ...extra }));
}

async function helper() {
  const stream = client.chat.completions.stream({ ...settings, messages });
  let text = "";
  stream.on("content", (delta) => { text += delta; });
  return { text, final: await stream.finalContent(), joined: text };
}

async function abandoned() {
  const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 1500, ignore_eos: true });
  let seen = 0;
  for await (const _ of stream) if (++seen === 3) break;    // leaving the loop aborts the request
  return seen;
}

const several = { model, prompt: ["one", "two"], n: 2, temperature: 0, max_tokens: 5 };
const seen = {
  models: (await client.models.list()).data,
  model: await client.models.retrieve(model),
  chat: await client.chat.completions.create({ ...settings, messages }),
  chat_stream: await chatStream({ stream_options: { include_usage: true } }),
  chat_stop: await client.chat.completions.create({ ...settings, messages, stop: ["e"] }),
  chat_stop_stream: await chatStream({ stop: ["e"] }),
  chat_logprobs: await client.chat.completions.create({ ...settings, max_tokens: 3, messages, logprobs: true, top_logprobs: 2 }),
  helper: await helper(),
  completion: await client.completions.create({ ...settings, prompt: "Once upon a time" }),
  completion_stream: await gather(await client.completions.create({ ...settings, prompt: "Once upon a time", stream: true })),
  completion_ids: await client.completions.create({ ...settings, prompt: [5, 6, 7], max_tokens: 2 }),
  completion_several: await client.completions.create(several),
  embedding: await refused(client.embeddings.create({ model, input: "x" })),
  structured: await refused(client.chat.completions.create({ ...settings, messages, response_format: { type: "json_schema", json_schema: { name: "x", schema: { not: {} } } } })),
  tools: await refused(client.chat.completions.create({ ...settings, messages, tools: [{ type: "web_search" }] })),
  wrong_model: await refused(client.chat.completions.create({ ...settings, messages, model: "no-such-model" })),
  wrong_value: await refused(client.chat.completions.create({ ...settings, messages, temperature: -1 })),
  unknown_field: await refused(client.chat.completions.create({ ...settings, messages, temperatur: 1 })),
  wrong_stream: await refused(client.chat.completions.create({ ...settings, messages, temperature: -1, stream: true })),
  wrong_key: await refused(new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list()),
  abandoned: await abandoned(),
};
process.stdout.write(JSON.stringify(seen));

// OpenAI's client for JavaScript against a server: node openai_client.mjs URL. Prints what it got as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "The quick" }];
const common = { model: "tiny", temperature: 0, max_tokens: 12 };
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);

const chat = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });
found.chat = chat.choices[0].message.content;
found.chatUsage = chat.usage;
found.chatLogprobs = chat.choices[0].logprobs.content.length;

found.chatStream = "";
for await (const chunk of await client.chat.completions.create({
  ...common, messages, stream: true, stream_options: { include_usage: true } })) {
  found.chatStream += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) found.chatStreamUsage = chunk.usage;
}

found.text = (await client.completions.create({ ...common, prompt: "The quick" })).choices[0].text;
found.textStream = "";
for await (const chunk of await client.completions.create({ ...common, prompt: "The quick", stream: true })) {
  found.textStream += chunk.choices[0].text;
}

found.several = (await client.chat.completions.create({
  ...common, messages, temperature: 1, seed: 3, n: 3 })).choices.map((choice) => choice.message.content);

const tools = [{ type: "function", function: { name: "pick", parameters: {
  type: "object", properties: { x: { enum: [1] } }, required: ["x"], additionalProperties: false } } }];
const call = await client.chat.completions.create({
  ...common, max_tokens: 100, messages, tools, tool_choice: { type: "function", function: { name: "pick" } } });
found.call = call.choices[0].message.tool_calls?.map((each) => each.function);

try {
  await client.chat.completions.create({ ...common, messages, temperature: -1 });
} catch (error) {
  found.error = { name: error.constructor.name, status: error.status, param: error.param };
}

const stopped = await client.chat.completions.create({ ...common, max_tokens: 100, messages, stream: true });
for await (const chunk of stopped) {
  if (chunk.choices[0]?.delta?.content) break; // the client closes the connection
}

console.log(JSON.stringify(found));

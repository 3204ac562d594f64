// Node's clients of OpenAI's API next to `tinygpt serve` with its default flags.
// `npm install openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod`, then `node clients.mjs [URL]`.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { z } from "zod";

const url = process.argv[2] ?? "http://127.0.0.1:8000/v1";
const talk = [{ role: "user", content: "Once upon a time" }];
const animal = z.object({ kind: z.enum(["fox", "wolf", "cat"]) });
const parameters = { type: "object", properties: { kind: { enum: ["fox", "wolf"] } }, required: ["kind"] };
const tools = [{ type: "function", function: { name: "see", parameters } }];
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const create = (asked) => client.chat.completions.create({ model: "demo", messages: talk, max_tokens: 40, ...asked });
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "t", baseURL: url, supportsStructuredOutputs: true });

async function joined(parts, textOf) {
  let text = "";
  for await (const part of parts) text += textOf(part) ?? "";
  return text;
}

const calls = [
  ["openai", "messages", async () => {
    const first = (await create()).choices[0].message;
    return (await create({ messages: [...talk, first, ...talk] })).choices[0].message.content;
  }],
  ["openai", "stream", async () => joined(await create({ stream: true }), (part) => part.choices[0]?.delta.content)],
  ["openai", "tool", async () => {
    const made = await create({ tools, tool_choice: "required" });
    return JSON.parse(made.choices[0].message.tool_calls[0].function.arguments).kind;
  }],
  ["openai", "responses", async () => (await client.responses.create({ model: "demo", input: "Once" })).output_text],
];
for (const [name, provider, chat] of [
  ["@ai-sdk/openai", openai, openai.chat("demo")],
  ["@ai-sdk/openai-compatible", compatible, compatible.chatModel("demo")],
]) {
  const asked = { model: provider("demo"), prompt: "Once", maxOutputTokens: 40 };
  const see = tool({ description: "See it.", inputSchema: animal });
  calls.push(
    [name, "generateText", async () => (await generateText(asked)).text],
    [name, "streamText", () => joined(streamText(asked).textStream, (part) => part)],
    [name, "generateObject", async () => (await generateObject({ ...asked, schema: animal })).object.kind],
    [name, "tool", async () => {
      const made = await generateText({ ...asked, model: chat, tools: { see }, toolChoice: "required" });
      return animal.parse(made.toolCalls[0].input).kind;
    }],
  );
}

for (const [name, what, call] of calls) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  const found = await call().catch((error) => ({ error: `${error}` }));
  const isRight = typeof found === "string" && found.trim() !== "";
  process.exitCode ||= isRight ? 0 : 1;
  console.log(`${name} ${version} ${what}: ${isRight ? "ok" : "WRONG"}, ${JSON.stringify(found).slice(0, 80)}`);
}

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const { API, API_KEY, BASE_URL, MODEL } = process.env;
// connect
const endpoint = { name: "rollout", baseURL: BASE_URL, apiKey: API_KEY };
const create = { chat: createOpenAICompatible, responses: createOpenAI, messages: createAnthropic }[API];
const model = create(endpoint)(MODEL);
const providerOptions = { openai: { store: false } };
// connected
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const messages = [];
let answer;
for (const content of ["What is 2 + 3 + 4?", "And 1 more?"]) {
  messages.push({ role: "user", content });
  answer = await generateText({
    model, providerOptions, messages, system: "Add with the tool.", tools: { add }, stopWhen: stepCountIs(5),
  });
  messages.push(...answer.responseMessages);
}
console.log(answer.text);

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const { API_KEY, BASE_URL, MODEL } = process.env;
// connect
const model = createOpenAICompatible({ name: "rollout", baseURL: BASE_URL, apiKey: API_KEY })(MODEL);
// connected
const add = createTool({
  id: "add",
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async (given) => String((given.context ?? given).a + (given.context ?? given).b),
});
const agent = new Agent({ id: "adder", name: "adder", instructions: "Add with the tool.", model, tools: { add } });
const messages = [];
let said;
for (const content of ["What is 2 + 3 + 4?", "And 1 more?"]) {
  messages.push({ role: "user", content });
  said = await agent.generate(messages, { maxSteps: 5 });
  messages.push(...said.response.messages);
}
console.log(said.text);

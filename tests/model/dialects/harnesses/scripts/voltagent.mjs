import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent, createTool } from "@voltagent/core";
import { z } from "zod";

const { API_KEY, BASE_URL, MODEL } = process.env;
// connect
const model = createOpenAICompatible({ name: "rollout", baseURL: BASE_URL, apiKey: API_KEY })(MODEL);
// connected
const add = createTool({
  name: "add",
  description: "Adds two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({ name: "adder", instructions: "Add with the tool.", model, tools: [add] });
let said;
for (const content of ["What is 2 + 3 + 4?", "And 1 more?"])
  said = await agent.generateText(content, { userId: "one", conversationId: "one" });
console.log(said.text);
process.exit(0);

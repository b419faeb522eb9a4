import { Agent, tool } from "@strands-agents/sdk";
import { OpenAIModel } from "@strands-agents/sdk/models/openai";
import { z } from "zod";

const { API_KEY, BASE_URL, MODEL } = process.env;
// connect
const model = new OpenAIModel({ api: "chat", modelId: MODEL, apiKey: API_KEY, clientConfig: { baseURL: BASE_URL } });
// connected
const add = tool({
  name: "add",
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  callback: ({ a, b }) => a + b,
});
const agent = new Agent({ model, tools: [add], systemPrompt: "Add with the tool.", printer: false });
let said;
for (const question of ["What is 2 + 3 + 4?", "And 1 more?"]) said = await agent.invoke(question);
console.log(said.toString());

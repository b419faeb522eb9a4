import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const { API, API_KEY, BASE_URL, MODEL } = process.env;
// connect
const model = new ChatOpenAI({
  model: MODEL,
  apiKey: API_KEY,
  configuration: { baseURL: BASE_URL },
  useResponsesApi: API === "responses",
});
// connected
const add = tool(({ a, b }) => String(a + b), {
  name: "add",
  description: "Adds two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});
const agent = createAgent({ model, tools: [add], systemPrompt: "Add with the tool." });
let messages = [];
for (const content of ["What is 2 + 3 + 4?", "And 1 more?"])
  ({ messages } = await agent.invoke({ messages: [...messages, { role: "user", content }] }));
console.log(messages.at(-1).text);

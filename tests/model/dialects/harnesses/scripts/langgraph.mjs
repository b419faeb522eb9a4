import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { tool } from "@langchain/core/tools";
import { MessagesAnnotation, StateGraph } from "@langchain/langgraph";
import { ToolNode, toolsCondition } from "@langchain/langgraph/prebuilt";
import { z } from "zod";

const { API, API_KEY, BASE_URL, MODEL } = process.env;
// connect
const model = API === "messages"
  ? new ChatAnthropic({ model: MODEL, apiKey: API_KEY, anthropicApiUrl: BASE_URL })
  : new ChatOpenAI({ model: MODEL, apiKey: API_KEY, configuration: { baseURL: BASE_URL } });
// connected
const add = tool(({ a, b }) => String(a + b), {
  name: "add",
  description: "Adds two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});
const bound = model.bindTools([add]);
const graph = new StateGraph(MessagesAnnotation)
  .addNode("model", async ({ messages }) => ({
    messages: [await bound.invoke([{ role: "system", content: "Add with the tool." }, ...messages])],
  }))
  .addNode("tools", new ToolNode([add]))
  .addEdge("__start__", "model")
  .addConditionalEdges("model", toolsCondition)
  .addEdge("tools", "model")
  .compile();
let messages = [];
for (const content of ["What is 2 + 3 + 4?", "And 1 more?"])
  ({ messages } = await graph.invoke({ messages: [...messages, { role: "user", content }] }));
console.log(messages.at(-1).text);

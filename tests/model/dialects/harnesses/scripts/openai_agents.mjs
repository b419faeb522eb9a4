import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
const { API, API_KEY, BASE_URL, MODEL } = process.env;
// connect
setTracingDisabled(true);
const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY });
const kind = API === "responses" ? OpenAIResponsesModel : OpenAIChatCompletionsModel;
const model = new kind(client, MODEL);
// connected
const add = tool({
  name: "add",
  description: "Adds two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({ name: "adder", instructions: "Add with the tool.", model, tools: [add] });
let history = [];
let result;
for (const question of ["What is 2 + 3 + 4?", "And 1 more?"]) {
  result = await run(agent, [...history, { role: "user", content: question }]);
  history = result.history;
}
console.log(result.finalOutput);

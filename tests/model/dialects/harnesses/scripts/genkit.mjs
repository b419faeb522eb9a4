import { genkit, z } from "genkit";
import { openAICompatible } from "@genkit-ai/compat-oai";

const { API_KEY, BASE_URL, MODEL } = process.env;
// connect
const ai = genkit({ plugins: [openAICompatible({ name: "rollout", apiKey: API_KEY, baseURL: BASE_URL })] });
const model = `rollout/${MODEL}`;
// connected
const add = ai.defineTool(
  {
    name: "add",
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    outputSchema: z.number(),
  },
  async ({ a, b }) => a + b,
);
let messages = [{ role: "system", content: [{ text: "Add with the tool." }] }];
let said;
for (const prompt of ["What is 2 + 3 + 4?", "And 1 more?"]) {
  said = await ai.generate({ model, messages, prompt, tools: [add] });
  messages = said.messages;
}
console.log(said.text);

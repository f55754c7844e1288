// An agent loop of OpenAI's library for Node: its own runner on chat, a loop over streams on responses.
import { readFileSync, writeFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const model = process.env.MODEL;
const prompt = readFileSync(0, "utf8");
const text = { type: "string" };
const functions = {
  read_file: { properties: { path: text }, run: ({ path }) => readFileSync(path, "utf8") },
  write_file: {
    properties: { path: text, content: text },
    run: ({ path, content }) => {
      writeFileSync(path, content);
      return "written";
    },
  },
};
const schemas = Object.entries(functions).map(([name, { properties }]) => ({
  name,
  description: `${name} in the working folder`,
  parameters: { type: "object", properties, required: Object.keys(properties) },
}));

async function chat() {
  const tools = schemas.map((schema) => ({
    type: "function",
    function: { ...schema, function: functions[schema.name].run, parse: JSON.parse },
  }));
  const messages = [{ role: "user", content: prompt }];
  const runner = client.chat.completions.runTools({ model, messages, tools, stream: true }, { maxChatCompletions: 100 });
  return runner.finalContent();
}

async function responses() {
  const input = [{ role: "user", content: prompt }];
  const tools = schemas.map((schema) => ({ type: "function", strict: false, ...schema }));
  for (;;) {
    const response = await client.responses.stream({ model, input, tools }).finalResponse();
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return response.output_text;
    for (const { call_id, name, arguments: given } of calls) {
      input.push({ type: "function_call", call_id, name, arguments: given });
    }
    for (const { call_id, name, arguments: given } of calls) {
      input.push({ type: "function_call_output", call_id, output: functions[name].run(JSON.parse(given)) });
    }
  }
}

console.log(await (model.includes("responses") ? responses : chat)());

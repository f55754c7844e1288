// An agent loop of Anthropic's library for Node, streamed.
import { readFileSync, writeFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic();
const text = { type: "string" };
const tools = Object.entries({ read_file: { path: text }, write_file: { path: text, content: text } }).map(
  ([name, properties]) => ({
    name,
    description: `${name} in the working folder`,
    input_schema: { type: "object", properties, required: Object.keys(properties) },
  }),
);
const call = (name, { path, content }) => {
  if (name === "read_file") return readFileSync(path, "utf8");
  writeFileSync(path, content);
  return "written";
};

const messages = [{ role: "user", content: readFileSync(0, "utf8") }];
for (;;) {
  const { content } = await client.messages
    .stream({ model: process.env.MODEL, max_tokens: 8000, messages, tools })
    .finalMessage();
  messages.push({ role: "assistant", content });
  const uses = content.filter((block) => block.type === "tool_use");
  if (uses.length === 0) {
    console.log(content.map((block) => block.text ?? "").join(""));
    break;
  }
  messages.push({
    role: "user",
    content: uses.map(({ id, name, input }) => ({ type: "tool_result", tool_use_id: id, content: call(name, input) })),
  });
}

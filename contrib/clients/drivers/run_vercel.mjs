// Vercel's AI SDK with the model that `connect` writes: streamText and its own loop over tools.
import { readFileSync, writeFileSync } from "node:fs";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { model } from "./connected.mjs";

const path = z.string();
const result = streamText({
  model,
  prompt: readFileSync(0, "utf8"),
  stopWhen: stepCountIs(100),
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
  tools: {
    read_file: tool({
      description: "Reads a file.",
      inputSchema: z.object({ path }),
      execute: async ({ path }) => readFileSync(path, "utf8"),
    }),
    write_file: tool({
      description: "Writes a file.",
      inputSchema: z.object({ path, content: z.string() }),
      execute: async ({ path, content }) => {
        writeFileSync(path, content);
        return "written";
      },
    }),
  },
});
for await (const part of result.textStream) process.stdout.write(part);

// Drives a cluster by the client that openapi-typescript and openapi-fetch give. Prints what it saw as one JSON object.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { env } from "node:process";
import { setTimeout as sleep } from "node:timers/promises";
import createClient from "openapi-fetch";
import type { components, paths } from "./api.d.ts";

type Schemas = components["schemas"];
type Answer<T> = { data?: T; error?: Schemas["Problem"]; response: Response };

const LIMIT_MS = 60_000;

function given(name: string): string {
  const value = env[name];
  if (value === undefined) throw new Error(`${name} is not set`);
  return value;
}

function good<T>(answer: Answer<T>): T {
  if (answer.data === undefined) throw new Error(`${answer.response.status} ${JSON.stringify(answer.error)}`);
  return answer.data;
}

const job = given("SCENARIO_JOB");
const path = { job };
const client = createClient<paths>({
  baseUrl: given("SCENARIO_URL"),
  headers: { Authorization: `Bearer ${given("SCENARIO_TOKEN")}` },
});

async function jobWhen(holds: (found: Schemas["JobView"]) => boolean): Promise<Schemas["JobView"]> {
  const end = Date.now() + LIMIT_MS;
  for (;;) {
    const found = good(await client.GET("/v1/jobs/{job}", { params: { path } }));
    if (holds(found)) return found;
    if (Date.now() > end) throw new Error(`still ${JSON.stringify(found)}`);
    await sleep(100);
  }
}

const asked = {
  name: job,
  settings: {
    dataset: { kind: "npy", urls: given("SCENARIO_FILES").split(","), aligned: true },
    epochs: 10_000,
    global_batch_size: 32,
    lanes: 4,
    records_per_task: 16,
    block_bytes: 256,
  },
  source: { file_name: "script.py", text: readFileSync(given("SCENARIO_SCRIPT"), "utf8") },
  scheduling: { max_trainers: 1 },
} satisfies Schemas["CreateJob"];

async function createJob(key: string): Promise<Schemas["JobView"]> {
  return good(await client.POST("/v1/jobs", { params: { header: { "Idempotency-Key": key } }, body: asked }));
}

const key = randomUUID();
const created = await createJob(key);
const again = await createJob(key);
await jobWhen((found) => (found.progress.step ?? 0) >= 1);

const tasks = new Set<string>();
let token = "";
let pages = 0;
do {
  const query = { page_size: 5, page_token: token };
  const page = good(await client.GET("/v1/jobs/{job}/tasks", { params: { path, query } }));
  for (const task of page.tasks) tasks.add(task.task_id);
  token = page.next_page_token ?? "";
  pages += 1;
} while (token !== "");

const header = () => ({ "Idempotency-Key": randomUUID() });

/** The operation once it has ended well. */
async function ended(begun: Answer<Schemas["Operation"]>): Promise<Schemas["Operation"]> {
  let operation = good(begun);
  while (operation.state === "RUNNING") {
    const params = { path: { ...path, operation_id: operation.operation_id }, query: { wait_s: 4 } };
    operation = good(await client.GET("/v1/jobs/{job}/operations/{operation_id}", { params }));
  }
  if (operation.state !== "DONE") throw new Error(JSON.stringify(operation));
  return operation;
}

const readJob = async () => good(await client.GET("/v1/jobs/{job}", { params: { path } }));

const operation = await ended(
  await client.POST("/v1/jobs/{job}/checkpoints", { params: { path, header: header() }, body: { cause: "scenario" } }),
);
const { resize } = await ended(
  await client.POST("/v1/jobs/{job}/resizes", { params: { path, header: header() }, body: { trainers: 2 } }),
);
if (!resize) throw new Error("no resize");

const step = (await readJob()).progress.step ?? 0;
await ended(await client.POST("/v1/jobs/{job}/pause", { params: { path, query: { wait_s: 4 } } }));
const paused = await readJob();
await ended(await client.POST("/v1/jobs/{job}/resume", { params: { path } }));
await jobWhen((found) => found.state === "RUNNING" && (found.progress.step ?? 0) > step);

const events: number[] = [];
while (events.length < 3) {
  const query = { after: events.at(-1) ?? 0, wait_s: 4, page_size: 2 };
  const page = good(await client.GET("/v1/jobs/{job}/events", { params: { path, query } }));
  events.push(...page.events.map((event) => event.event_id));
}

const named = { ...path, task_id: "no-such-task" };
const unknown = await client.GET("/v1/jobs/{job}/tasks/{task_id}", { params: { path: named } });
if (unknown.error === undefined) throw new Error("a task that does not exist was shown");
await ended(await client.POST("/v1/jobs/{job}/cancel", { params: { path } }));
const cancelled = await readJob();
console.log(
  JSON.stringify({
    version: good(await client.GET("/v1/version")).version,
    same: created.create_time === again.create_time,
    tasks: tasks.size,
    pages,
    checkpoint: operation.state,
    resize: resize.phase,
    trainers: resize.trainers,
    events,
    problem: unknown.error.code,
    states: [paused.state, cancelled.state],
  }),
);

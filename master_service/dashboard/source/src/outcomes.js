// What became of jobs: step and loss from their stored metrics, and how long they took.
import { get, jobPath, list, Problem } from "./api.svelte.js";

const KEPT = 1000;
const TAIL = 100; // an asynchronous job's last loss: the mean over so many minibatches
const known = new Map(); // "job version" -> outcome: an ended job changes only with its version

/** What a job's stored metrics tell of its end: {step, about, loss, of, epoch}, as far as they do. */
export async function storedEnd(name, signal) {
  const path = jobPath(name, "metric-series");
  const found = (await list(path, "series", 1000, signal)).find((each) => each.name === "loss");
  if (!found) return {};
  const end = { step: found.last_step + 1, about: found.width > 1 };
  const byEpoch = await pointsOf(path, { by: "epoch", points: 1 }, signal);
  if (byEpoch.length) return { ...end, loss: byEpoch[0].mean, epoch: byEpoch[0].epoch, of: `of epoch ${byEpoch[0].epoch + 1}` };
  const tail = await pointsOf(path, { from_step: Math.max(found.first_step, found.last_step - TAIL + 1), points: 1 }, signal);
  return tail.length ? { ...end, loss: tail[0].mean, of: `of the last ${TAIL} minibatches` } : end;
}

async function pointsOf(path, query, signal) {
  try {
    return (await get(`${path}/loss`, query, signal)).points;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return []; // not kept by epoch
    throw error;
  }
}

/** Of an ended job of a list: {loss, of, metrics, best, failure}; asked for once. */
export async function outcomeOf(job, signal) {
  const key = `${job.job} ${job.version}`;
  if (known.has(key)) return known.get(key);
  const whole = await get(jobPath(job.job), {}, signal);
  const { loss, of } = await storedEnd(job.job, signal).catch((error) => {
    if (error instanceof Problem && !error.retryable) return {}; // its storage is gone or cannot be read
    throw error;
  });
  const found = { loss, of, metrics: whole.result?.metrics ?? {}, best: whole.result?.best, failure: whole.failure };
  known.set(key, found);
  if (known.size > KEPT) known.delete(known.keys().next().value);
  return found;
}

/** Seconds from its last start to its end; undefined: it has not ended, or never started. */
export const tookSeconds = (job) =>
  job.start_time && job.end_time ? Math.max(0, (new Date(job.end_time) - new Date(job.start_time)) / 1000) : undefined;

// What became of jobs: step and loss from their stored metrics, and how long they took.
import { get, jobPath, list, Problem } from "./api.svelte.js";

const TAIL = 100; // an asynchronous job's last loss: the mean over so many minibatches
const FAILURE = 120; // characters of an exception that a list shows

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

/** What the loss of a job in a list is a mean of. */
export function ofWhat({ progress, end_time }) {
  if (progress.loss == null) return undefined;
  return end_time ? `of epoch ${Math.min(progress.epoch + 1, progress.epochs)}` : "of the epoch under way";
}

/** An exception of the script, in a line. */
export const whatFailed = ({ error_type, message }) => `${error_type}: ${message.slice(0, FAILURE)}`;

/** Seconds from its last start to its end; undefined: it has not ended, or never started. */
export const tookSeconds = (job) =>
  job.start_time && job.end_time ? Math.max(0, (new Date(job.end_time) - new Date(job.start_time)) / 1000) : undefined;

// What each failure cost, from the events of the job.

const seconds = (from, to) => Math.max(0, (new Date(to) - new Date(from)) / 1000);

/** The newest first: {id, time, what, outcome, open}. */
export function receiptsOf(events) {
  const found = [];
  let back = null; // a rollback that is not over
  const absent = new Map(); // parameter server -> receipt, asynchronous
  let last = null; // the event before, once the job has run: masters that begin are no failure
  for (const event of events) {
    const { fields } = event;
    if (event.name === "rolling_back") {
      if (back) back.outcome = `went on as another rollback after ${seconds(back.time, event.event_time).toFixed(1)} s`;
      if (back) back.open = false;
      back = receipt(event, fields.cause || event.message, `going back to step ${fields.step}`, true);
      found.push(back);
    } else if (event.name === "rolled_back") {
      const replayed = `${Number(fields.records_replayed ?? 0).toLocaleString("en")} records trained again, none lost`;
      if (back) Object.assign(back, { outcome: `training again after ${seconds(back.time, event.event_time).toFixed(1)} s from step ${fields.step}; ${replayed}`, open: false });
      back = null;
    } else if (event.name === "pserver_lost") {
      const made = receipt(event, event.message, "the others go on; it is not back yet", true);
      absent.set(fields.pserver, made);
      found.push(made);
    } else if (event.name === "pserver_back") {
      const made = absent.get(fields.pserver);
      const lost = `${Number(fields.lost_minibatches ?? 0).toLocaleString("en")} minibatches of closed tasks lost`;
      if (made) Object.assign(made, { outcome: `back after ${seconds(made.time, event.event_time).toFixed(1)} s; ${lost}`, open: false });
      absent.delete(fields.pserver);
    } else if (event.name === "task_discarded") {
      const records = Number(fields.records ?? 0).toLocaleString("en");
      found.push(receipt(event, event.message, `${records} records are left out${fields.epoch === undefined ? "" : ` of epoch ${fields.epoch + 1}`}; training goes on`, false));
    } else if (event.name === "user_failure") {
      found.push(receipt(event, event.message, "the script's code failed outside of a task; it is tried again", false));
    } else if (event.name === "job_failed") {
      found.push(receipt(event, event.message, "the job has ended", false));
    } else if (event.name === "generation_changed" && / is gone/.test(event.message)) {
      found.push(receipt(event, event.message, `its lanes moved at once: generation ${fields.generation}, ${fields.trainers} trainers`, false));
    } else if (event.name === "master_elected" && last) {
      found.push(receipt(event, event.message, `the job was led again at most ${seconds(last.event_time, event.event_time).toFixed(1)} s after the last event before`, false));
    }
    if (last !== null || event.name === "job_running") last = event;
  }
  return found.reverse();
}

const receipt = (event, what, outcome, open) => ({ id: event.event_id, time: event.event_time, what, outcome, open });

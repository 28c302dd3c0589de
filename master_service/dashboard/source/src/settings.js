// The settings of jobs as lines of a table, and which of them differ.

const LONG = 160; // characters of a value

/** What a job was told, by name: its settings, those of objects as `dataset.kind` (without what is null there), then the script and what
 * the scheduler was told. */
export function linesOf(job) {
  const found = new Map();
  const add = (name, value) => {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return void found.set(name, value);
    for (const [key, each] of Object.entries(value)) if (each !== null) add(`${name}.${key}`, each);
  };
  for (const [name, value] of Object.entries(job.settings ?? {})) add(name, value);
  found.set("script", job.script.replace(/^source:([0-9a-f]{8})[0-9a-f]*\//, "$1 "));
  if (job.scheduling) add("scheduling", job.scheduling);
  return found;
}

/** The names of all lines of the jobs, in their order, each once: {name, values, differs}. */
export function rowsOf(jobs) {
  const lines = jobs.map(linesOf);
  const names = [...new Set(lines.flatMap((each) => [...each.keys()]))];
  return names.map((name) => {
    const values = lines.map((each) => each.get(name));
    return { name, values, differs: new Set(values.map((each) => JSON.stringify(each))).size > 1 };
  });
}

/** Whether it is what a job has that says nothing of it; undefined: there is no such value. `defaults`: of settings, and of the scheduler
 * as `scheduling.priority`. */
export function isDefault(defaults, job, name) {
  const key = name in defaults ? name : name.split(".")[0];
  if (!(key in defaults)) return undefined;
  const value = key.startsWith("scheduling.") ? job.scheduling[key.slice("scheduling.".length)] : job.settings[key];
  return JSON.stringify(value ?? null) === JSON.stringify(defaults[key] ?? null);
}

export function shownAs(value) {
  if (value == null) return "–";
  if (Array.isArray(value)) value = value.every((each) => each === null || typeof each !== "object") ? value.join(", ") || "none" : JSON.stringify(value);
  const text = typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 12 }) : String(value);
  return text.length > LONG ? `${text.slice(0, LONG)} … (${text.length} characters)` : text || "empty";
}

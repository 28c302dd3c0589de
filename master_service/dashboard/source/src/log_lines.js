// Lines of a log, as many as the page keeps, and how one is shown.
export const MOST_LINES = 3000;
const MOST_CHARACTERS = 2000; // of a line
const LEVELS = ["warning", "error", "critical"];
const COLOURS = /\u001b\[[0-9;?]*[A-Za-z]/g;

/** Portions as the API gives them, each with the place where it begins; the oldest go first. `after`: null before the first answer. */
export class Kept {
  constructor() {
    this.portions = [];
    this.after = null;
    this.next = 0;
  }

  begin(answer) {
    this.portions = [this.portion(answer.lines, answer.next_before)];
    this.after = answer.next_after;
  }

  add(answer) {
    if (answer.lines.length > 0) this.portions.push(this.portion(answer.lines, this.after));
    this.after = answer.next_after;
    while (this.portions.length > 1 && this.count() > MOST_LINES) this.portions.shift();
  }

  addBefore(answer) {
    this.portions.unshift(this.portion(answer.lines, answer.lines.length > 0 ? answer.next_before : 0));
  }

  /** The byte where the first line begins. */
  get before() {
    return this.portions[0]?.before ?? 0;
  }

  lines() {
    return this.portions.flatMap((each) => each.lines);
  }

  count() {
    return this.portions.reduce((sum, each) => sum + each.lines.length, 0);
  }

  portion(lines, before) {
    return { before, lines: lines.map((line) => ({ id: this.next++, time: line.time, text: line.text.replace(COLOURS, "") })) };
  }
}

/** Our own lines are JSON: {level, event, ...}; all others are shown as they are. */
export function lineOf({ text }) {
  if (text.startsWith("{")) {
    try {
      const { timestamp, level = "", event, room, member, service, job, ...fields } = JSON.parse(text);
      if (typeof event === "string") {
        const told = Object.entries(fields).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
        return { level: LEVELS.includes(level) ? "wrong" : "own", head: event, text: cut(told.join(" ")) };
      }
    } catch {
      // a line that only begins like one
    }
  }
  return { level: "", head: "", text: cut(text) };
}

const cut = (text) => (text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)} … (${text.length} characters)` : text);

// What a part of the page was asked to do, and what became of it.
import { connection, Problem } from "./api.svelte.js";

/** Why nothing may be changed with this token; "": it may. */
export const readOnly = () =>
  connection.role && connection.role !== "admin" ? `The token is a ${connection.role}'s, which may only read; an admin's may change jobs.` : "";

export const told = (error) => (error instanceof Problem ? [error.message, error.hint].filter(Boolean).join("; ") : "no master answers");

/** `said`: for people, about the last request. `busy`: which one is not answered yet. */
export class Asked {
  said = $state("");
  wrong = $state(false);
  busy = $state("");

  /** `call` answers what has been done. */
  async act(what, call) {
    this.busy = what;
    this.wrong = false;
    this.said = `${what} …`;
    try {
      this.said = await call();
    } catch (error) {
      this.refuse(`${what} was not done: ${told(error)}`);
    }
    if (this.busy === what) this.busy = "";
  }

  refuse(reason) {
    this.wrong = true;
    this.said = reason;
  }
}

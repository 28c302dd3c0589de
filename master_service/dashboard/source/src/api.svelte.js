// Requests to the REST API, and what is known of the connection. The token is in a header of each request, never in an address.
const TOKEN = "trireme-token"; // in sessionStorage: of this tab, until it is closed
const TIMEOUT_MS = 10_000;
const REPEAT_MS = 1_000;
const REPEATED_FOR_MS = 30_000;
const SILENT_MS = 30_000; // a stream sends something every 10 s

/** `state`: connecting, connected, lost. `since`: of that state. `asks`: the master asks for a token, and why. `enters`: a login code is
 * being exchanged. `role`: of the token. */
export const connection = $state({ state: "connecting", since: Date.now(), reason: "", asks: "", enters: false, role: "", version: "" });

/** An answer that is no success: RFC 9457 problem details. */
export class Problem extends Error {
  constructor(status, body, retryAfterMs) {
    super(body.detail || body.title || `HTTP ${status}`);
    Object.assign(this, { status, retryAfterMs, code: body.code ?? "", hint: body.hint ?? "", details: body.details ?? {} });
    this.retryable = Boolean(body.retryable);
  }
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export function useToken(given) {
  sessionStorage.setItem(TOKEN, given);
  connection.asks = "";
}

const LOGIN = /^#\/login\/([^/]+)(\/.*)?$/;

/** What an address names without the login code in it, `#/login/CODE/jobs/NAME`, which `trireme dashboard` opens: the code leaves the
 * address at once and is exchanged for a token, once. */
export function entered(hash) {
  const found = LOGIN.exec(hash);
  if (!found) return hash;
  const rest = `#${found[2] ?? "/"}`;
  history.replaceState(null, "", rest);
  connection.enters = true;
  void exchange(found[1]);
  return rest;
}

async function exchange(code) {
  const until = Date.now() + REPEATED_FOR_MS;
  for (;;) {
    try {
      const headers = new Headers({ Accept: "application/json", Authorization: `Bearer ${code}` });
      const answer = await open("POST", "v1/logins", {}, { headers, signal: limited(undefined, TIMEOUT_MS) });
      const { token: given } = await answer.json();
      if (given) useToken(given);
      break;
    } catch (error) {
      if (!(error instanceof Problem) && Date.now() < until) await sleep(REPEAT_MS); // nobody has used the code yet
      else {
        const over = error.status === 401;
        if (!token()) connection.asks = over ? "This link was used already, is older than two minutes, or its master has ended." : error.message;
        break;
      }
    }
  }
  connection.enters = false;
}

export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
  connection.role = "";
  connection.asks = "The token is forgotten.";
}

/** A path below the page: /v1/jobs/NAME/..., also behind a proxy that serves it below a prefix. */
export const jobPath = (job, ...more) => ["v1", "jobs", job, ...more].map(encodeURIComponent).join("/");

export const get = (path, query = {}, signal = undefined, waitMs = 0) => send("GET", path, { query, signal, waitMs });

/** Asks for a change. It is repeated under the same key while no master answers, and so done once. */
export async function change(path, body = undefined) {
  const key = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const until = Date.now() + REPEATED_FOR_MS;
  for (;;) {
    try {
      return await send("POST", path, { body, key });
    } catch (error) {
      const again = error instanceof Problem ? error.retryable && error.status !== 429 : true;
      if (!again || Date.now() > until) throw error;
      await sleep(REPEAT_MS);
    }
  }
}

/** All items of a list, at most `most`. */
export async function list(path, name, most = 1000, signal = undefined) {
  const found = [];
  let page_token = "";
  do {
    const page = await get(path, { page_size: Math.min(most, 1000), ...(page_token && { page_token }) }, signal);
    found.push(...page[name]);
    page_token = page.next_page_token;
  } while (page_token && found.length < most);
  return found;
}

async function send(method, path, { query = {}, body, key, signal, waitMs = 0 }) {
  const headers = new Headers(ownHeaders());
  if (key) headers.set("Idempotency-Key", key);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  const answer = await open(method, path, query, { headers, body: body && JSON.stringify(body), signal: limited(signal, TIMEOUT_MS + waitMs) });
  return await answer.json();
}

function ownHeaders() {
  const given = token();
  return { Accept: "application/json", "Trireme-Forward": "leader", ...(given && { Authorization: `Bearer ${given}` }) };
}

const limited = (signal, ms) => (signal ? AbortSignal.any([signal, AbortSignal.timeout(ms)]) : AbortSignal.timeout(ms));

/** Raises Problem, TypeError (nobody answers), AbortError, TimeoutError. */
async function open(method, path, query, options) {
  const words = new URLSearchParams(query).toString();
  let answer;
  try {
    answer = await fetch(words ? `${path}?${words}` : path, { method, cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (!options.signal?.aborted || options.signal.reason?.name === "TimeoutError") lose("No master answers at this address.");
    throw error;
  }
  if (answer.ok) {
    become("connected");
    return answer;
  }
  const problem = await problemOf(answer);
  if (answer.status === 401) {
    const given = token();
    if (given === (options.headers.get("Authorization") ?? "").slice("Bearer ".length)) {
      sessionStorage.removeItem(TOKEN);
      connection.asks = given ? "This token is unknown or has expired." : "This master asks for a token.";
    }
  } else if (problem.retryable && answer.status >= 500) {
    lose(problem.message);
  } else {
    become("connected");
  }
  throw problem;
}

async function problemOf(answer) {
  const afterMs = 1000 * Number(answer.headers.get("Retry-After") || 0);
  try {
    return new Problem(answer.status, await answer.json(), afterMs);
  } catch {
    return new Problem(answer.status, { title: `HTTP ${answer.status}`, retryable: answer.status >= 500 }, afterMs);
  }
}

function become(state) {
  if (connection.state !== state) Object.assign(connection, { state, since: Date.now() });
  if (state === "connected") connection.reason = "";
}

function lose(reason) {
  become("lost");
  connection.reason = reason;
}

/** Who may do what with the token. */
export async function lookAtAccess(signal) {
  const [access, version] = [await get("v1/access", {}, signal), await get("v1/version", {}, signal)];
  connection.role = access.role;
  connection.version = version.version;
}

export const sleep = (ms, signal = undefined) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });

/** Resolves once somebody can see the page. */
export const shown = () =>
  new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", function look() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    });
  });

/** Calls `look` again and again until `signal`, while somebody sees the page. Errors of the connection are shown elsewhere. */
export async function repeat(everyMs, signal, look) {
  await null; // what `look` reads at once is no reason to run the effect again that it was called in
  while (!signal.aborted) {
    let pauseMs = everyMs;
    try {
      await look(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.retryAfterMs) pauseMs = Math.max(pauseMs, Math.min(error.retryAfterMs, 10_000));
      else if (!(error instanceof Problem) && !["TypeError", "TimeoutError", "AbortError"].includes(error.name)) throw error;
    }
    if (connection.asks) return;
    await sleep(pauseMs, signal);
    await shown();
  }
}

/** Follows a stream of events until `signal`: `take(events)` gets each once, in order; `gap()`: some were forgotten before. */
export async function follow(path, signal, take, gap) {
  await null; // as in `repeat`
  let after = 0;
  const seen = (events) => {
    const fresh = events.filter((event) => event.event_id > after);
    if (fresh.length === 0) return;
    after = fresh.at(-1).event_id;
    take(fresh);
  };
  while (!signal.aborted && !connection.asks) {
    await shown();
    try {
      await stream(`${path}/stream`, after, signal, seen);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status === 410) {
        after = error.details.oldest - 1; // the log begins later, or is another one
        gap();
        continue;
      }
      if (error instanceof Problem && error.status === 429) await poll(path, after, signal, seen);
    }
    await sleep(REPEAT_MS, signal);
  }
}

/** Too many streams are open there: a few rounds of requests that wait. */
async function poll(path, after, signal, seen) {
  for (let round = 0; round < 5 && !signal.aborted; round++) {
    const page = await get(path, { after, wait_s: 10 }, signal, 10_000).catch(() => ({ events: [], next_after: after }));
    seen(page.events);
    after = page.next_after;
  }
}

/** Server-sent events by fetch, since an EventSource cannot send a token. Ends when the stream does, when it is silent, and when nobody
 * sees the page (a browser opens six connections to a master, for all its tabs). */
async function stream(path, after, signal, seen) {
  const ended = new AbortController();
  let watch = setTimeout(() => ended.abort(), SILENT_MS);
  const hide = () => document.hidden && ended.abort();
  document.addEventListener("visibilitychange", hide);
  try {
    const both = AbortSignal.any([signal, ended.signal]);
    const answer = await open("GET", path, { after }, { headers: new Headers({ ...ownHeaders(), Accept: "text/event-stream" }), signal: both });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(watch);
      watch = setTimeout(() => ended.abort(), SILENT_MS);
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      seen(blocks.flatMap(dataOf).map((data) => JSON.parse(data)));
    }
  } finally {
    clearTimeout(watch);
    document.removeEventListener("visibilitychange", hide);
  }
}

const dataOf = (block) => block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice("data: ".length));

// The daemon's operations as this session may call them, and its feed: one connection for all tabs of this browser.

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The daemon did not answer. The feed shows that on the page. */
export class Away extends Error {}

export function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const words = new URLSearchParams(given).toString();
  return call("GET", words ? `${path}?${words}` : path);
}

export const post = (path, body = {}) => call("POST", path, body);

/** Whether a person did something since the last request: a page's own reloads do not keep the session open. */
let used = true;
for (const kind of ["pointerdown", "keydown", "wheel"]) addEventListener(kind, () => (used = true), { capture: true, passive: true });

async function call(method, path, body) {
  const request = { method, headers: {} };
  if (!used) request.headers["covenant-reload"] = "1";
  used = false;
  if (body !== undefined) {
    request.headers["content-type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(`/ui/api/${path}`, request);
  } catch {
    throw new Away("the daemon does not answer");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (response.status === 401) {
    logIn();
    return new Promise(() => {}); // The browser leaves this page.
  }
  throw new Refused(response.status, answer.code ?? "error", answer.message ?? `status ${response.status}`);
}

let leaving = false;
let ended = "";

function logIn() {
  if (leaving) return;
  leaving = true;
  const here = location.pathname + location.search;
  location.assign(`/ui/login?${ended}next=${encodeURIComponent(here)}`);
}

let user = null;

/** The logged-in principal and its rights: `may("cancel")`. Retries until the daemon answers; then the page reads
   again. */
export const session = () => (user ??= readUser(0));

async function readUser(failures) {
  try {
    const found = await get("session");
    ended = "ended=yes&";
    if (state === "lost") deliver("resync", {});
    return { ...found, may: (verb) => found.can.includes(verb) };
  } catch {
    deliver("state", "lost");
    return new Promise((done) => later((count) => done(readUser(count)), failures));
  }
}

const later = (run, failures) => setTimeout(() => run(failures + 1), Math.min(500 * 2 ** failures, 8_000));

/** The agents of all tenants, each with its `tenant`. */
export async function allAgents() {
  const { tenants } = await get("v1/admin/tenants");
  const lists = await Promise.all(tenants.map(({ name }) => get(`v1/admin/tenants/${encodeURIComponent(name)}/agents`)));
  return lists.flatMap(({ tenant, agents }) => agents.map((agent) => ({ ...agent, tenant })));
}

/** The parts of the path after the page's name, still encoded: `/ui/task/42` has `["42"]`. */
export const rest = () => location.pathname.split("/").slice(3).filter(Boolean);

// The feed. The tab that holds the lock has the connection, and tells the other tabs. When it closes, another tab takes
// the lock, and all read again (`resync`). Without locks (plain http from elsewhere) each tab has a connection.

const NAME = "covenant.feed";
const EVENTS = ["hello", "counts", "tasks", "peers", "pushes", "audit", "nodes", "resync", "end"];

const events = new EventTarget();
const channel = new BroadcastChannel(NAME);
let state = "connecting";
let isLeader = false;

/** Calls `listener(data)` for each event of this kind; `state` is the connection's: connecting, live, lost. */
export function on(kind, listener) {
  events.addEventListener(kind, (event) => listener(event.detail));
}

export function connect() {
  channel.addEventListener("message", ({ data }) => {
    if (data.kind === "who") {
      if (isLeader) channel.postMessage({ kind: "state", data: state });
    } else deliver(data.kind, data.data);
  });
  channel.postMessage({ kind: "who" });
  if (navigator.locks) awaitLead();
  else lead(0);
}

async function awaitLead() {
  await navigator.locks.request(NAME, { ifAvailable: true }, (lock) => lock && lead(0));
  navigator.locks.request(NAME, () => lead(1));
}

function deliver(kind, data) {
  if (kind === "state") state = data;
  if (kind === "end" && data.why !== "stopping") logIn();
  events.dispatchEvent(new CustomEvent(kind, { detail: data }));
}

function publish(kind, data) {
  deliver(kind, data);
  channel.postMessage({ kind, data });
}

/** Holds the lock while this tab is open. `failures`: connections that were lost before. */
function lead(failures) {
  isLeader = true;
  open(failures);
  return new Promise(() => {});
}

/** The browser reconnects by itself, with the last event's id. After a refusal it gives up, and `reconnect` connects. */
function open(failures) {
  const source = new EventSource("/ui/feed");
  for (const kind of EVENTS) source.addEventListener(kind, (event) => publish(kind, JSON.parse(event.data)));
  source.addEventListener("hello", () => {
    publish("state", "live");
    if (failures) publish("resync", {});
    failures = 0;
  });
  source.addEventListener("error", () => {
    if (state !== "lost") publish("state", "lost");
    if (source.readyState === EventSource.CLOSED) later(reconnect, failures);
  });
}

async function reconnect(failures) {
  const answer = await fetch("/ui/api/session", { headers: { "covenant-reload": "1" } }).catch(() => null);
  if (answer?.status === 401) publish("end", { why: "logged_out" });
  else open(failures);
}

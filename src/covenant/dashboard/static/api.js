// The daemon's operations as this session may call them, and its feed: one connection for all tabs of this browser.

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The daemon did not answer. The feed says so on the page; what asked keeps what it shows. */
export class Away extends Error {}

export function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const words = new URLSearchParams(given).toString();
  return call("GET", words ? `${path}?${words}` : path);
}

export const post = (path, body = {}) => call("POST", path, body);

async function call(method, path, body) {
  const request = { method, headers: { accept: "application/json" } };
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
    return new Promise(() => {}); // The page is left: nobody waits for this any more.
  }
  throw new Refused(response.status, answer.code ?? "error", answer.message ?? `status ${response.status}`);
}

let leaving = false;

/** Go to the login page and come back here afterwards. */
function logIn() {
  if (leaving) return;
  leaving = true;
  const here = location.pathname + location.search;
  location.assign(`/ui/login?next=${encodeURIComponent(here)}`);
}

let asked = null;

/** Who is logged in, and what they may do: `may("cancel")`. */
export async function session() {
  asked ??= get("session").then((found) => ({ ...found, may: (verb) => found.can.includes(verb) }));
  return asked;
}

/** The agents of all tenants, each with its `tenant`. */
export async function everyAgent() {
  const { tenants } = await get("v1/admin/tenants");
  const lists = await Promise.all(tenants.map(({ name }) => get(`v1/admin/tenants/${encodeURIComponent(name)}/agents`)));
  return lists.flatMap(({ tenant, agents }) => agents.map((agent) => ({ ...agent, tenant })));
}

/** The words behind the page's name, still encoded: `/ui/task/42` has `["42"]`. */
export const rest = () => location.pathname.split("/").slice(3).filter(Boolean);

// The feed. The tab that holds the lock has the connection and tells the others. When it closes, another tab takes the
// lock, and everybody reads anew what it shows (`resync`). Without locks (plain http from elsewhere) a tab connects by itself.

const NAME = "covenant.feed";
const EVENTS = ["hello", "counts", "tasks", "peers", "pushes", "audit", "resync", "end"];
const RETRY_MS = [500, 1_000, 2_000, 4_000, 8_000];

const here = new EventTarget();
const channel = new BroadcastChannel(NAME);
let state = "connecting";
let leads = false;

/** `listener(data)` for each event of this kind; `state` tells of the connection: connecting, live, lost. */
export function on(kind, listener) {
  here.addEventListener(kind, (event) => listener(event.detail));
}

export function connect() {
  channel.addEventListener("message", ({ data }) => {
    if (data.kind === "who") {
      if (leads) channel.postMessage({ kind: "state", data: state });
    } else deliver(data.kind, data.data);
  });
  channel.postMessage({ kind: "who" });
  if (navigator.locks) navigator.locks.request(NAME, lead);
  else lead();
}

function deliver(kind, data) {
  if (kind === "state") state = data;
  if (kind === "end" && data.why !== "stopping") logIn();
  here.dispatchEvent(new CustomEvent(kind, { detail: data }));
}

function tell(kind, data) {
  deliver(kind, data);
  channel.postMessage({ kind, data });
}

/** Holds the lock while this tab is open. */
function lead() {
  leads = true;
  open(state === "connecting" ? 0 : 1);
  return new Promise(() => {});
}

/**
 * After a broken connection the browser connects again by itself and says which event it has had last, so the daemon
 * tells what was missed. It gives up when it is refused: then we ask why, and begin anew.
 */
function open(failures) {
  const source = new EventSource("/ui/feed");
  for (const kind of EVENTS) source.addEventListener(kind, (event) => tell(kind, JSON.parse(event.data)));
  source.addEventListener("hello", () => {
    tell("state", "live");
    if (failures) tell("resync", {});
    failures = 0;
  });
  source.addEventListener("error", () => {
    if (state !== "lost") tell("state", "lost");
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(() => again(failures + 1), RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
    }
  });
}

async function again(failures) {
  const answer = await fetch("/ui/api/session").catch(() => null);
  if (answer?.status === 401) tell("end", { why: "logged_out" });
  else open(failures);
}

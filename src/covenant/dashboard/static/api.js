// The daemon's operations as this session may call them.

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
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
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
  throw new Refused(response.status, answer.code ?? "error", answer.message ?? answer.error ?? `status ${response.status}`);
}

let leaving = false;

/** Go to the login page and come back here afterwards. */
export function logIn() {
  if (leaving) return;
  leaving = true;
  const here = location.pathname + location.search;
  location.assign(`/ui/login?next=${encodeURIComponent(here)}`);
}

let asked = null;

/** Who is logged in, and what they may do: `can("cancel")`. */
export async function session() {
  asked ??= get("session").then((found) => ({ ...found, may: (verb) => found.can.includes(verb) }));
  return asked;
}

/** The words of a path behind the page's name: `/ui/task/42` has `["42"]`. */
export const rest = () => location.pathname.split("/").slice(3).filter(Boolean).map(decodeURIComponent);

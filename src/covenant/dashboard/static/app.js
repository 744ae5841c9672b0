// The frame of every page: navigation, the state of the connection, and the logged-in principal.

import { Away, connect, get, on, session } from "./api.js";
import { el, find, findAll, icon, number, quiet, throttled } from "./view.js";

const PAGES = ["attention", "tasks", "agents", "inspector", "peers", "push", "tenants", "audit", "settings", "nodes"];
const PART_OF = { task: "tasks", tree: "tasks" };
const CONNECTION = { connecting: ["queued", "connecting"], live: ["good", "live"], lost: ["lost", "connection lost, trying again"] };

const page = document.documentElement.dataset.page;

/** Begins a page. `load()` reads and shows its data: at once, after a `resync`, and on events of these `kinds`. A
 * failure is shown at the top of the page until `load()` succeeds. */
export async function begin(load, kinds = [], pause_ms = 1_000) {
  frame();
  const again = throttled(() => attempt(load), pause_ms);
  on("resync", again);
  for (const kind of kinds) on(kind, again);
  session().then(connect);
  await attempt(load);
}

/** Runs `run()` and shows a refusal. A page's `load` leaves the refusal of an act. */
export async function attempt(run) {
  const shown = find("#refused");
  try {
    await run();
    if (!run.name || shown?.dataset.by) shown?.remove();
  } catch (error) {
    if (error instanceof Away) return;
    refuse(error.message, run.name);
    if (!error.code) throw error;
  }
}

export function refuse(message, by = "") {
  find("#refused")?.remove();
  find("main").prepend(el("p", { id: "refused", class: "refused", role: "alert", "data-by": by }, message));
}

async function frame() {
  const status = el("p", { class: "live", role: "status" });
  showConnection(status, "connecting");
  const links = el("nav", { class: "nav", "aria-label": "Pages" });
  const who = el("div", { class: "who" }, status);
  document.body.prepend(el("header", { class: "side" }, el("a", { class: "brand", href: "/ui/" }, icon("covenant"), "Covenant"), links, who));
  document.body.prepend(el("a", { class: "skip", href: "#main" }, "Skip to the content"));
  on("state", (state) => showConnection(status, state));
  const user = await session();
  if (user.role === "tenant" && page === "attention") location.replace("/ui/tasks");
  links.replaceChildren(...PAGES.filter((name) => isShown(name, user)).map(link));
  who.append(
    el("span", { class: "name" }, `${user.name} · ${user.role}`, el("br"), quiet(`${user.node} · ${user.version}`)),
    el("form", { method: "post", action: "/ui/logout" }, el("button", { class: "plain" }, "Log out")),
  );
  if (user.role !== "tenant") badges(links);
}

function isShown(name, user) {
  if (user.role === "tenant") return name === "tasks";
  return name === "nodes" ? user.several : name === "inspector" ? user.may("inspect") : true;
}

function link(name) {
  const current = name === (PART_OF[page] ?? page);
  return el("a", { href: name === "attention" ? "/ui/" : `/ui/${name}`, "data-page": name, "aria-current": current ? "page" : null }, icon(name), name[0].toUpperCase() + name.slice(1));
}

/** The number of things that need a person, beside the page that lists them. */
function badges(links) {
  const count = el("span", { class: "count", hidden: true });
  find('[data-page="attention"]', links)?.append(count);
  const look = throttled(async () => {
    const { needs } = await get("a2a/attention").catch(() => ({}));
    if (needs === undefined) return; // The request failed: keep the last number.
    count.hidden = !needs;
    count.textContent = number(needs);
  }, 5_000);
  if (page !== "attention") look();
  for (const kind of ["counts", "pushes", "peers", "resync"]) on(kind, look);
}

function showConnection(status, state) {
  status.dataset.state = state;
  const [sign, words] = CONNECTION[state];
  status.replaceChildren(icon(sign), el("span", {}, words));
  const banner = find(".banner");
  if (state === "lost" && !banner) {
    find("main").before(el("div", { class: "banner", role: "alert" }, icon("lost"), "Connection lost, trying again. This page may be out of date."));
  } else if (state === "live") banner?.remove();
}

/** Tabs after the ARIA pattern: arrow keys change the tab, and its panel is shown. */
export function tabs(root) {
  const all = findAll('[role="tab"]', root);
  const show = (chosen) => {
    for (const tab of all) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
  };
  for (const tab of all) {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = all[(all.indexOf(tab) + step + all.length) % all.length];
      show(next);
      next.focus();
    });
  }
  show(all[0]);
}

/** Links inside `root` change the address as Back does, without loading a page. */
export function navigate(root, selector) {
  root.addEventListener("click", (event) => {
    const link = event.target.closest(selector);
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", link.href);
    dispatchEvent(new Event("popstate"));
  });
}

const SPANS_MS = { "1h": 3_600_000, "1d": 86_400_000, "7d": 604_800_000 };
const EMPTY_MAX = 20;
export const address = () => new URLSearchParams(location.search);

/** The values of these names in the address; `since` becomes the moment `since_ms`. */
export function filter(names) {
  const query = Object.fromEntries(names.map((name) => [name, address().get(name)]).filter(([, value]) => value));
  const span = SPANS_MS[address().get("since")];
  return span ? { ...query, since_ms: Date.now() - span } : query;
}

/** Binds a form's fields to the address; calls `onChange()` after each change. Returns a setter of fields. */
export function filters(form, onChange) {
  const show = () => {
    for (const field of form.elements) if (field.name) field.value = address().get(field.name) ?? "";
  };
  const apply = () => {
    show();
    onChange();
  };
  const go = (changes) => {
    const query = address();
    for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
    // Enter sends it twice.
    if (`${query}` !== `${address()}`) history.pushState(null, "", query.size ? `?${query}` : location.pathname);
    apply();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go(Object.fromEntries(new FormData(form)));
  });
  form.addEventListener("change", () => form.requestSubmit());
  addEventListener("popstate", apply);
  show();
  return go;
}

/** A page of `read`. Each answer searches a bounded number of rows, so an empty answer may have a next page. */
export async function readPage(name, read, after) {
  for (let tries = 0; ; tries++) {
    const found = await read(after);
    after = found.next;
    if (found[name].length || !after || tries === EMPTY_MAX) return found;
  }
}

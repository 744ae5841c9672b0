// The frame of every page: where one can go, whether the daemon is there, and who is logged in.

import { Away, connect, get, on, session } from "./api.js";
import { el, find, icon, number, throttled } from "./view.js";

const PAGES = ["attention", "tasks", "agents", "inspector", "peers", "push", "tenants", "audit", "settings", "nodes"];
const PART_OF = { task: "tasks", tree: "tasks" };
/** Each state of the feed: its sign, and its words. */
const CONNECTION = { connecting: ["queued", "connecting"], live: ["good", "live"], lost: ["lost", "connection lost, trying again"] };

const page = document.documentElement.dataset.page;

/**
 * Begin a page: `load()` reads what it shows, at once, when the feed has lost track, and when `kinds` of events come.
 * What fails is told at the top of the page, and goes away when it works again.
 */
export async function begin(load, kinds = [], pause_ms = 1_000) {
  frame();
  const again = throttled(() => attempt(load), pause_ms);
  on("resync", again);
  for (const kind of kinds) on(kind, again);
  session().then(connect);
  await attempt(load);
}

/** Run it; a refusal is shown and not thrown. */
export async function attempt(run) {
  const told = find("#refused");
  try {
    await run();
    told?.remove();
  } catch (error) {
    if (error instanceof Away) return;
    refuse(error.message);
    if (!error.code) throw error;
  }
}

export function refuse(message) {
  const told = find("#refused") ?? el("p", { id: "refused", class: "refused", role: "alert" });
  told.textContent = message;
  find("main").prepend(told);
}

async function frame() {
  const status = el("p", { class: "live", role: "status" });
  tellConnection(status, "connecting");
  const links = el("nav", { class: "nav", "aria-label": "Pages" });
  const who = el("div", { class: "who" }, status);
  document.body.prepend(el("header", { class: "side" }, el("a", { class: "brand", href: "/ui/" }, icon("covenant"), "Covenant"), links, who));
  document.body.prepend(el("a", { class: "skip", href: "#main" }, "Skip to the content"));
  on("state", (state) => tellConnection(status, state));
  const known = await session().catch(() => null);
  if (!known) return;
  if (known.role === "tenant" && page === "attention") location.replace("tasks");
  links.replaceChildren(...PAGES.filter((name) => seen(name, known)).map(link));
  who.append(
    el("span", { class: "name" }, `${known.name} · ${known.role}`, el("br"), el("span", { class: "quiet" }, `${known.node} · ${known.version}`)),
    el("form", { method: "post", action: "/ui/logout" }, el("button", { class: "plain" }, "Log out")),
  );
  if (known.role !== "tenant") badges(links);
}

function seen(name, known) {
  if (known.role === "tenant") return name === "tasks";
  return name === "nodes" ? known.several : name === "inspector" ? known.may("inspect") : true;
}

function link(name) {
  const current = name === (PART_OF[page] ?? page);
  return el("a", { href: name === "attention" ? "/ui/" : `/ui/${name}`, "data-page": name, "aria-current": current ? "page" : null }, icon(name), name[0].toUpperCase() + name.slice(1));
}

/** How many things need a person, beside the page that shows them. */
function badges(links) {
  const count = el("span", { class: "count", hidden: true });
  find('[data-page="attention"]', links)?.append(count);
  const look = throttled(async () => {
    const { items } = await get("a2a/attention").catch(() => ({ items: [] }));
    // The first of a kind says how many of it there are in all.
    const kinds = new Map(items.toReversed().map((item) => [item.what, item.count ?? 1]));
    const needs = [...kinds.values()].reduce((sum, each) => sum + each, 0);
    count.hidden = !needs;
    count.textContent = number(needs);
    count.title = `${needs} need you`;
  }, 5_000);
  if (page !== "attention") look();
  for (const kind of ["counts", "pushes", "peers", "resync"]) on(kind, look);
}

function tellConnection(status, state) {
  status.dataset.state = state;
  const [sign, words] = CONNECTION[state];
  status.replaceChildren(icon(sign), el("span", {}, words));
  const banner = find(".banner");
  if (state === "lost" && !banner) {
    find("main").before(el("div", { class: "banner", role: "alert" }, icon("lost"), "Connection lost, trying again. What is shown may be old."));
  } else if (state === "live") banner?.remove();
}

/** Tabs as the ARIA pattern has them: arrows move, the panel follows. */
export function tabs(root) {
  const all = [...root.querySelectorAll('[role="tab"]')];
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

/** Links inside `root` change the address and what is shown, and load no page. Those for another tab are left alone. */
export function stayHere(root, selector, arrive) {
  root.addEventListener("click", (event) => {
    const link = event.target.closest(selector);
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", link.href);
    arrive();
  });
}

const SPANS_MS = { "1h": 3_600_000, "1d": 86_400_000, "7d": 604_800_000 };
const EMPTY_MAX = 20;
export const address = () => new URLSearchParams(location.search);

/** What the address asks for, of these names; its span of time as the moment that it begins at. */
export function filter(names) {
  const asked = Object.fromEntries(names.map((name) => [name, address().get(name)]).filter(([, value]) => value));
  const span = SPANS_MS[address().get("since")];
  return span ? { ...asked, since_ms: Date.now() - span } : asked;
}

/** A form whose fields are the address: `arrive()` when it was changed, here or by going back. Returns how to change it. */
export function filters(form, arrive) {
  const show = () => {
    for (const field of form.elements) if (field.name) field.value = address().get(field.name) ?? "";
  };
  const here = () => {
    show();
    arrive();
  };
  const go = (changes) => {
    const asked = address();
    for (const [name, value] of Object.entries(changes)) value ? asked.set(name, value) : asked.delete(name);
    history.pushState(null, "", asked.size ? `?${asked}` : location.pathname);
    here();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go(Object.fromEntries(new FormData(form)));
  });
  form.addEventListener("change", () => form.requestSubmit());
  addEventListener("popstate", here);
  show();
  return go;
}

/** One answer looks at a bounded number of things: an empty one may have more behind it. `read(after)` gives `next` with its `name`. */
export async function readPage(name, read, after) {
  for (let tries = 0; ; tries++) {
    const found = await read(after);
    after = found.next;
    if (found[name].length || !after || tries === EMPTY_MAX) return found;
  }
}

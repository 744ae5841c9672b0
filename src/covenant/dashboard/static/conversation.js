// A task's messages in order, and its artifacts. All of it is shown as text, never as markup.

import { bytes, bytesOf, clipped, download, el, icon, pretty, tag, when } from "./view.js";

/** Draws the parts of a message or artifact: files as downloads, links with their host, data as JSON. */
export const showParts = (parts) => parts.map((part) => el("div", {}, showPart(part)));

function showPart(part) {
  const { resource } = part;
  switch (part.type) {
    case "text":
      return el("div", { class: "said", dir: "auto" }, clipped(part.text));
    case "json":
      return bytesOf(JSON.stringify(part.value, null, 2));
    case "image":
    case "audio":
      return download(part.filename ?? part.type, part.mimeType, () => decode(part.data));
    case "resource":
      if (resource.blob) return download(part.filename ?? (resource.uri.split("/").at(-1) || "file"), resource.mimeType, () => decode(resource.blob));
      return [el("span", { class: "quiet small" }, part.filename ?? resource.uri), bytesOf(resource.text ?? "")];
    case "file":
      return stored(part);
    case "resource_link":
      return linkOut(part.uri, part.filename ?? part.name);
    default:
      return bytesOf(JSON.stringify(part, null, 2));
  }
}

function stored({ task_id, sha256, size, filename = sha256.slice(0, 12) }) {
  const href = `/ui/api/files?task_id=${task_id}&sha256=${sha256}`;
  return el("a", { class: "button", href, download: filename }, icon("download"), `${filename}, ${bytes(size)}`);
}

/** A link that names its host. Other text has no link. */
export function linkOut(url, name = "") {
  const host = /^https?:/i.test(url) && URL.canParse(url) && new URL(url).host;
  if (!host) return el("span", {}, url);
  return el("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", class: "file" }, icon("network"), name ? `${name} (${host})` : host);
}

function decode(base64) {
  return Uint8Array.from(atob(base64.replace(/-/g, "+").replace(/_/g, "/")), (char) => char.charCodeAt(0));
}

const text = (words) => (words ? [{ type: "text", text: words }] : []);

/** The messages and artifacts in the answer of `a2a/tasks/{id}/show`. The pieces of an artifact are joined. */
export function readConversation(shown) {
  const { task } = shown;
  const turns = [{ who: "user", name: task.sender.display, at_ms: shown.created_at_ms, parts: task.parts?.length ? task.parts : text(task.intent_text) }];
  const artifacts = new Map();
  for (const update of shown.updates) {
    const body = update.body;
    if (!body) continue;
    if (update.kind === "settled") {
      const { result, state } = body;
      const broke = state !== "completed";
      const parts = result.content?.length ? result.content : text(result.error_message || (broke && state));
      if (parts.length) turns.push({ who: "agent", name: task.recipient.display, at_ms: update.ts_ms, parts, broke });
    } else if (body.type === "artifact") {
      const known = body.append ? artifacts.get(body.artifact_id) : null;
      const parts = known ? join(known.parts, body.parts) : [...(body.parts ?? [])];
      artifacts.set(body.artifact_id, { name: body.name ?? known?.name ?? body.artifact_id, description: body.description ?? known?.description, parts, at_ms: update.ts_ms });
    } else {
      const parts = body.parts?.length ? body.parts : text(body.text);
      if (!parts.length) continue;
      const user = body.role === "user" || update.kind === "continued";
      turns.push({ who: user ? "user" : "agent", name: (user ? task.sender : task.recipient).display, at_ms: update.ts_ms, parts, asks: /required/.test(body.state ?? update.kind) });
    }
  }
  return { turns, artifacts: [...artifacts.values()] };
}

function join(before, added = []) {
  const parts = [...before];
  for (const part of added) {
    const last = parts.at(-1);
    if (part.type === "text" && last?.type === "text") parts[parts.length - 1] = { ...last, text: last.text + part.text };
    else parts.push(part);
  }
  return parts;
}

export function drawTurn({ who, name, at_ms, parts, asks, broke, note }) {
  const classes = ["turn", who, asks && "asks", broke && "broke"].filter(Boolean).join(" ");
  return el("li", { class: classes }, el("header", {}, el("b", {}, name), note ? el("span", {}, note) : null, at_ms ? when(at_ms) : null), el("div", {}, showParts(parts)));
}

/** Draws a frame of the wire, with its breaches of the specification. */
export function drawFrame({ at_ms, direction, findings = [], headers = {}, text, truncated }, what, tags) {
  const lines = Object.entries(headers).map(([name, value]) => `${name}: ${value}`).join("\n");
  return el(
    "li",
    { class: "frame", "data-direction": direction },
    el("header", {}, icon(direction, direction === "out" ? "sent" : "received"), el("b", {}, what), [...tags, truncated && "cut"].filter(Boolean).map((word) => tag(String(word))), el("span", { class: "quiet small" }, when(at_ms))),
    findings.map((broken) => el("p", { class: "finding" }, icon("failed", "breaks the specification"), broken)),
    lines ? el("details", {}, el("summary", { class: "small" }, "Headers"), bytesOf(lines)) : null,
    text ? bytesOf(pretty(text)) : null,
  );
}

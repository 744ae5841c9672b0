// Elements without markup. What comes from elsewhere is only ever set as text.

export const find = (selector, root = document) => root.querySelector(selector);
export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element. `props`: properties, `class`, `data-…`, `aria-…`, and `on…` listeners; a child that is null is left out. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A sign of the sprite. With a `label` it is read aloud, without one it is decoration. */
export function icon(name, label = "") {
  const use = svg("use", { href: `/ui/static/icons.svg#${name}` });
  return svg("svg", label ? { class: "icon", role: "img", "aria-label": label } : { class: "icon", "aria-hidden": "true" }, use);
}

/** A copy of a `<template>`'s one element, with its slots filled. */
export function copy(id, values = {}) {
  return fill(document.getElementById(id).content.firstElementChild.cloneNode(true), values);
}

/**
 * Put values into the slots (`data-slot="name"`) of an element. A text or number becomes text, a node or a list of
 * nodes the slot's children; null hides the slot; an object sets properties, `text` and `nodes` among them.
 */
export function fill(root, values) {
  const slots = findAll("[data-slot]", root);
  if (root.dataset?.slot) slots.push(root);
  for (const slot of slots) {
    if (slot.dataset.slot in values) set(slot, values[slot.dataset.slot]);
  }
  return root;
}

function set(slot, value) {
  slot.hidden = value === null || value === undefined;
  if (slot.hidden) return;
  if (value instanceof Node) return keep(slot, [value]);
  if (Array.isArray(value)) return keep(slot, value);
  if (typeof value !== "object") {
    if (slot.textContent !== String(value)) slot.textContent = value;
    return;
  }
  for (const [name, given] of Object.entries(value)) {
    if (name === "text") set(slot, given);
    else if (name === "nodes") keep(slot, given);
    else if (name in slot && !name.includes("-")) slot[name] = given;
    else if (given === null) slot.removeAttribute(name);
    else slot.setAttribute(name, given);
  }
}

function keep(slot, nodes) {
  slot.replaceChildren(...nodes.filter((node) => node !== null && node !== undefined));
}

/**
 * Have the children of `parent` be those of `items`, in order. A child that is there already is filled again and stays
 * the same element: focus, selection and scroll position survive. `make(item)` builds one, `update(child, item)` fills it.
 */
export function list(parent, items, key, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    let child = known.get(id);
    known.delete(id);
    if (!child) {
      child = make(item);
      child.dataset.key = id;
    }
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const gone of known.values()) gone.remove();
}

/** A download of what an agent sent: it is never opened in a page of ours. */
export function download(name, type, bytes) {
  const link = el("a", { class: "button", download: name, title: `${name} (${type || "unknown type"})` }, icon("download"), name);
  link.href = "#";
  link.addEventListener("click", () => {
    link.href = URL.createObjectURL(new Blob([bytes()], { type: "application/octet-stream" }));
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
  return link;
}

/** Run it soon, and at most once in `pause_ms`, however often it is asked for; not while nobody looks. */
export function throttled(run, pause_ms) {
  let wanted = false;
  let resting = false;
  const go = async () => {
    if (resting || !wanted || document.hidden) return;
    wanted = false;
    resting = true;
    try {
      await run();
    } finally {
      setTimeout(() => {
        resting = false;
        go();
      }, pause_ms);
    }
  };
  document.addEventListener("visibilitychange", go);
  return () => {
    wanted = true;
    go();
  };
}

// The graph page: edges of the node under the pointer, pinning, hiding, selecting, groups by hand. Without this script
// every node is a link to the same page with its edges.
"use strict";

const { nodes, edges } = JSON.parse(document.getElementById("data").textContent);
const [NAME, PLACE, PAGE, IMPORTANCE, VALUE, INFLUENCE, ID] = [0, 1, 2, 3, 4, 5, 6];
const LISTED = 60;
const svg = document.getElementById("graph");
const lines = document.getElementById("lines");
const panel = document.getElementById("node");
const marks = nodes.map((_, n) => document.getElementById(`n${n}`));
const into = nodes.map(() => []);
const out = nodes.map(() => []);
for (const edge of edges) {
  out[edge[0]].push(edge);
  into[edge[1]].push(edge);
}
const about = new URLSearchParams(location.search);
about.delete("node");
const key = `param-decomp graph ${location.pathname}?${about}`;
let pinned = null;
let state = { hidden: [], selected: [], groups: {} };
try {
  state = { ...state, ...JSON.parse(sessionStorage.getItem(key) ?? "{}") };
} catch { /* storage is switched off */ }

function keep() {
  try {
    sessionStorage.setItem(key, JSON.stringify(state));
  } catch { /* storage is switched off */ }
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

const selectable = (n) => marks[n].classList.contains("component") || marks[n].classList.contains("group");
const hidden = (n) => state.hidden.includes(nodes[n][ID]);
const number = (x) => x.toPrecision(3).replace("-", "−");
const percent = (x) => `${(100 * x).toPrecision(2)} %`;
const numberOf = new Map(nodes.map((node, n) => [node[ID], n]));

function draw(n) {
  lines.replaceChildren();
  for (const mark of marks) mark.classList.remove("near");
  svg.classList.toggle("one", n !== null);
  if (n === null) return;
  marks[n].classList.add("near");
  for (const [source, target, weight, share] of [...into[n], ...out[n]]) {
    if (hidden(source) || hidden(target)) continue;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const [a, b] = [source, target].map((end) => marks[end].firstElementChild);
    for (const [name, value] of [["x1", a.getAttribute("cx")], ["y1", a.getAttribute("cy")],
      ["x2", b.getAttribute("cx")], ["y2", b.getAttribute("cy")],
      ["class", weight > 0 ? "up" : "down"], ["stroke-width", 0.6 + 5 * Math.sqrt(share)]]) line.setAttribute(name, value);
    lines.append(line);
    marks[source === n ? target : source].classList.add("near");
  }
}

function list(title, found, end) {
  const part = element("div");
  part.append(element("h3", title));
  const table = element("table", undefined, { class: "edges" });
  const body = element("tbody");
  const visible = found.filter((edge) => !hidden(edge[end])).sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
  for (const edge of visible.slice(0, LISTED)) {
    const row = element("tr");
    const name = element("td");
    const link = element("a", nodes[edge[end]][NAME], { href: marks[edge[end]].getAttribute("href") });
    link.addEventListener("click", (event) => { event.preventDefault(); pin(edge[end]); });
    link.addEventListener("pointerenter", () => marks[edge[end]].classList.add("pointed"));
    link.addEventListener("pointerleave", () => marks[edge[end]].classList.remove("pointed"));
    name.append(link, " ", element("small", nodes[edge[end]][PLACE]));
    row.append(name, element("td", number(edge[2]), { class: `num ${edge[2] > 0 ? "up" : "down"}` }),
      element("td", percent(edge[3]), { class: "num" }));
    body.append(row);
  }
  table.append(body);
  part.append(table);
  if (visible.length > LISTED) part.append(element("p", `The largest ${LISTED} of ${visible.length}.`, { class: "note" }));
  return part;
}

function button(text, action) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", action);
  return made;
}

function pin(n) {
  pinned = n;
  for (const [k, mark] of marks.entries()) mark.classList.toggle("chosen", k === n);
  draw(n);
  if (n === null) {
    panel.replaceChildren(element("p", "Choose a node to see what it comes from and what it leads to.", { class: "note" }));
    return;
  }
  const node = nodes[n];
  const title = element("h2", node[NAME]);
  title.append(" ", element("small", node[PLACE]));
  const facts = element("p", undefined, { class: "facts" });
  if (marks[n].classList.contains("component")) facts.append(element("span", `λ ${number(node[IMPORTANCE])}`), element("span", `a ${number(node[VALUE])}`));
  facts.append(element("span", `influence ${percent(node[INFLUENCE])}`));
  if (node[PAGE]) {
    const page = element("span");
    page.append(element("a", marks[n].classList.contains("group") ? "this group" : "what this component does", { href: node[PAGE] }));
    facts.append(page);
  }
  const buttons = element("p");
  if (selectable(n)) buttons.append(button(state.selected.includes(node[ID]) ? "Let go" : "Select", () => select(n)), " ");
  buttons.append(button("Hide", () => hide(n)));
  const columns = element("div", undefined, { class: "columns" });
  columns.append(list("comes from", into[n], 0), list("leads to", out[n], 1));
  panel.replaceChildren(title, facts, buttons, columns);
}

function hide(n) {
  state.hidden.push(nodes[n][ID]);
  keep();
  pin(null);
  refresh();
}

function select(n) {
  const id = nodes[n][ID];
  state.selected = state.selected.includes(id) ? state.selected.filter((other) => other !== id) : [...state.selected, id];
  keep();
  pin(n);
  refresh();
}

function refresh() {
  marks.forEach((mark, n) => {
    mark.classList.toggle("away", hidden(n));
    mark.classList.toggle("selected", state.selected.includes(nodes[n][ID]));
    const own = Object.values(state.groups).findIndex((ids) => ids.includes(nodes[n][ID]));
    mark.classList.toggle("grouped", own >= 0);
  });
  const away = document.getElementById("hidden");
  away.hidden = !state.hidden.length;
  away.querySelector("span").textContent = `${state.hidden.length} hidden.`;
  const chosen = document.getElementById("selection");
  chosen.hidden = !state.selected.length && !Object.keys(state.groups).length;
  chosen.querySelector("ul").replaceChildren(...state.selected.map((id) => {
    const item = element("li");
    item.append(element("code", id));
    return item;
  }));
  chosen.querySelector("[name=select]").value = state.selected.join(" ");
  chosen.querySelector("form").hidden = !state.selected.length;
  chosen.querySelector(".groups").replaceChildren(...Object.entries(state.groups).map(([name, ids]) => group(name, ids)));
}

// Edges between a group and all else, added up.
function group(name, ids) {
  const members = new Set(ids.map((id) => numberOf.get(id)).filter((n) => n !== undefined));
  const made = element("section");
  const title = element("h3", `${name} (${members.size})`);
  const remove = button("Undo", () => { delete state.groups[name]; keep(); refresh(); });
  made.append(title, element("p", ids.join(", "), { class: "note" }), remove);
  const sums = (found, end) => {
    const total = new Map();
    for (const n of members) {
      for (const edge of found[n]) {
        const other = edge[end];
        if (members.has(other) || hidden(other)) continue;
        const sum = total.get(other) ?? [0, 0];
        total.set(other, [sum[0] + edge[2], sum[1] + edge[3]]);
      }
    }
    return [...total].map(([other, [weight, share]]) => (end === 0 ? [other, -1, weight, share] : [-1, other, weight, share]));
  };
  const columns = element("div", undefined, { class: "columns" });
  columns.append(list("comes from", sums(into, 0), 0), list("leads to", sums(out, 1), 1));
  made.append(columns);
  return made;
}

marks.forEach((mark, n) => {
  mark.addEventListener("pointerenter", () => draw(n));
  mark.addEventListener("pointerleave", () => draw(pinned));
  mark.addEventListener("focus", () => draw(n));
  mark.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (event.shiftKey && selectable(n)) select(n);
    else pin(n);
  });
});
document.getElementById("hidden").querySelector("button").addEventListener("click", () => {
  state.hidden = [];
  keep();
  refresh();
});
const selection = document.getElementById("selection");
selection.querySelector(".drop").addEventListener("click", () => { state.selected = []; keep(); refresh(); });
selection.querySelector(".make").addEventListener("click", () => {
  const name = selection.querySelector("input").value.trim();
  if (!name || !state.selected.length) return;
  state.groups[name] = state.selected;
  state.selected = [];
  keep();
  refresh();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea")) return;
  if (event.key === "Escape") pin(null);
  else if (pinned !== null && event.key === "h") hide(pinned);
  else if (pinned !== null && event.key === "s" && selectable(pinned)) select(pinned);
});
document.querySelector(".keys").hidden = false;
refresh();
const asked = numberOf.get(new URLSearchParams(location.search).get("node") ?? "");
if (asked !== undefined) pin(asked);

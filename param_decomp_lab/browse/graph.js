// The graph page: edges of the node under the pointer, pinning, hiding, selecting, groups by hand. What is chosen stands
// in the address. Without this script the picture and the list are there, and every node is a link to its edges.
"use strict";

const { nodes, edges, drawn } = JSON.parse(document.getElementById("data").textContent);
const [IMPORTANCE, VALUE, INFLUENCE, ID] = [0, 1, 2, 3];
const [SOURCE, TARGET, WEIGHT, SHARE, EFFECT] = [0, 1, 2, 3, 4];
const LISTED = 60;
const find = (id) => document.getElementById(id);
const svg = find("graph");
const frame = svg.parentElement;
const lines = find("lines");
const panel = find("node");
const selection = find("selection");
const marks = nodes.map((_, n) => find(`n${n}`));
const entries = nodes.map((_, n) => find(`i${n}`));
const numberOf = new Map(nodes.map((node, n) => [node[ID], n]));
const into = nodes.map(() => []);
const out = nodes.map(() => []);
for (const edge of edges) {
  out[edge[SOURCE]].push(edge);
  into[edge[TARGET]].push(edge);
}

// --- what is chosen, by the ids of nodes, and the address, which has all of it ---

// `groups`: [name, ids] of each. `edges`: how many are drawn while no node is pinned.
let state = read();

function read() {
  const query = new URLSearchParams(location.search);
  const given = new URLSearchParams(location.hash.slice(1));
  const known = (name) => given.getAll(name).filter((id) => numberOf.has(id));
  const found = { node: given.get("node") || query.get("node"), selected: known("select"), hidden: known("hide"), groups: [], edges: drawn };
  if (!numberOf.has(found.node)) found.node = null;
  const asked = Number(given.get("edges"));
  if (Number.isInteger(asked) && asked > 0) found.edges = Math.min(asked, edges.length);
  for (const [name, value] of given) {
    if (name === "group") found.groups.push([value, []]);
    else if (name === "of" && found.groups.length && numberOf.has(value)) found.groups.at(-1)[1].push(value);
  }
  found.groups = found.groups.filter(([, ids]) => ids.length);
  return found;
}

function write() {
  const query = new URLSearchParams(location.search);
  query.delete("node"); // the fragment has it
  const given = new URLSearchParams();
  if (state.node !== null) given.append("node", state.node);
  for (const id of state.selected) given.append("select", id);
  for (const id of state.hidden) given.append("hide", id);
  for (const [name, ids] of state.groups) {
    given.append("group", name);
    for (const id of ids) given.append("of", id);
  }
  if (state.edges !== drawn) given.append("edges", state.edges);
  const [before, after] = [`${query}`, `${given}`];
  history.pushState(null, "", `${location.pathname}${before && `?${before}`}${after && `#${after}`}`);
}

function change(changes) {
  Object.assign(state, changes);
  write();
  show();
}

// --- groups by hand: one node each, in the place of its first member ---

let head = new Map();
const at = (n) => head.get(n) ?? n;
const members = (n) => (groupOf(n) ?? [null, [nodes[n][ID]]])[1].map((id) => numberOf.get(id));
const groupOf = (n) => state.groups.find(([, ids]) => ids.includes(nodes[n][ID]));
const away = (n) => at(n) !== n || state.hidden.includes(nodes[n][ID]);
const pinned = () => (state.node === null ? null : at(numberOf.get(state.node)));
const selectable = (n) => marks[n].matches(".component, .group");

// By node, the sign of a component's activation: an edge of the same sign strengthens it.
const sign = nodes.map((node, n) => (marks[n].matches(".component") && node[VALUE] < 0 ? -1 : 1));

// Edges with groups as nodes, added up, and their effects beside them. Of a group's incoming edges, the share is the mean
// over its members, weighted by their influence.
function merged(found) {
  const sums = new Map();
  for (const [source, target, weight, share] of found) {
    const [from, to] = [at(source), at(target)];
    if (from === to || away(from) || away(to)) continue;
    const total = members(to).reduce((sum, n) => sum + nodes[n][INFLUENCE], 0);
    const part = members(to).length === 1 ? 1 : nodes[target][INFLUENCE] / total || 0;
    const sum = sums.get(from * nodes.length + to) ?? [from, to, 0, 0, 0];
    sums.set(from * nodes.length + to, [from, to, sum[WEIGHT] + weight, sum[SHARE] + part * share, sum[EFFECT] + weight * sign[target]]);
  }
  return [...sums.values()];
}

const edgesInto = (n) => merged(members(n).flatMap((member) => into[member]));
const edgesOut = (n) => merged(members(n).flatMap((member) => out[member]));
const influence = (n) => members(n).reduce((sum, member) => sum + nodes[member][INFLUENCE], 0);
const score = (edge) => edge[SHARE] * influence(edge[TARGET]);

function join(n, other) {
  if (at(n) === at(other)) return;
  const moved = members(at(n)).map((member) => nodes[member][ID]);
  const [name, ids] = groupOf(other) ?? [nameOf(other), [nodes[other][ID]]];
  const kept = state.groups.filter((group) => group !== groupOf(n) && group !== groupOf(other));
  change({ groups: [...kept, [name, [...ids, ...moved]]], node: ids[0] });
}

// --- words ---

const number = (x) => x.toPrecision(3).replace("-", "−");
const percent = (x) => `${x >= 0.995 ? Math.round(100 * x) : (100 * x).toPrecision(2)} %`;
const ownName = (n) => entries[n].querySelector("a").textContent;
const nameOf = (n) => groupOf(n)?.[0] ?? ownName(n);
const placeOf = (n) => (groupOf(n) ? `${members(n).length} nodes` : (entries[n].querySelector("small").firstChild?.textContent ?? "").replace(/ · $/, ""));
const subject = (n) => (marks[n].matches(".component") ? nodes[n][ID].replace(/@[^@]*$/, "") : marks[n].matches(".group") ? nodes[n][ID] : marks[n].classList[0]);
const explained = new Map(); // by subject, what the list says of it
entries.forEach((entry, n) => {
  const said = entry.querySelector("details:not(.behind), .about");
  if (said && !explained.has(subject(n))) explained.set(subject(n), said);
});

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

function button(text, action) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", action);
  return made;
}

// --- the picture ---

const centre = (n) => ["cx", "cy"].map((name) => Number(marks[n].querySelector("circle").getAttribute(name)));

// As `graph_drawing.py:_line` draws it.
function line([source, target, , , effect], strength) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const [[x1, y1], [x2, y2]] = [centre(source), centre(target)];
  const bend = [(x1 + x2) / 2 - (y2 - y1) / 8, (y1 + y2) / 2 + (x2 - x1) / 8].map(Math.round);
  for (const [name, value] of [["d", `M${x1} ${y1}Q${bend.join(" ")} ${x2} ${y2}`], ["class", effect > 0 ? "up" : "down"],
    ["stroke-width", (0.6 + 4 * strength).toFixed(1)], ["stroke-opacity", (0.25 + 0.6 * strength).toFixed(2)]]) made.setAttribute(name, value);
  return made;
}

// The edges of node n; where it is null, the strongest of all.
function draw(n) {
  for (const mark of marks) mark.classList.remove("near");
  svg.classList.toggle("one", n !== null);
  if (n === null) {
    const all = merged(edges).sort((a, b) => score(b) - score(a));
    const [shown, total] = [all.slice(0, state.edges), all.reduce((sum, edge) => sum + score(edge), 0)];
    lines.replaceChildren(...shown.map((edge) => line(edge, Math.sqrt(score(edge) / score(shown[0])))));
    const [count, part] = find("drawn").querySelectorAll("b");
    if (count) count.textContent = shown.length;
    if (part) part.textContent = percent(shown.reduce((sum, edge) => sum + score(edge), 0) / total || 0);
    return;
  }
  const found = [...edgesInto(n), ...edgesOut(n)];
  lines.replaceChildren(...found.map((edge) => line(edge, Math.sqrt(Math.min(edge[SHARE], 1)))));
  for (const m of [n, ...found.flatMap((edge) => [edge[SOURCE], edge[TARGET]])]) marks[m].classList.add("near");
}

// Moves the frame where a node is outside of it; the page stays.
let opened = null; // what the list says of the node chosen before
function reveal(n) {
  if (opened) opened.open = false;
  opened = entries[n].querySelector("details");
  if (opened) opened.open = true;
  const [box, own] = [frame.getBoundingClientRect(), marks[n].getBoundingClientRect()];
  if (own.left < box.left || own.right > box.right) frame.scrollLeft += own.left - box.left - box.width / 2;
  if (own.top < box.top || own.bottom > box.bottom) frame.scrollTop += own.top - box.top - box.height / 2;
  const list = entries[n].parentElement;
  if (list.scrollHeight > list.clientHeight) list.scrollTop = entries[n].offsetTop - list.clientHeight / 3;
}

// --- the chosen node ---

function table(title, found, end) {
  const part = element("div");
  part.append(element("h3", title));
  if (!found.length) {
    part.append(element("p", "nothing", { class: "note" }));
    return part;
  }
  const made = element("table", undefined, { class: "edges" });
  const body = element("tbody");
  for (const edge of found.sort((a, b) => Math.abs(b[WEIGHT]) - Math.abs(a[WEIGHT])).slice(0, LISTED)) {
    const row = element("tr");
    const name = element("td");
    const link = element("a", nameOf(edge[end]), { href: marks[edge[end]].getAttribute("href") });
    wire(link, edge[end]);
    name.append(link, " ", element("small", placeOf(edge[end])));
    row.append(name, element("td", does(edge), { class: way(edge) }), element("td", number(edge[WEIGHT]), { class: `num ${way(edge)}` }),
      element("td", percent(edge[SHARE]), { class: "num" }));
    body.append(row);
  }
  made.append(body);
  part.append(made);
  if (found.length > LISTED) part.append(element("p", `The largest ${LISTED} of ${found.length}.`, { class: "note" }));
  return part;
}

const way = (edge) => (edge[EFFECT] > 0 ? "up" : "down");

// As `graph_pages.py:_does`.
function does(edge) {
  const words = marks[edge[TARGET]].matches(".component") ? ["strengthens", "weakens"] : marks[edge[TARGET]].matches(".output") ? ["raises", "lowers"] : ["", ""];
  return words[edge[EFFECT] > 0 ? 0 : 1];
}

// What U writes, turned round where the activation has the other sign than at the node that the list explains.
function turn(said, n) {
  const lens = said.querySelector(".lens");
  const own = sign[n] < 0 ? "-" : "+";
  if (!lens || lens.dataset.sign === own) return;
  lens.dataset.sign = own;
  const [here, raises, lowers] = lens.children;
  here.textContent = `a ${sign[n] < 0 ? "<" : ">"} 0`;
  const [up, down] = [[...raises.childNodes], [...lowers.childNodes]];
  raises.replaceChildren(...down);
  lowers.replaceChildren(...up);
}

// The parts of a residual error, or a link to them where this page does not have them; null where they are not known.
function madeOf(n) {
  const parts = entries[n].querySelector(".behind table")?.cloneNode(true);
  if (!parts && entries[n].dataset.parts === undefined) return null;
  const made = element("div");
  made.append(element("h3", "made of"), parts ?? partsOf(n));
  return made;
}

// The address of the node has its parts; the fragment, which has what is chosen here, stays.
function partsOf(n) {
  const [page] = marks[n].getAttribute("href").split("#");
  const said = element("p", undefined, { class: "note" });
  said.append(element("a", "list its parts", { href: `${page}${location.hash}` }));
  return said;
}

function describe(n) {
  if (n === null) {
    panel.replaceChildren(element("p", "Choose a node to see what it does, what it comes from and what it leads to.", { class: "note" }));
    return;
  }
  const [node, group] = [nodes[n], groupOf(n)];
  const title = element("h2", nameOf(n));
  title.append(" ", element("small", placeOf(n)));
  const facts = element("p", undefined, { class: "facts" });
  if (!group && marks[n].matches(".component")) facts.append(element("span", `λ ${number(node[IMPORTANCE])}`), element("span", `a ${number(node[VALUE])}`));
  facts.append(element("span", `influence ${percent(influence(n))}`));
  const buttons = element("p");
  if (selectable(n) && !group) buttons.append(button(state.selected.includes(node[ID]) ? "Let go" : "Select", () => select(n)), " ");
  buttons.append(button("Hide", () => hide(n)));
  const what = element("div", undefined, { class: "nodes" });
  for (const member of members(n)) {
    if (group) what.append(element("p", `${ownName(member)} · ${nodes[member][ID]}`));
    const said = explained.get(subject(member))?.cloneNode(true);
    if (said) turn(said, member);
    if (said) what.append(said);
    if (said) said.open = !group;
  }
  const columns = element("div", undefined, { class: "columns" });
  columns.append(madeOf(n) ?? table("comes from", edgesInto(n), 0), table("leads to", edgesOut(n), 1));
  panel.replaceChildren(title, facts, buttons, what, columns);
}

const pin = (n) => change({ node: n === null ? null : nodes[n][ID] });
const hide = (n) => change({ hidden: [...state.hidden, ...members(n).map((member) => nodes[member][ID])], node: null });

function select(n) {
  const id = nodes[n][ID];
  const kept = state.selected.filter((other) => other !== id);
  change({ selected: kept.length < state.selected.length ? kept : [...kept, id], node: id });
}

function group([name, ids]) {
  const made = element("section");
  const title = element("h3", `${name} (${ids.length})`);
  const renamed = element("input", undefined, { maxlength: 60, "aria-label": `another name for ${name}` });
  const others = state.groups.filter(([, own]) => own !== ids);
  const rename = () => renamed.value.trim() && change({ groups: [...others, [renamed.value.trim(), ids]] });
  made.append(title, element("p", ids.join(", "), { class: "note" }), button("Show", () => change({ node: ids[0] })), " ",
    button("Undo", () => change({ groups: others })), " ", renamed, " ", button("Rename", rename));
  return made;
}

function show() {
  const focused = document.activeElement;
  const first = focused === panel.querySelector("button");
  head = new Map(state.groups.flatMap(([, ids]) => ids.map((id) => [numberOf.get(id), numberOf.get(ids[0])])));
  const n = pinned();
  marks.forEach((mark, k) => {
    const own = groupOf(k);
    const classes = { chosen: k === n, away: away(k), selected: state.selected.includes(nodes[k][ID]), grouped: Boolean(own) };
    for (const [name, on] of Object.entries(classes)) mark.classList.toggle(name, on);
    entries[k].classList.toggle("chosen", at(k) === n);
    entries[k].classList.toggle("away", state.hidden.includes(nodes[k][ID]));
    const text = mark.querySelector("text");
    if (text) {
      text.dataset.name ??= text.textContent;
      const name = own ? own[0].slice(0, 10) + (own[0].length > 10 ? "…" : "") : "";
      text.textContent = own ? `${name} ×${own[1].length}` : text.dataset.name;
    }
  });
  draw(n);
  describe(n);
  if (n !== null) reveal(n);
  find("drawn").querySelector("span")?.toggleAttribute("hidden", n !== null);
  find("hidden").hidden = !state.hidden.length;
  find("hidden").querySelector("span").textContent = `${state.hidden.length} hidden.`;
  selection.hidden = !state.selected.length && !state.groups.length;
  selection.querySelector("p").hidden = !state.selected.length;
  selection.querySelector("h2").textContent = state.selected.length ? "Selected" : "Groups by hand";
  selection.querySelector(".maker").hidden = !state.selected.length;
  selection.querySelector("ul").replaceChildren(...state.selected.map((id) => {
    const item = element("li");
    item.append(element("code", id));
    return item;
  }));
  const form = selection.querySelector("form"); // a static copy has none
  if (form) {
    form.querySelector("[name=select]").value = state.selected.join(" ");
    form.hidden = !state.selected.length;
  }
  selection.querySelector(".groups").replaceChildren(...state.groups.map(group));
  if (focused !== document.body && !focused.checkVisibility()) {
    // It is no longer shown: the button in its place has the focus, or else what is said of the node.
    const next = (first && panel.querySelector("button")) || panel.firstElementChild;
    if (!next.matches("button")) next.tabIndex = -1;
    next.focus();
  }
}

// --- pointers and keys ---

// A link to node n, in a list.
function wire(link, n) {
  const point = (on) => [marks[n], entries[n]].forEach((one) => one.classList.toggle("pointed", on));
  link.addEventListener("pointerenter", () => point(true));
  link.addEventListener("pointerleave", () => point(false));
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    point(false);
    pin(at(n));
    panel.scrollIntoView({ block: "nearest" });
  });
}

entries.forEach((entry, n) => {
  wire(entry.querySelector("a"), n);
  entry.querySelector("small a")?.addEventListener("click", (event) => {
    event.preventDefault(); // the fragment is ours
    const first = find(event.target.getAttribute("href").slice(1));
    first.scrollIntoView({ block: "nearest" });
    first.querySelector("a").focus({ preventScroll: true });
  });
});

let drag = null; // of a component, with the mouse or a pen: a finger moves the frame
marks.forEach((mark, n) => {
  mark.querySelector("circle").append(mark.querySelector("title") ?? document.createElementNS("http://www.w3.org/2000/svg", "title"));
  mark.querySelector("title").textContent = [ownName(n), placeOf(n)].filter(Boolean).join(" · ");
  mark.addEventListener("pointerenter", () => { entries[n].classList.add("pointed"); if (!drag) draw(n); });
  mark.addEventListener("pointerleave", () => { entries[n].classList.remove("pointed"); if (!drag) draw(pinned()); });
  mark.addEventListener("focus", () => draw(n));
  mark.addEventListener("blur", () => draw(pinned()));
  mark.addEventListener("dragstart", (event) => event.preventDefault());
  mark.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch" && event.button === 0 && selectable(n)) drag = { n, x: event.clientX, y: event.clientY, moved: false };
  });
  mark.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (mark.dataset.dragged) delete mark.dataset.dragged;
    else if (event.shiftKey && selectable(n)) select(n);
    else pin(n);
  });
});
const under = (event) => {
  const n = marks.indexOf(document.elementFromPoint(event.clientX, event.clientY)?.closest("#graph a"));
  return n >= 0 && selectable(n) && n !== drag.n ? n : null;
};
document.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
  if (!drag.moved && Math.hypot(x, y) < 5) return;
  drag.moved = true;
  marks[drag.n].classList.add("dragged");
  marks[drag.n].setAttribute("transform", `translate(${x} ${y})`);
  const other = under(event);
  marks.forEach((mark, n) => mark.classList.toggle("pointed", n === other));
});
for (const kind of ["pointerup", "pointercancel"]) {
  document.addEventListener(kind, (event) => {
    if (!drag) return;
    const { n, moved } = drag;
    const other = moved && kind === "pointerup" ? under(event) : null;
    drag = null;
    marks[n].removeAttribute("transform");
    marks[n].classList.remove("dragged");
    if (moved) setTimeout(() => { delete marks[n].dataset.dragged; }); // where no click follows
    if (moved) marks[n].dataset.dragged = "1";
    for (const mark of marks) mark.classList.remove("pointed");
    if (other !== null) join(n, other);
    else if (moved) draw(pinned());
  });
}
for (const link of document.querySelectorAll("#drawn a[data-times]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const wanted = Math.floor(state.edges * Number(link.dataset.times));
    change({ edges: Math.max(1, Math.min(wanted, edges.length)) });
  });
}
find("hidden").querySelector("button").addEventListener("click", () => change({ hidden: [] }));
selection.querySelector(".drop").addEventListener("click", () => change({ selected: [] }));
selection.querySelector(".make").addEventListener("click", () => {
  const name = selection.querySelector("input:not([type=hidden])").value.trim();
  if (!name || !state.selected.length) return;
  const ids = new Set(state.selected);
  const kept = state.groups.map(([own, of]) => [own, of.filter((id) => !ids.has(id))]).filter(([, of]) => of.length);
  change({ groups: [...kept, [name, [...ids]]], selected: [], node: state.selected[0] });
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea")) return;
  const n = pinned();
  if (event.key === "Escape" && n !== null) pin(null);
  else if (n !== null && event.key === "h") hide(n);
  else if (n !== null && event.key === "s" && selectable(n) && !groupOf(n)) select(n);
});

// --- the picture as a file, which has its style ---

const STYLE = ["fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity"];
const OF_TEXT = ["stroke-linejoin", "paint-order", "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline"];
find("svg").addEventListener("click", () => {
  const copy = svg.cloneNode(true);
  const [own, copied] = [svg, copy].map((root) => [...root.querySelectorAll("*")]);
  own.forEach((one, k) => {
    const style = getComputedStyle(one);
    if (one.closest(".away")) copied[k].remove();
    const names = { path: STYLE, circle: STYLE, a: ["opacity"], text: [...STYLE, ...OF_TEXT] }[one.localName] ?? [];
    for (const name of names) copied[k].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "id", "href", "data-name"]) copied[k].removeAttribute(name);
    if (one.localName === "text") copied[k].setAttribute("xml:space", "preserve");
  });
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", "100%"], ["height", "100%"], ["fill", getComputedStyle(frame).backgroundColor]]) ground.setAttribute(name, value);
  copy.prepend(ground);
  const file = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  const link = element("a", undefined, { href: URL.createObjectURL(file), download: "graph.svg" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
});
find("svg").hidden = false;
document.querySelector(".keys").hidden = false;
window.addEventListener("popstate", () => { state = read(); show(); });
show();

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.getElementById("plot"), cursor = document.getElementById("cursor"), list = document.getElementById("moment");
const GIB = 2 ** 30, ROWS = 14;
const gib = (n) => (n / GIB).toFixed(3);
const SKIP = new Set(["while", "body", "cond", "closed_call", "checkpoint"]);

// A scope's path without what says only how it is run.
function readable(scope) {
  const parts = scope.split("/");
  return parts.length < 2 ? scope : parts.filter((part, i) => !SKIP.has(part) && (i > 0 || !part.startsWith("jit("))).join(" / ");
}

function cell(row, text, name = "") {
  const made = row.appendChild(document.createElement("td"));
  made.textContent = text;
  made.title = text;
  made.className = name;
  return made;
}

// ---- the buffers of a moment ----

let held = false, shown = data.at.indexOf(data.peak);

function show(i) {
  shown = Math.max(0, Math.min(data.at.length - 1, i));
  const at = data.at[shown], live = data.live[shown];
  cursor.hidden = false;
  cursor.style.left = (100 * at) / data.n + "%";
  cursor.classList.toggle("held", held);
  const alike = new Map();
  for (const span of data.spans) {
    if (at < span[0] || span[1] < at) continue;
    const key = span.slice(3).join();
    alike.set(key, [...(alike.get(key) ?? []), span]);
  }
  const sum = (spans) => spans.reduce((n, span) => n + span[2], 0);
  const groups = [...alike.values()].sort((a, b) => sum(b) - sum(a)).slice(0, ROWS);
  list.replaceChildren();
  const heading = list.appendChild(document.createElement("h3"));
  heading.append(`Instruction ${at.toLocaleString("en")}${at === data.peak ? ", the peak" : ""}: ${gib(data.base + live)} GiB alive `);
  const note = heading.appendChild(document.createElement("span"));
  note.textContent = `${gib(data.base)} from beginning to end and ${gib(live)} in temporaries` + (data.words[data.doing[shown]] ? `, at ${readable(data.words[data.doing[shown]])}` : "");
  const table = list.appendChild(document.createElement("table"));
  table.innerHTML = "<thead><tr><th class=n>GiB</th><th>shape</th><th>of</th><th>source</th><th>from – to</th></tr></thead>";
  const body = table.appendChild(document.createElement("tbody"));
  let rest = live;
  for (const spans of groups) {
    const [first, last, , shape, scope, source] = spans[0];
    const row = body.appendChild(document.createElement("tr"));
    cell(row, gib(sum(spans)), "n");
    const code = cell(row, spans.length > 1 ? `${spans.length} × ` : "");
    code.appendChild(document.createElement("code")).textContent = data.words[shape];
    code.title = data.words[shape];
    cell(row, readable(data.words[scope])).title = data.words[scope];
    cell(row, data.words[source]);
    const ends = spans.every((span) => span[0] === first && span[1] === last);
    cell(row, ends ? `${first.toLocaleString("en")} – ${last.toLocaleString("en")}` : "");
    rest -= sum(spans);
  }
  if (rest > 0) {
    const row = body.appendChild(document.createElement("tr"));
    cell(row, gib(rest), "n");
    cell(row, "in other buffers").colSpan = 4;
  }
}

// Index of the moment nearest to a place between 0 and 1 of the width.
function nearest(place) {
  const wanted = place * data.n;
  let low = 0, high = data.at.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (data.at[middle] <= wanted) low = middle; else high = middle;
  }
  return wanted - data.at[low] <= data.at[high] - wanted ? low : high;
}

const pointed = (event) => {
  const box = plot.getBoundingClientRect();
  return nearest((event.clientX - box.left) / box.width);
};
if (data.at.length) {
  show(shown);
  plot.addEventListener("pointermove", (event) => { if (!held) show(pointed(event)); });
  plot.addEventListener("pointerleave", () => { if (!held) show(data.at.indexOf(data.peak)); });
  plot.addEventListener("click", (event) => { held = !held; show(pointed(event)); });
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    held = true;
    show(shown + by * (event.shiftKey ? 20 : 1));
  });
}

// ---- the legend picks a band out ----

const paths = [...plot.querySelectorAll("path")];
for (const item of document.querySelectorAll(".legend li[data-band]")) {
  item.addEventListener("pointerenter", () => {
    plot.classList.add("fade");
    paths.forEach((path) => path.classList.toggle("on", path.dataset.band === item.dataset.band));
  });
  item.addEventListener("pointerleave", () => plot.classList.remove("fade"));
}

// ---- tables are sorted by a click on a heading ----

for (const table of document.querySelectorAll(".sortable")) {
  const headings = [...table.querySelectorAll("th")], body = table.tBodies[0];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const numbers = body.rows[0]?.cells[column].dataset.v !== undefined;
    const before = heading.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numbers;
    const value = (row) => numbers ? +row.cells[column].dataset.v : row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => numbers ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true }));
    body.append(...(descending ? rows.reverse() : rows));
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  }));
}

// Reads a folder of `pd share graph` as a page of graphs does, and is strict: every field of every file is checked against
// the field tables, and every reference must lead somewhere. Draws the graph; a click on a component reads its file.
"use strict";

const errors = [];

function is(value, type, tables, where) {
  const alternatives = type.split("|");
  if (alternatives.length > 1) {
    const before = errors.length;
    for (const one of alternatives) {
      is(value, one, tables, where);
      if (errors.length === before) return;
      errors.length = before;
    }
    errors.push(`${where} is no ${type}`);
  } else if (type.startsWith("[")) {
    if (!Array.isArray(value)) errors.push(`${where} is no list`);
    else value.forEach((entry, n) => is(entry, type.slice(1, -1), tables, `${where}[${n}]`));
  } else if (type in tables) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      errors.push(`${where} is no object`);
      return;
    }
    const known = new Set();
    for (const [key, inner] of Object.entries(tables[type])) {
      const name = key.replace("?", "");
      known.add(name);
      if (name in value) is(value[name], inner, tables, `${where}.${name}`);
      else if (!key.endsWith("?")) errors.push(`${where}.${name} is missing`);
    }
    for (const name of Object.keys(value)) if (!known.has(name)) errors.push(`${where}.${name} is unknown`);
  } else {
    const good = {
      string: typeof value === "string", number: Number.isFinite(value), integer: Number.isSafeInteger(value),
      boolean: typeof value === "boolean", null: value === null, object: typeof value === "object" && value !== null,
    }[type];
    if (!good) errors.push(`${where} is no ${type}: ${JSON.stringify(value)}`);
  }
}

function expect(condition, message) {
  if (!condition) errors.push(message);
}

async function read(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  return answer.json();
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

function draw(graph, choose) {
  const layers = [...new Set(graph.nodes.map((node) => node.layer))];
  layers.sort((a, b) => (a === "E" ? -1 : b === "E" ? 1 : Number(a) - Number(b)));
  const used = new Map();
  const places = new Map();
  for (const node of graph.nodes) {
    const cell = `${node.layer} ${node.ctx_idx}`;
    const n = used.get(cell) ?? 0;
    used.set(cell, n + 1);
    const x = 40 + (800 / graph.metadata.prompt_tokens.length) * node.ctx_idx + 14 * (n % 6);
    places.set(node.node_id, [x, 470 - (440 / layers.length) * layers.indexOf(node.layer) - 14 * Math.floor(n / 6)]);
  }
  const picture = document.querySelector("svg");
  for (const link of graph.links) {
    const [[x1, y1], [x2, y2]] = [places.get(link.source), places.get(link.target)];
    picture.append(svg("line", { x1, y1, x2, y2, class: link.weight > 0 ? "raises" : "lowers" }));
  }
  const types = { "cross layer transcoder": "component", logit: "logit", embedding: "embedding", "mlp reconstruction error": "error" };
  for (const node of graph.nodes) {
    const [cx, cy] = places.get(node.node_id);
    expect(node.feature_type in types, `${node.node_id}: ${node.feature_type} is no type of node`);
    const mark = svg("circle", { cx, cy, r: 5, class: types[node.feature_type], id: node.node_id });
    const title = svg("title", {});
    title.textContent = node.clerp;
    mark.append(title);
    mark.addEventListener("click", () => choose(node));
    picture.append(mark);
  }
}

function check(graph, list) {
  const { metadata, nodes, links, qParams } = graph;
  const ids = new Set(nodes.map((node) => node.node_id));
  expect(ids.size === nodes.length, "two nodes of one node_id");
  expect(new Set(nodes.map((node) => node.jsNodeId)).size === nodes.length, "two nodes of one jsNodeId");
  expect(list.graphs.some((one) => JSON.stringify(one) === JSON.stringify(metadata)), "its metadata are not in the list");
  expect(metadata.schema_version === 1, "another version");
  for (const link of links) {
    expect(ids.has(link.source) && ids.has(link.target), `a link ${link.source} to ${link.target}`);
  }
  for (const id of [...qParams.pinnedIds, ...qParams.supernodes.flatMap((group) => group.slice(1))]) {
    expect(ids.has(id), `${id} is pinned or in a group, and no node`);
  }
  for (const node of nodes) {
    expect(node.ctx_idx >= 0 && node.ctx_idx < metadata.prompt_tokens.length, `${node.node_id}: ctx_idx`);
    expect(node.layer === "E" || /^\d+$/.test(node.layer), `${node.node_id}: layer ${node.layer}`);
    if (node.feature_type === "cross layer transcoder") {
      const [layer, feature] = node.node_id.split("_").map(Number);
      const diagonal = layer + feature;
      expect(node.layer === String(layer), `${node.node_id}: layer`);
      expect(node.feature === (diagonal * (diagonal + 1)) / 2 + feature, `${node.node_id}: feature ${node.feature}`);
    }
  }
  expect(nodes.filter((node) => node.is_target_logit).length === 1, "not one target");
}

function show(feature) {
  const section = document.getElementById("feature");
  section.replaceChildren();
  for (const quantile of feature.examples_quantiles) {
    const title = document.createElement("h2");
    title.textContent = quantile.quantile_name;
    section.append(title);
    for (const example of quantile.examples) {
      expect(example.tokens.length === example.tokens_acts_list.length, "tokens without values");
      expect(example.train_token_ind < example.tokens.length, "train_token_ind");
      const line = document.createElement("p");
      example.tokens.forEach((token, n) => {
        const value = example.tokens_acts_list[n];
        expect(value >= feature.act_min && value <= feature.act_max, "a value beyond act_min and act_max");
        const span = document.createElement("span");
        span.textContent = token;
        span.style.background = `rgba(240, 120, 0, ${value / (feature.act_max || 1)})`;
        span.classList.toggle("at", n === example.train_token_ind);
        line.append(span);
      });
      section.append(line);
    }
  }
}

async function main() {
  const report = { nodes: 0, links: 0, features: 0, errors };
  try {
    const tables = await read("fields.json");
    const slug = new URLSearchParams(location.search).get("slug");
    const [graph, list] = [await read(`data/${slug}.json`), await read("data/graph-metadata.json")];
    is(graph, "Graph", tables, "graph");
    is(list, "GraphList", tables, "list");
    check(graph, list);
    const features = {};
    for (const node of graph.nodes.filter((one) => one.feature_type === "cross layer transcoder")) {
      const feature = await read(`data/features/${graph.metadata.scan}/${node.feature}.json`);
      is(feature, "FeatureFile", tables, `feature ${node.feature}`);
      expect(feature.index === node.feature, `feature ${node.feature} has index ${feature.index}`);
      features[node.feature] = feature;
    }
    document.querySelector("h1").textContent = graph.metadata.prompt;
    draw(graph, (node) => {
      for (const mark of document.querySelectorAll("circle")) mark.classList.toggle("chosen", mark.id === node.node_id);
      if (node.feature in features) show(features[node.feature]);
    });
    Object.assign(report, { nodes: graph.nodes.length, links: graph.links.length, features: Object.keys(features).length });
  } catch (error) {
    errors.push(String(error));
  }
  document.getElementById("report").textContent = JSON.stringify(report);
}

main();

"use strict";
document.documentElement.classList.add("js");

// Values under the pointer: the nearest step of every line of a chart.
function format(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}

function element(parent, name, className) {
  const made = document.createElement(name);
  made.className = className;
  parent.append(made);
  return made;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

for (const chart of document.querySelectorAll(".chart[data-points]")) {
  const plot = chart.querySelector(".plot");
  let data = null, marks = [];
  const scale = (v) => 1 - (data.log ? Math.log(v / data.lo) / Math.log(data.hi / data.lo) : (v - data.lo) / (data.hi - data.lo));
  const clear = () => { for (const mark of marks) mark.remove(); marks = []; };

  plot.addEventListener("pointerleave", clear);
  plot.addEventListener("pointermove", (event) => {
    data ??= JSON.parse(chart.dataset.points);
    clear();
    const box = plot.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * data.x;
    const pointer = (event.clientY - box.top) / box.height;
    let found = data.s.filter((line) => line.p.length).map((line) => ({ line, point: nearest(line.p, wanted) }));
    const step = found.reduce((best, f) => Math.abs(f.point[0] - wanted) < Math.abs(best - wanted) ? f.point[0] : best, found[0].point[0]);
    found = found.filter((f) => f.point[0] === step);
    found.sort((a, b) => Math.abs(scale(a.point[1]) - pointer) - Math.abs(scale(b.point[1]) - pointer));
    found = found.slice(0, 10).sort((a, b) => b.point[1] - a.point[1]);

    const cursor = element(plot, "div", "cursor");
    const left = (100 * step) / data.x;
    cursor.style.left = left + "%";
    const tip = element(plot, "div", "tip");
    tip.style[left > 55 ? "right" : "left"] = `calc(${left > 55 ? 100 - left : left}% + 10px)`;
    element(tip, "div", "").textContent = "step " + step.toLocaleString("en");
    marks = [cursor, tip];
    for (const { line, point } of found) {
      const dot = element(plot, "div", "dot");
      dot.style.cssText = `left:${left}%;top:${100 * scale(point[1])}%;background:${line.c}`;
      marks.push(dot);
      const row = element(tip, "div", "");
      if (data.s.length > 1) {
        element(row, "i", "").style.background = line.c;
        row.append(line.n);
      }
      element(row, "b", "").textContent = format(point[1]);
    }
  });
}

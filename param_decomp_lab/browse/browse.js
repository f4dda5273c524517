// Keys, and buttons that copy. Every key is a link or a field of the page, so that nothing needs this script.
"use strict";

const shadeKey = "param-decomp shade";
const byActivation = document.getElementById("by-activation");
const byImportance = document.getElementById("by-importance");

if (byActivation) {
  // The choice is kept from one component to the next.
  try {
    if (sessionStorage.getItem(shadeKey) === "a") byActivation.checked = true;
  } catch { /* storage is switched off */ }
  for (const button of [byActivation, byImportance]) {
    button.addEventListener("change", () => {
      try {
        sessionStorage.setItem(shadeKey, byActivation.checked ? "a" : "l");
      } catch { /* storage is switched off */ }
    });
  }
}

for (const button of document.querySelectorAll("[data-copy], [data-copy-link]")) {
  if (!navigator.clipboard) break; // not on an address that the browser takes for insecure
  button.hidden = false;
  const says = button.textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.dataset.copy ?? location.href);
      button.textContent = "copied";
    } catch {
      button.textContent = "not copied";
    }
    setTimeout(() => { button.textContent = says; }, 1200);
  });
}

// A link whose page is shown in its place, asked for again while it waits; that page may have such links again. Without
// this script, and outside of a section, it is a link.
function shownInPlace(link) {
  const section = link.closest("section");
  if (!section) return;
  link.addEventListener("click", async (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    const heading = section.querySelector("h2");
    section.setAttribute("aria-live", "polite");
    try {
      for (let waiting = true; waiting;) {
        const answer = await fetch(link.href);
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const found = page.querySelector("[data-loaded]");
        if (!found) throw new Error("another page");
        section.replaceChildren(heading, found);
        found.querySelectorAll("a[data-load]").forEach(shownInPlace);
        waiting = "waiting" in found.dataset;
        if (waiting) await new Promise((again) => { setTimeout(again, 1000); });
      }
    } catch {
      location.href = link.href;
    }
  });
}
document.querySelectorAll("a[data-load]").forEach(shownInPlace);

// Whether arrows move what an element is in from side to side.
function scrolls(element) {
  const frame = element.closest(".scroll");
  return frame !== null && frame.scrollWidth > frame.clientWidth;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input:not([type=radio]), textarea, select");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  if (event.key === "a" && byActivation) {
    const other = byActivation.checked ? byImportance : byActivation;
    other.checked = true;
    other.dispatchEvent(new Event("change"));
    return;
  }
  const key = { ArrowRight: "n", ArrowLeft: "p" }[event.key] ?? event.key;
  if (event.key.startsWith("Arrow") && (event.target.type === "radio" || scrolls(event.target))) return;
  const target = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (!target) return;
  event.preventDefault();
  if (target.matches("a")) {
    target.click();
  } else {
    target.focus();
    target.select?.();
  }
});

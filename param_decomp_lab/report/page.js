// One site of the component browser at a time.
const chooser = document.querySelector("[data-sites]");
if (chooser) {
  const sites = [...document.querySelectorAll(".site")];
  const buttons = [...chooser.querySelectorAll("button")];
  const show = (index) => {
    for (const site of sites) site.classList.toggle("shown", site.dataset.site === String(index));
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.site === String(index));
  };
  chooser.hidden = false;
  for (const button of buttons) button.addEventListener("click", () => show(button.dataset.site));
  chooser.querySelector("select")?.addEventListener("change", (event) => show(event.target.value));
  show(0);
}

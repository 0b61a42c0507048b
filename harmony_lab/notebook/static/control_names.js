// Names of the controls for screen readers: ipywidgets writes a control's description beside it, without tying the two.
const NAMED = ".noUi-handle, select, textarea, input:not([type=radio]), .widget-readout";

function nameControls(root) {
  root.querySelectorAll("[title=null]").forEach((part) => part.removeAttribute("title")); // ipywidgets' "no tooltip"
  for (const row of root.querySelectorAll(".widget-inline-hbox")) {
    const label = row.querySelector(":scope > .widget-label")?.textContent.trim();
    if (!label) continue;
    row.querySelectorAll(NAMED).forEach((control) => control.setAttribute("aria-label", label));
    row.querySelectorAll(".noUi-handle").forEach((handle) => (handle.dataset.lmSuppressShortcuts = "true")); // arrow keys
    if (row.classList.contains("widget-toggle-buttons")) {
      row.setAttribute("role", "group");
      row.setAttribute("aria-label", label);
    }
  }
}

function render({ el }) {
  let observer, frame;
  function start() {
    if (!el.isConnected) { // on a page that is loaded later widgets are put together off the page, for many frames
      frame = requestAnimationFrame(start);
      return;
    }
    const root = el.closest(".harmony-lab");
    if (!root) return;
    nameControls(root);
    observer = new MutationObserver(() => nameControls(root));
    const looks = { childList: true, subtree: true, attributeFilter: ["title"] };
    observer.observe(root, looks); // controls appear one by one
  }
  frame = requestAnimationFrame(start);
  return () => {
    cancelAnimationFrame(frame);
    observer?.disconnect();
  };
}

export default { render };

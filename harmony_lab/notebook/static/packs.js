// Layers in two rows, forward and backward, cut into packs.  Between two layers is a button: a click sets or takes a cut,
// a cut can be dragged; by keyboard, arrows move along the row and Enter or Space sets and takes, Shift with an arrow drags.
const WAYS = ["forward", "backward"];

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function render({ model, el }) {
  el.classList.add("harmony-packs");
  const rows = {};
  for (const way of WAYS) {
    rows[way] = element("div", { className: "harmony-packs-row" });
    rows[way].setAttribute("role", "group");
    rows[way].setAttribute("aria-label", `${way} packs`);
    el.append(element("span", { className: "harmony-packs-name", textContent: way }), rows[way]);
  }
  let focused = null; // [way, boundary] to focus again after drawing

  const last = () => model.get("layers").length;
  const stopOf = (way) => (way === "backward" ? last() : (model.get("backward").at(-1) ?? 0));

  const commit = (way, cuts) => {
    model.set(way, [...new Set(cuts)].sort((a, b) => a - b));
    model.save_changes();
  };
  const toggle = (way, at) => {
    const cuts = model.get(way);
    commit(way, cuts.includes(at) ? cuts.filter((cut) => cut !== at) : [...cuts, at]);
  };
  const move = (way, from, to) => {
    if (to < 1 || to >= stopOf(way) || model.get(way).includes(to)) return false;
    commit(way, [...model.get(way).filter((cut) => cut !== from), to]);
    return true;
  };

  const drag = (way, at, button, start) => {
    const box = rows[way].getBoundingClientRect();
    const nearest = (event) => Math.round(((event.clientX - box.left) / box.width) * last());
    let to = at;
    button.setPointerCapture(start.pointerId);
    button.onpointermove = (event) => {
      to = Math.max(1, Math.min(stopOf(way) - 1, nearest(event)));
      button.style.left = `${(100 * to) / last()}%`;
    };
    button.onpointerup = button.onpointercancel = (event) => {
      button.onpointermove = button.onpointerup = button.onpointercancel = null;
      if (event.type === "pointerup" && to !== at && move(way, at, to)) return;
      if (event.type === "pointerup" && to === at) toggle(way, at);
      draw();
    };
  };

  const boundary = (way, at, reachable) => {
    const isCut = model.get(way).includes(at);
    const button = element("button", { type: "button", className: "harmony-packs-edge" });
    button.classList.toggle("harmony-packs-cut", isCut);
    button.style.left = `${(100 * at) / last()}%`;
    button.title = `${isCut ? "a pack starts" : "start a pack"} before layer ${at}, ${model.get("layers")[at]}`;
    button.setAttribute("aria-label", button.title);
    button.setAttribute("aria-pressed", String(isCut));
    button.tabIndex = reachable ? 0 : -1;
    button.disabled = model.get("disabled");
    button.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes the arrow keys to move among cells
    button.onpointerdown = (event) => {
      if (event.button !== 0 || button.disabled) return;
      event.preventDefault();
      focused = null;
      if (isCut) drag(way, at, button, event);
      else toggle(way, at);
    };
    button.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && event.shiftKey && isCut) {
        if (move(way, at, at + step)) focused = [way, at + step];
      } else if (step) {
        rows[way].querySelector(`[data-at="${at + step}"]`)?.focus();
      } else if (event.key === "Enter" || event.key === " ") {
        focused = [way, at];
        toggle(way, at);
      } else return;
      event.preventDefault();
      event.stopPropagation();
    };
    button.dataset.at = at;
    return button;
  };

  const pack = (start, stop, label, shade) => {
    const size = stop - start === 1 ? "1 layer" : `${stop - start} layers`;
    const made = element("div", { className: "harmony-packs-pack", textContent: label });
    made.style.left = `${(100 * start) / last()}%`;
    made.style.width = `${(100 * (stop - start)) / last()}%`;
    made.title = `layers ${start} to ${stop - 1}: ${size}, ${label} of weights`;
    made.classList.toggle("harmony-packs-odd", shade % 2 === 1);
    return made;
  };

  // Words that do not fit are shorter ("469M") or not there: their title, for a pointer, has them in full.
  const shorten = (made) => {
    const fits = () => made.scrollWidth <= made.clientWidth;
    if (!made.clientWidth || fits()) return;
    made.textContent = made.classList.contains("harmony-packs-fused") ? "fused" : made.textContent.replace(/ (.)iB$/, "$1");
    if (!fits()) made.textContent = "";
  };

  const drawRow = (way) => {
    const stop = stopOf(way);
    const cuts = model.get(way).filter((cut) => cut < stop);
    const edges = [0, ...cuts, stop];
    const labels = model.get(`${way}_labels`);
    const packs = stop ? edges.slice(1).map((end, i) => pack(edges[i], end, labels[i] ?? "", i)) : [];
    const first = cuts[0] ?? 1;
    const buttons = [];
    for (let at = 1; at < stop; at++) buttons.push(boundary(way, at, at === first));
    if (way === "forward" && stop < last()) {
      const fused = element("div", { className: "harmony-packs-fused", textContent: "with the last backward pack" });
      fused.style.left = `${(100 * stop) / last()}%`;
      fused.style.width = `${(100 * (last() - stop)) / last()}%`;
      fused.title = "the last backward pack runs its own forward";
      packs.push(fused);
    }
    rows[way].replaceChildren(...packs, ...buttons);
    rows[way].querySelectorAll("div").forEach(shorten);
  };

  const draw = () => {
    if (!last()) return;
    WAYS.forEach(drawRow);
    if (focused) rows[focused[0]].querySelector(`[data-at="${focused[1]}"]`)?.focus();
  };
  let waiting = false;
  const soon = () => {
    if (waiting) return; // several traits change at once
    waiting = true;
    queueMicrotask(() => ((waiting = false), draw()));
  };
  const names = ["layers", "forward", "backward", "forward_labels", "backward_labels", "disabled"];
  names.forEach((name) => model.on(`change:${name}`, soon));
  draw();
  const width = new ResizeObserver(soon);
  width.observe(el);
  return () => {
    width.disconnect();
    names.forEach((name) => model.off(`change:${name}`, soon));
  };
}

export default { render };

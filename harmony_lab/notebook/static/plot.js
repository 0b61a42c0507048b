// One plotly figure, drawn anew whenever the trait "packed" changes, with text in the colour of JupyterLab's theme.
// plotly.js arrives once per page, through another widget (library.js); the two meet in a promise.
function meetingPoint() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}
const library = (globalThis[Symbol.for("harmony_lab.plotly")] ??= meetingPoint());

const ALARM = ["#D6273B", "#FF7B84"]; // text in red on a light page, and one as readable on a dark page
const CONFIG = { displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "toImage"] };

function inkOfTheme(fallback) {
  return getComputedStyle(document.body).getPropertyValue("--jp-ui-font-color1").trim() || fallback;
}

async function unpacked(view) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  const text = await new Response(stream).text();
  return JSON.parse(document.body.dataset.jpThemeLight === "false" ? text.replaceAll(...ALARM) : text);
}

async function render({ model, el }) {
  el.classList.add("harmony-plot");
  const plot = el.appendChild(document.createElement("div"));
  plot.setAttribute("role", "img");
  const plotly = await library.promise;
  el.classList.add("harmony-live"); // there is a kernel: the static form beside is not needed (dashboard.css)

  const paint = async () => {
    const packed = model.get("packed");
    const width = el.clientWidth;
    if (packed.byteLength === 0 || width === 0) return; // hidden, in a tab: drawn once the observer sees it shown
    const { data, layout } = await unpacked(packed);
    const font = { ...layout.font, color: inkOfTheme(layout.font?.color) };
    plot.setAttribute("aria-label", layout.title?.text ?? "figure");
    await plotly.react(plot, data, { ...layout, font, width }, CONFIG);
  };
  let painted = Promise.resolve();
  const draw = () => {
    painted = painted.then(paint).catch(console.error); // one at a time, in order
  };

  const size = new ResizeObserver(draw);
  size.observe(el);
  const theme = new MutationObserver(draw);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
  model.on("change:packed", draw);
  return () => {
    size.disconnect();
    theme.disconnect();
    model.off("change:packed", draw);
    painted.then(() => plotly.purge(plot));
  };
}

export default { render };

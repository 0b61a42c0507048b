// One plotly figure, drawn anew whenever the kernel sends another, with text in the colour of JupyterLab's theme.
const ALARM = ["#D6273B", "#FF7B84"]; // text in red on a light page, and one as readable on a dark page
const LITTLE_TO_MUCH = ["#1D2A36", "#1F4767", "#2A6B9C", "#4A96CC", "#86C1EA", "#D6ECFB"]; // on a dark page
const CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["lasso2d", "select2d", "toImage"],
  showSendToCloud: false, // plotly's own default uploads the figure
};

function ofTheme(name, fallback) {
  return getComputedStyle(document.body).getPropertyValue(name).trim() || fallback;
}

async function unpacked(view) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  const text = await new Response(stream).text();
  if (document.body.dataset.jpThemeLight !== "false") return JSON.parse(text);
  const figure = JSON.parse(text.replaceAll(...ALARM));
  for (const trace of figure.data)
    if (trace.type === "heatmap" && !trace.text) // cells with words keep the colours that those can be read on
      trace.colorscale = LITTLE_TO_MUCH.map((colour, i, all) => [i / (all.length - 1), colour]);
  return figure;
}

// Figures over the same time that are looked at together are zoomed together: those of one tab whose layout says so.
const ZOOMED = "harmony-zoomed";

function zoomTogether(plotly, plot) {
  let following = false;
  const tab = () => plot.closest(".widget-tab-contents > *");
  const linked = () => plot.layout?.meta?.zoomed && plot.clientWidth && tab();
  plot.on("plotly_relayout", (change) => {
    if (following || !linked() || !Object.keys(change).some((key) => /^xaxis\d*\.(auto)?range/.test(key))) return;
    const range = [...plot._fullLayout.xaxis.range];
    document.dispatchEvent(new CustomEvent(ZOOMED, { detail: { plot, tab: tab(), range } }));
  });
  const follow = async ({ detail }) => {
    if (detail.plot === plot || !linked() || detail.tab !== tab()) return;
    following = true;
    const axes = Object.keys(plot.layout).filter((key) => /^xaxis\d*$/.test(key));
    await plotly.relayout(plot, Object.fromEntries(axes.map((axis) => [`${axis}.range`, [...detail.range]])));
    following = false;
  };
  document.addEventListener(ZOOMED, follow);
  return () => document.removeEventListener(ZOOMED, follow);
}

function render(plotly, { model, el }) {
  el.classList.add("harmony-plot");
  const plot = el.appendChild(document.createElement("div"));
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", "figure"); // until it is drawn
  el.classList.add("harmony-live"); // there is a kernel: the static form beside is not needed (dashboard.css)

  const paint = async () => {
    const width = el.clientWidth;
    if (!packed || width === 0) return; // hidden, in a tab: drawn once the observer sees it shown
    const { data, layout } = await unpacked(packed);
    const font = { ...layout.font, color: ofTheme("--jp-ui-font-color1", layout.font?.color) };
    plot.setAttribute("aria-label", (layout.title?.text || "figure").replace(/<[^>]*>/g, " "));
    await plotly.react(plot, ...fitted(data, { ...layout, font, width }), CONFIG);
    forget ??= zoomTogether(plotly, plot);
    plot.style.visibility = "";
    if (!model.get("picks")) return;
    plot.removeAllListeners("plotly_click"); // there is one more after each drawing otherwise
    plot.on("plotly_click", ({ points }) => {
      const picked = points.find((point) => Number.isInteger(point.customdata));
      if (picked) model.send({ picked: picked.customdata });
    });
  };
  let packed; // the figure
  let forget; // what zooms this plot with others, once it is drawn
  let painted = Promise.resolve();
  const draw = () => {
    painted = painted.then(paint).catch(console.error); // one at a time, in order
  };

  const size = new ResizeObserver(draw);
  size.observe(el);
  const theme = new MutationObserver(() => {
    if (el.clientWidth === 0) plot.style.visibility = "hidden"; // until it is drawn: text in the colour before is unreadable
    draw();
  });
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
  const take = (_, buffers) => {
    packed = buffers[0];
    draw();
  };
  model.on("msg:custom", take);
  model.send({ wanted: true });
  return () => {
    size.disconnect();
    theme.disconnect();
    model.off("msg:custom", take);
    forget?.();
    painted.then(() => plotly.purge(plot));
  };
}

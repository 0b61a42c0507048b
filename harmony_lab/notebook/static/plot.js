// One plotly figure, drawn anew whenever the trait "packed" changes, with text in the colour of JupyterLab's theme.
// plotly.js arrives once per page, through another widget (library.js); the two meet in a promise.
function meetingPoint() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}
const library = (globalThis[Symbol.for("harmony_lab.plotly")] ??= meetingPoint());

const ALARM = ["#D6273B", "#FF7B84"]; // text in red on a light page, and one as readable on a dark page
const CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["lasso2d", "select2d", "toImage"],
  showSendToCloud: false, // plotly's own default uploads the figure
};

function ofTheme(name, fallback) {
  return getComputedStyle(document.body).getPropertyValue(name).trim() || fallback;
}

const ruler = document.createElement("canvas").getContext("2d");

function lengthOf(text, size) {
  ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text.replace(/<[^>]*>/g, "")).width;
}

function lines(text, size, room) {
  const made = [""];
  for (const word of text.split(" ")) {
    const longer = made.at(-1) ? `${made.at(-1)} ${word}` : word;
    if (lengthOf(longer, size) <= room) made[made.length - 1] = longer;
    else made.push(word);
  }
  return made.filter((line) => line);
}

// A heading of a panel, a little smaller where that suffices, else in several lines.
function heading(annotation, room) {
  const size = annotation.font?.size ?? 12;
  const fits = (size * room) / lengthOf(annotation.text, size);
  if (fits >= 9) return { ...annotation, font: { ...annotation.font, size: Math.min(size, fits) } };
  return { ...annotation, align: "left", text: lines(annotation.text, size, room).join("<br>") };
}

const NARROW = 640; // below, plotly's buttons stand in a column beside the figure, or they would lie on its heading

// Headings break where a narrow page would cut them, and the figure grows by the lines that adds to its title.
function fitted(layout, width) {
  const { l = 80, r = 20, t = 100 } = layout.margin ?? {};
  const narrow = width < NARROW;
  const room = width - l - r - (narrow ? 20 : 0);
  const [title, note] = (layout.title?.text ?? "").split(/<br><sup>|<\/sup>/);
  const notes = note ? note.split("<br>").flatMap((line) => lines(line, 10.5, room)) : [];
  const more = 15 * Math.max(0, notes.length - (note ?? "").split("<br>").length);
  const annotations = layout.annotations?.map((each) =>
    each.xref === "paper" && each.x === 0 ? heading(each, room) : each
  );
  return {
    ...layout,
    title: { ...layout.title, text: [title, ...notes.map((line) => `<sup>${line}</sup>`)].join("<br>") },
    margin: { ...layout.margin, t: t + more, r: narrow ? r + 20 : r },
    modebar: { ...layout.modebar, orientation: narrow ? "v" : "h" },
    height: layout.height && layout.height + more,
    annotations,
  };
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
  plot.setAttribute("aria-label", "figure"); // until it is drawn
  const plotly = await library.promise;
  el.classList.add("harmony-live"); // there is a kernel: the static form beside is not needed (dashboard.css)

  const paint = async () => {
    const packed = model.get("packed");
    const width = el.clientWidth;
    if (packed.byteLength === 0 || width === 0) return; // hidden, in a tab: drawn once the observer sees it shown
    const { data, layout } = await unpacked(packed);
    const font = { ...layout.font, color: ofTheme("--jp-ui-font-color1", layout.font?.color) };
    plot.setAttribute("aria-label", (layout.title?.text || "figure").replace(/<[^>]*>/g, " "));
    await plotly.react(plot, data, { ...fitted(layout, width), font, width }, CONFIG);
    plot.style.visibility = "";
    if (!model.get("picks")) return;
    plot.removeAllListeners("plotly_click"); // there is one more after each drawing otherwise
    plot.on("plotly_click", ({ points }) => {
      const picked = points.find((point) => Number.isInteger(point.customdata));
      if (picked) model.send({ picked: picked.customdata });
    });
  };
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
  model.on("change:packed", draw);
  return () => {
    size.disconnect();
    theme.disconnect();
    model.off("change:packed", draw);
    painted.then(() => plotly.purge(plot));
  };
}

export default { render };

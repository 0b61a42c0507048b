// What of a figure's layout depends on how wide the page is: words that would be cut or lie on each other.
const NARROW = 640; // below, plotly's buttons stand in a column beside the figure, or they would lie on its heading
const BUTTONS = 165; // pixels that they take in a row
const CELL = 54; // pixels that a cell of a table of bytes needs for "1.68 GiB", and "activations" below it
const NOTE = 10.5; // pixels, of the words below a title

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

// A table of bytes whose cells are narrow: short units, and the columns' names upright.
function tight(data, layout, room) {
  const [table] = data.filter((trace) => trace.type === "heatmap" && typeof trace.x?.[0] === "string");
  if (!table || room / table.x.length >= CELL) return [data, layout];
  const unbroken = (trace) => ({ ...trace, x: trace.x.map((name) => name.replaceAll("<br>", " ")) });
  const brief = (trace) =>
    trace.mode === "text" ? { ...trace, text: trace.text.map((size) => size.replace(/ (.)i?B?$/, "$1")) } : trace;
  const more = 60;
  return [
    data.map((trace) => brief(unbroken(trace))),
    { ...layout, height: layout.height + more, xaxis: { ...layout.xaxis, tickangle: -90 } },
  ];
}

// [data, layout]: titles and headings break where the page would cut them, and the figure grows by what that adds.
function fitted(data, given) {
  const { l = 80, r = 20, t = 100 } = given.margin ?? {};
  const narrow = given.width < NARROW;
  const within = given.width - l - r - (narrow ? 20 : 0);
  const [cells, layout] = tight(data, given, within);
  const room = within - (narrow ? 0 : BUTTONS);
  const [title, note] = (layout.title?.text ?? "").split(/<br><sup>|<\/sup>/);
  const size = layout.title?.font?.size ?? 14;
  const titles = lines(title, size, room);
  const notes = note ? note.split("<br>").flatMap((line) => lines(line, NOTE, room)) : [];
  const more = 18 * (Math.max(0, titles.length - 1) + Math.max(0, notes.length - 1));
  const annotations = layout.annotations?.map((each) =>
    each.xref === "paper" && each.x === 0 ? heading(each, within) : each
  );
  const small = notes.map((line) => `<span style="font-size:${NOTE}px">${line}</span>`);
  const aside = (trace) => (trace.colorbar ? { ...trace, colorbar: { ...trace.colorbar, xpad: 26 } } : trace);
  return [
    narrow ? cells.map(aside) : cells, // colours' scale, and the buttons right of it
    {
      ...layout,
      title: { ...layout.title, text: [...titles, ...small].join("<br>") },
      margin: { ...layout.margin, t: t + more, r: narrow ? r + 20 : r },
      modebar: { ...layout.modebar, orientation: narrow ? "v" : "h" },
      height: layout.height && layout.height + more,
      annotations,
    },
  ];
}


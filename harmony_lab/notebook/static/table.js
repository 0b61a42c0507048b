// A table of which one row is chosen, by mouse or keyboard: each row starts with a radio button; headings sort.
let tables = 0;

function cell(tag, ...content) {
  const element = document.createElement(tag);
  element.append(...content);
  return element;
}

function render({ model, el }) {
  el.classList.add("harmony-table");
  const group = `harmony-table-${tables++}`;
  let sorted = null; // {column, sign}, or as they come: best first

  const choose = (index) => {
    model.set("selected", index);
    model.save_changes();
  };

  const row = (texts, index) => {
    const line = document.createElement("tr");
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: group });
    radio.setAttribute("aria-label", texts.join(", "));
    radio.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes the arrow keys to move among cells
    radio.addEventListener("change", () => choose(index));
    line.addEventListener("click", () => choose(index));
    line.dataset.index = index;
    line.append(document.createElement("td"), ...texts.map((text) => cell("td", text)));
    line.firstChild.append(radio);
    return line;
  };

  const mark = () => {
    el.querySelectorAll("tbody tr").forEach((line) => {
      const chosen = Number(line.dataset.index) === model.get("selected");
      line.classList.toggle("harmony-chosen", chosen);
      line.querySelector("input").checked = chosen;
    });
  };

  const heading = (name, column) => {
    const button = cell("button", name);
    button.type = "button";
    button.title = "sort; once more: the other way";
    button.addEventListener("click", () => {
      sorted = { column, sign: sorted?.column === column ? -sorted.sign : 1 };
      draw();
      el.querySelectorAll("th button")[column].focus();
    });
    const made = cell("th", button);
    if (sorted?.column === column) made.setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
    return made;
  };

  const draw = () => {
    const table = document.createElement("table");
    table.setAttribute("aria-label", "candidates, best first");
    const head = table.createTHead().insertRow();
    head.append(document.createElement("th"), ...model.get("columns").map(heading));
    const rows = model.get("rows").map(row);
    const values = model.get("values");
    if (sorted) {
      const key = (line) => values[Number(line.dataset.index)][sorted.column];
      rows.sort((a, b) => sorted.sign * (key(a) - key(b)));
    }
    table.createTBody().append(...rows);
    el.replaceChildren(table);
    mark();
  };

  model.on("change:rows", draw);
  model.on("change:selected", mark);
  draw();
  return () => {
    model.off("change:rows", draw);
    model.off("change:selected", mark);
  };
}

export default { render };

// A table of which one row is chosen, by mouse or keyboard: each row starts with a radio button; headings sort.
const FEW = 10; // candidates at first, so that baselines are seen below them
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
  let all = false; // whether more than a few candidates are shown

  const choose = (index) => {
    model.set("selected", index);
    model.save_changes();
  };

  const row = (texts, index) => {
    const line = document.createElement("tr");
    line.dataset.index = index;
    line.title = model.get("titles")[index] ?? "";
    line.append(document.createElement("td"), ...texts.map((text) => cell("td", text)));
    if (index >= model.get("num_choices")) {
      line.classList.add("harmony-baseline");
      line.cells[2].colSpan = 3; // its name, where plans have mode and packs
      line.cells[4].remove();
      line.cells[3].remove();
      return line;
    }
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: group });
    radio.setAttribute("aria-label", texts.join(", "));
    radio.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes the arrow keys to move among cells
    radio.addEventListener("change", () => choose(index));
    line.addEventListener("click", () => choose(index));
    line.firstChild.append(radio);
    return line;
  };

  const isChosen = (line) => Number(line.dataset.index) === model.get("selected");

  const mark = () => {
    el.querySelectorAll("tbody tr").forEach((line) => {
      const chosen = isChosen(line);
      line.classList.toggle("harmony-chosen", chosen);
      const radio = line.querySelector("input");
      if (radio) radio.checked = chosen;
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

  const more = () => {
    const button = cell("button", all ? `the first ${FEW} candidates only` : `all ${model.get("num_choices")} candidates`);
    button.type = "button";
    button.addEventListener("click", () => {
      all = !all;
      draw();
      el.querySelector("tfoot button").focus();
    });
    return Object.assign(cell("td", button), { colSpan: model.get("columns").length + 1 });
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
      const last = (line) => key(line) === null; // whichever way
      rows.sort((a, b) => last(a) - last(b) || sorted.sign * (key(a) - key(b)));
    }
    let seats = FEW;
    const shown = new Set(); // of rows that read the same the first is enough
    const isNew = (line) => {
      const texts = [...line.cells].slice(2).map((one) => one.textContent).join("|"); // without radio button and rank
      return !shown.has(texts) && shown.add(texts);
    };
    const seated = (line) =>
      all || line.classList.contains("harmony-baseline") || (isNew(line) && seats-- > 0) || isChosen(line);
    table.createTBody().append(...rows.filter(seated));
    if (model.get("num_choices") > FEW) table.createTFoot().insertRow().append(more());
    const top = el.scrollTop;
    const focused = el.contains(document.activeElement) && document.activeElement.closest("tbody tr")?.dataset.index;
    el.replaceChildren(table);
    el.scrollTop = top;
    if (focused) table.querySelector(`tr[data-index="${focused}"] input`)?.focus();
    mark();
  };

  model.on("change:rows", draw);
  const reveal = () => {
    const shown = el.querySelectorAll("tbody tr:not(.harmony-baseline)");
    const misses = model.get("selected") >= 0 && ![...shown].some(isChosen);
    if (misses || (!all && shown.length > FEW)) draw(); // the chosen one is shown also where it is not among the few
    else mark();
    const line = el.querySelector(".harmony-chosen");
    if (!line) return;
    const head = el.querySelector("thead").offsetHeight;
    const below = line.offsetTop + line.offsetHeight - (el.scrollTop + el.clientHeight);
    const above = el.scrollTop + head - line.offsetTop;
    if (below > 0) el.scrollTop += below;
    else if (above > 0) el.scrollTop -= above;
  };
  model.on("change:selected", reveal);
  draw();
  return () => {
    model.off("change:rows", draw);
    model.off("change:selected", reveal);
  };
}

export default { render };

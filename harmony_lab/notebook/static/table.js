// A table of which one row is chosen, by mouse or keyboard: each row starts with a radio button.
let tables = 0;

function cell(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

function render({ model, el }) {
  el.classList.add("harmony-table");
  const group = `harmony-table-${tables++}`;

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
    line.append(document.createElement("td"), ...texts.map((text) => cell("td", text)));
    line.firstChild.append(radio);
    return line;
  };

  const mark = () => {
    el.querySelectorAll("tbody tr").forEach((line, index) => {
      const chosen = index === model.get("selected");
      line.classList.toggle("harmony-chosen", chosen);
      line.querySelector("input").checked = chosen;
    });
  };

  const draw = () => {
    const table = document.createElement("table");
    table.setAttribute("aria-label", "candidates, best first");
    const head = table.createTHead().insertRow();
    head.append(cell("th", ""), ...model.get("columns").map((name) => cell("th", name)));
    table.createTBody().append(...model.get("rows").map(row));
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

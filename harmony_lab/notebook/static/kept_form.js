// Looks, whenever the kernel has sent a newer static form, whether it reached this page's notebook; if not, asks for it.
const PATIENCE_MS = 1500; // for the form's ordinary way

function initialize({ model }) {
  const mark = new RegExp(`data-form="${model.get("form")}" data-version="(\\d+)"`);

  // In JupyterLab and Notebook the manager of a notebook's widgets knows the notebook; elsewhere nothing is done.
  function* older(version) {
    for (const cell of model.widget_manager?.context?.model?.cells ?? []) {
      const outputs = cell.type === "code" ? cell.outputs : null;
      for (let index = 0; index < (outputs?.length ?? 0); index++) {
        const html = outputs.get(index).data["text/html"];
        const found = mark.exec(Array.isArray(html) ? html.join("") : html ?? "");
        if (found && Number(found[1]) < version) yield { outputs, index };
      }
    }
  }

  let timer;
  const look = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!older(model.get("version")).next().done) model.send({});
    }, PATIENCE_MS);
  };
  const arrived = ({ version, data }) => {
    for (const { outputs, index } of [...older(version)])
      outputs.set(index, { output_type: "display_data", data, metadata: {} });
  };
  model.on("change:version", look);
  model.on("msg:custom", arrived);
  look();
  return () => {
    clearTimeout(timer);
    model.off("change:version", look);
    model.off("msg:custom", arrived);
  };
}

export default { initialize };

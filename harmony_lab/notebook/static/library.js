// Asks the kernel for plotly.js, once per page, and hands what draws with it (drawing.js) to every plot (plot.js).
function meetingPoint() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}
const library = (globalThis[Symbol.for("harmony_lab.plotly")] ??= meetingPoint());

async function loaded(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = new Blob([await new Response(stream).text()], { type: "text/javascript" });
  const address = URL.createObjectURL(script);
  const module = await import(/* webpackIgnore: true */ address);
  URL.revokeObjectURL(address);
  return module.default;
}

function initialize({ model }) {
  if (library.arrived) return;
  model.on("msg:custom", (_, buffers) => {
    library.arrived ??= loaded(buffers[0]).then((plotly) => library.resolve((view) => render(plotly, view)));
  });
  model.send({});
}

export default { initialize };

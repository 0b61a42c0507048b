// A plotly figure.  What draws it arrives once per page, with plotly.js, through another widget (library.js): a saved
// notebook holds this script once for every figure.  The two meet in a promise.
function meetingPoint() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}
const library = (globalThis[Symbol.for("harmony_lab.plotly")] ??= meetingPoint());

export default { render: async (view) => (await library.promise)(view) };

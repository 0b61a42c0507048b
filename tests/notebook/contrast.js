// Texts below `root` that have less contrast with what is behind them than WCAG AA asks for (4.5 to 1), one line each.
// Disabled controls need none; texts on the marks of a figure are checked where their colours are made.
(root) => {
  const MARKED = ":disabled, .scatterlayer, .barlayer, text[fill=\"#000000\"], text[fill=\"#FFFFFF\"]";
  const channels = (text) => {
    const found = text.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0, 0];
    const scale = text.startsWith("color(srgb") ? 255 : 1;
    return [...found.slice(0, 3).map((value) => value * scale), found[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const luminance = (colour) =>
    [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
      const part = colour[i] / 255;
      return sum + weight * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    }, 0);
  const chain = (element) => (element ? [...chain(element.parentElement), element] : []);
  const ground = (element) =>
    chain(element).reduce((below, each) => over(channels(getComputedStyle(each).backgroundColor), below), [255, 255, 255]);
  const written = (element) =>
    element.matches("input:not([type=radio], [type=checkbox]), textarea, select")
      ? element.value
      : [...element.childNodes].map((node) => (node.nodeType === Node.TEXT_NODE ? node.textContent : "")).join("");

  const pale = [];
  for (const element of root.querySelectorAll("*")) {
    const text = written(element).trim();
    if (!text || element.closest(MARKED) || !element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    const ink = channels(element instanceof SVGElement ? style.fill : style.color);
    ink[3] *= chain(element).reduce((product, each) => product * Number(getComputedStyle(each).opacity), 1);
    const below = ground(element);
    const [dark, light] = [luminance(below), luminance(over(ink, below))].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) pale.push(`${ratio.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return pale;
}

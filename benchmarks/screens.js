/* What is wrong with a page as it is drawn: what stands out to the right, what is cut, texts of a figure over each other,
   and texts too faint (WCAG 2.2, 1.4.3: 4.5 to 1, large ones 3 to 1). A list of texts, empty where all is well. */
function flaws() {
  const out = [], wide = document.documentElement.clientWidth;
  const name = e => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""}${typeof e.className === "string" && e.className ? "." + e.className.split(" ")[0] : ""}`;
  const said = e => `"${e.textContent.trim().replace(/\s+/g, " ").slice(0, 50)}"`;
  const shown = e => e.checkVisibility({opacityProperty: true, visibilityProperty: true}) && e.getBoundingClientRect().width > 0;
  const all = [...document.querySelectorAll("body *")].filter(e => !e.closest("script, style, template, details:not([open]) > :not(summary)") && shown(e));

  for (const e of all) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!e.closest("svg, .js-plotly-plot") && box.right > wide + 1) out.push(`beyond the page: ${name(e)} ${said(e)}`);
    if (!e.closest("svg") && style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1 && e.clientWidth) out.push(`cut or scrolled: ${name(e)} ${said(e)}`);
  }

  const texts = all.filter(e => e instanceof SVGElement && e.matches("text") && e.textContent.trim() && !e.closest("defs, .modebar, .hoverlayer"));
  const figures = new Map();
  for (const text of texts) {
    const figure = text.closest(".js-plotly-plot") || text.ownerSVGElement;
    if (!figures.has(figure)) figures.set(figure, []);
    figures.get(figure).push(text);
  }
  for (const [figure, inside] of figures) {
    const frame = figure.getBoundingClientRect();
    const aslant = text => { const m = text.getScreenCTM(); return Math.abs(m.a) > 0.01 && Math.abs(m.b) > 0.01; };
    const boxes = inside.filter(text => !aslant(text)).map(text => [text, text.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => {
      if (p.left < frame.left - 1 || p.right > frame.right + 1 || p.top < frame.top - 1 || p.bottom > frame.bottom + 1) out.push(`beyond its figure: ${said(a)} of ${name(figure)}`);
      for (const [b, q] of boxes.slice(i + 1)) {
        const across = Math.min(p.right, q.right) - Math.max(p.left, q.left), down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (across > 2 && down > 3) out.push(`over each other: ${said(a)} and ${said(b)} of ${name(figure)}`);
      }
    });
  }

  const channels = colour => { const [r, g, b, a = 1] = (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number); return {rgb: [r, g, b], a}; };
  const over = (top, below) => top.rgb.map((c, i) => c * top.a + below[i] * (1 - top.a));
  const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    const stack = [];
    for (let at = e; at; at = at.parentElement) { const c = channels(getComputedStyle(at).backgroundColor); if (c.a) stack.push(c); if (c.a === 1) break; }
    return stack.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  /* A text of a figure lies on whatever is drawn under its middle: the last bar or shape there, else the page. */
  const under = text => {
    const box = text.getBoundingClientRect(), x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    const figure = text.closest(".js-plotly-plot") || text.ownerSVGElement;
    let rgb = ground(figure);
    for (const shape of figure.querySelectorAll(".bars path, .shapelayer path")) {
      const at = shape.getBoundingClientRect(), style = getComputedStyle(shape);
      if (style.fill === "none" || x < at.left || x > at.right || y < at.top || y > at.bottom) continue;
      const fill = channels(style.fill);
      rgb = over({rgb: fill.rgb, a: fill.a * Number(style.fillOpacity) * Number(style.opacity)}, rgb);
    }
    return rgb;
  };
  const faint = new Set();
  for (const e of all) {
    const own = [...e.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    /* What lies under the labels of a heat map is a picture; tests/report/test_style.py holds its colours. */
    if (!own || e.closest(".modebar, .hoverlayer, .heatmap-label, option, noscript")) continue;
    const style = getComputedStyle(e), drawn = e instanceof SVGElement;
    if (drawn && !e.closest("text")) continue;
    const below = drawn ? under(e) : ground(e), ink = channels(drawn ? style.fill : style.color);
    let opacity = drawn ? Number(style.fillOpacity) : 1;
    for (let at = e; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    const [a, b] = [light(over({rgb: ink.rgb, a: ink.a * opacity}, below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (ratio < least) faint.add(`too faint, ${ratio.toFixed(2)} to 1: ${name(e)} ${said(e)}`);
  }
  out.push(...faint);
  return [...new Set(out)];
}

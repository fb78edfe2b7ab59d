// The timeline: a canvas with a bar for each place. Zoom by wheel with Ctrl or by keys, move by drag, select by click.

const BAR_PX = 20;
const RULER_PX = 26;
const BY = { kind: "Kind", model: "Model", cost: "Cost" };

function makeTimeline(app) {
  const box = byId("timeline");
  const canvas = el("canvas", { role: "img", "aria-label": "Timeline of all runs. The tree beside it has the same places as text." });
  const legend = el("p", { class: "legend" });
  const hint = el("div", { class: "hint", hidden: true });
  const choose = el("div", { class: "choices", role: "radiogroup", "aria-label": "Colours" }, Object.entries(BY).map(([name, title]) =>
    el("button", { type: "button", role: "radio", "aria-checked": String(name === "kind"), "data-by": name, onclick: () => colour(name) }, title)));
  const button = (label, title, work) => el("button", { class: "quiet", type: "button", "aria-label": title, title, onclick: work }, label);
  const frame = el("div", { class: "frame" }, canvas, hint);
  box.append(el("div", { class: "timeline-head" }, choose, legend, el("span", { class: "spring" }),
    button("−", "Zoom out (-)", () => zoom(1 / 1.5)), button("+", "Zoom in (+)", () => zoom(1.5)), button("Fit", "Fit the whole run (0)", () => timeline.fit())), frame);

  let by = "kind";
  let drawn = { bars: [], rows: 0 };
  let isOld = true;
  let span = 1; // seconds of all
  let from = 0; // seconds at the left
  let wide = 1; // seconds that can be seen
  let top = 0; // pixels that are above
  let models = [];
  let dearest = 0;

  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const redraw = inNextFrame(draw);

  function colour(name) {
    by = name;
    for (const each of choose.children) each.setAttribute("aria-checked", String(each.dataset.by === name));
    redraw();
  }

  function compute() {
    isOld = false;
    const wasWhole = wide >= span * 0.999;
    const now = (place) => (app.isFile || place.tree.isOver ? place.tree.end : Date.now() / 1000);
    drawn = flames(app.model.trees, now);
    span = Math.max(0.001, ...app.model.trees.map((tree) => Math.max(tree.end, tree.isOver || app.isFile ? 0 : Date.now() / 1000) - tree.start));
    models = [...new Set(app.model.places.filter((place) => place.model && place.kind !== "tool").map((place) => place.model))].sort();
    dearest = app.model.places.reduce((most, place) => (place.kind === "call" || place.kind === "reply" ? Math.max(most, place.cost || 0) : most), 0);
    if (wasWhole) {
      from = 0;
      wide = span;
    }
  }

  function colourOf(place, colours) {
    if (place.isFailed) return colours.bad;
    if (by === "kind") return colours[place.kind];
    if (by === "model") {
      if (place.kind !== "call" && place.kind !== "reply" && place.kind !== "run") return colours.faint;
      return colours.series[Math.max(0, models.indexOf(place.model)) % colours.series.length];
    }
    if (place.kind !== "call" && place.kind !== "reply") return colours.faint;
    const share = dearest ? (place.cost || 0) / dearest : 0;
    return colours.heat[Math.min(4, Math.floor(share * 4.999))];
  }

  function palette() {
    const colours = { bad: theme("--bad"), faint: theme("--flame-faint"), ink: theme("--ink"), quiet: theme("--quiet"), line: theme("--line"),
      back: theme("--back"), on: theme("--on-flame"), here: theme("--accent"), series: [], heat: [] };
    for (const kind of Object.keys(KINDS)) colours[kind] = theme(`--flame-${kind}`);
    for (let at = 1; at <= 6; at += 1) colours.series.push(theme(`--series-${at}`));
    for (let at = 1; at <= 5; at += 1) colours.heat.push(theme(`--heat-${at}`));
    return colours;
  }

  function legendOf(colours) {
    const entries = by === "kind" ? ["run", "turn", "reply", "block", "call", "tool"].map((kind) => [colours[kind], kind === "reply" ? "model" : kind === "call" ? "sub-call" : kind])
      : by === "model" ? models.slice(0, 6).map((model, at) => [colours.series[at % 6], model])
        : [[colours.heat[0], money(0)], [colours.heat[4], money(dearest)]];
    fill(legend, [...entries, [colours.bad, "failed"]].map(([paint, name]) => {
      const dot = el("i", { class: "dot" });
      dot.style.background = paint;
      return el("span", {}, dot, name);
    }));
  }

  function ruler(context, width, colours) {
    const target = wide / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(target));
    const steps = target < 5 ? [1, 2, 5, 10].map((factor) => factor * power) : [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400];
    const step = steps.find((each) => each >= target * 0.999) || Math.ceil(target / 86400) * 86400;
    context.textBaseline = "middle";
    for (let mark = Math.ceil(from / step) * step; mark <= from + wide; mark += step) {
      const x = Math.round(((mark - from) / wide) * width) + 0.5;
      context.fillStyle = colours.line;
      context.fillRect(x, 0, 1, canvas.clientHeight);
      context.fillStyle = colours.quiet;
      context.fillText(mark < step / 2 ? "0" : moment(mark, step), x + 5, RULER_PX / 2);
    }
  }

  function draw() {
    if (box.hidden || !frame.clientWidth) return;
    if (isOld) compute();
    const width = frame.clientWidth;
    const height = frame.clientHeight;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    top = Math.max(0, Math.min(top, drawn.rows * BAR_PX + RULER_PX + 20 - height));
    const colours = palette();
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11.5px ${theme("--sans")}`;
    ruler(context, width, colours);
    context.save();
    context.beginPath();
    context.rect(0, RULER_PX, width, height - RULER_PX);
    context.clip();
    let row = -1;
    let right = -1; // pixels of this row that are painted: bars that are too thin to see are left out
    for (const bar of drawn.bars) {
      const y = RULER_PX + bar.y * BAR_PX - top;
      if (y + BAR_PX < RULER_PX || y > height || bar.end < from || bar.start > from + wide) continue;
      const left = Math.max(-2, ((bar.start - from) / wide) * width);
      const end = Math.min(width + 2, ((bar.end - from) / wide) * width);
      if (bar.y !== row) {
        row = bar.y;
        right = -1;
      }
      if (end <= right && end - left < 1) continue;
      right = Math.max(right, end, left + 1);
      paint(context, bar.place, left, y, Math.max(1, end - left - (end - left > 3 ? 1 : 0)), colours);
    }
    context.restore();
    legendOf(colours);
  }

  function paint(context, place, left, y, width, colours) {
    context.fillStyle = colourOf(place, colours);
    if (width > 6) {
      context.beginPath();
      context.roundRect(left, y + 1, width, BAR_PX - 3, 3);
      context.fill();
    } else context.fillRect(left, y + 1, width, BAR_PX - 3);
    if (place === app.selected) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(left, y + 1, width, BAR_PX - 3);
    }
    if (width < 34) return;
    context.fillStyle = colours.on;
    const words = `${titleOf(place)}  ${place.label}`;
    context.fillText(words.slice(0, Math.floor((width - 10) / 6.3)), left + 6, y + BAR_PX / 2);
  }

  function under(event) {
    const bounds = canvas.getBoundingClientRect();
    const time = from + ((event.clientX - bounds.left) / bounds.width) * wide;
    const y = Math.floor((event.clientY - bounds.top - RULER_PX + top) / BAR_PX);
    const slack = (wide / bounds.width) * 2;
    const found = drawn.bars.filter((bar) => bar.y === y && bar.start - slack <= time && bar.end + slack >= time);
    return found.length ? found[found.length - 1].place : null;
  }

  function zoom(factor, middle = from + wide / 2) {
    const next = Math.max(span / 100000, Math.min(span, wide / factor));
    from = Math.max(0, Math.min(span - next, middle - ((middle - from) / wide) * next));
    wide = next;
    redraw();
  }

  function hover(event) {
    const place = under(event);
    hint.hidden = !place;
    if (!place) return;
    fill(hint, el("strong", {}, titleOf(place)), el("span", {}, place.label.slice(0, 160)),
      el("span", { class: "facts" }, listed(place.model, duration(place.seconds) || statusWord(place), spent(place))));
    const bounds = frame.getBoundingClientRect();
    hint.style.left = `${Math.max(4, Math.min(event.clientX - bounds.left + 14, bounds.width - 330))}px`;
    hint.style.top = `${Math.max(4, Math.min(event.clientY - bounds.top + 16, bounds.height - 90))}px`;
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, from, top, isMoved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const x = event.clientX - drag.x;
    const y = event.clientY - drag.y;
    if (Math.abs(x) + Math.abs(y) > 4) drag.isMoved = true;
    from = Math.max(0, Math.min(span - wide, drag.from - (x / canvas.clientWidth) * wide));
    top = Math.max(0, drag.top - y);
    return redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const place = drag && !drag.isMoved ? under(event) : null;
    drag = null;
    if (place) app.select(place);
  });
  canvas.addEventListener("pointerleave", () => { hint.hidden = true; });
  canvas.addEventListener("dblclick", (event) => {
    const place = under(event);
    if (place) timeline.zoomTo(place);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const bounds = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), from + ((event.clientX - bounds.left) / bounds.width) * wide);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      from = Math.max(0, Math.min(span - wide, from + ((event.deltaX || event.deltaY) / bounds.width) * wide));
      redraw();
    } else {
      top = Math.max(0, top + event.deltaY);
      redraw();
    }
  }, { passive: false });
  new ResizeObserver(redraw).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const timeline = {
    zoom,
    fit() {
      from = 0;
      wide = span;
      top = 0;
      redraw();
    },
    zoomTo(place) {
      const start = place.start - place.tree.start;
      const length = Math.max(place.seconds || span - start, span / 100000);
      wide = Math.min(span, length * 1.1);
      from = Math.max(0, Math.min(span - wide, start - length * 0.05));
      redraw();
    },
    refresh() {
      isOld = true;
      redraw();
    },
    // Brings the selected place into view.
    show(place) {
      if (isOld && !box.hidden) compute();
      const bar = drawn.bars.find((each) => each.place === place);
      if (bar) {
        const y = bar.y * BAR_PX;
        const room = frame.clientHeight - RULER_PX - BAR_PX;
        if (y < top || y > top + room) top = Math.max(0, y - room / 2);
        if (bar.end < from || bar.start > from + wide) from = Math.max(0, Math.min(span - wide, bar.start - wide / 3));
      }
      redraw();
    },
  };
  return timeline;
}

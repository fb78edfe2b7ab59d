// Totals by model and by depth, and the calls that took or cost most.

function makeTotals(app) {
  const box = byId("totals");

  function sums(keyOf) {
    const found = new Map();
    for (const place of app.model.places) {
      if (place.kind !== "call" && place.kind !== "reply") continue;
      const key = keyOf(place);
      const sum = found.get(key) || { calls: 0, failed: 0, stored: 0, input: 0, output: 0, cost: 0, seconds: 0 };
      if (place.status === "error") sum.failed += 1;
      else if (!(place.more && place.more.isRemembered)) sum.calls += 1;
      sum.stored += (place.more && place.more.stored) || 0;
      sum.input += place.input;
      sum.output += place.output;
      sum.cost = sum.cost === null || place.cost === null ? null : sum.cost + place.cost;
      sum.seconds += place.seconds || 0;
      found.set(key, sum);
    }
    return found;
  }

  function table(title, first, rows) {
    const all = rows.reduce((sum, [, row]) => ({ calls: sum.calls + row.calls, failed: sum.failed + row.failed, input: sum.input + row.input,
      output: sum.output + row.output, cost: sum.cost === null || row.cost === null ? null : sum.cost + row.cost, seconds: sum.seconds + row.seconds }),
    { calls: 0, failed: 0, input: 0, output: 0, cost: 0, seconds: 0 });
    const line = (name, row, tag) => el("tr", {}, el(tag, tag === "th" ? { scope: "row" } : {}, name),
      [whole.format(row.calls), row.failed ? whole.format(row.failed) : "", whole.format(row.input), whole.format(row.output), money(row.cost), duration(row.seconds)].map((cell) => el("td", {}, cell)));
    return el("section", { class: "total" }, el("h2", {}, title), el("table", {},
      el("thead", {}, el("tr", {}, [first, "Calls", "Failed", "Input tokens", "Output tokens", "Cost", "Time in calls"].map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map(([name, row]) => line(name, row, "th"))),
      rows.length > 1 ? el("tfoot", {}, line("Together", all, "th")) : null));
  }

  function most(title, valueOf, show) {
    const calls = app.model.places.filter((place) => (place.kind === "call" || place.kind === "reply") && valueOf(place) > 0);
    calls.sort((one, other) => valueOf(other) - valueOf(one));
    if (!calls.length) return null;
    return el("section", { class: "total" }, el("h2", {}, title), el("ol", { class: "most" }, calls.slice(0, 8).map((call) =>
      el("li", {}, el("button", { class: "most-call", type: "button", onclick: () => {
        app.view("transcript");
        app.select(call);
      } }, el("span", { class: "measure" }, show(valueOf(call))), el("span", { class: "sub-name" }, `Run ${call.run.path}, call ${call.number}`), el("span", { class: "sub-label" }, call.label))))));
  }

  return {
    refresh() {
      if (box.hidden) return;
      const { model } = app;
      const kinds = (kind) => model.places.filter((place) => place.kind === kind);
      const blocks = new Map();
      for (const block of kinds("block")) blocks.set(block.status, (blocks.get(block.status) || 0) + 1);
      const big = (value, name) => el("div", { class: "big" }, el("strong", {}, value), el("span", {}, name));
      const roots = model.trees.flatMap((tree) => tree.roots);
      const cost = roots.reduce((sum, root) => (sum === null || root.cost === null ? null : sum + root.cost), 0);
      fill(box, el("div", { class: "totals-inner" }, el("div", { class: "bigs" },
        big(whole.format(kinds("run").length), "runs"), big(whole.format(kinds("turn").length), "turns"),
        big(whole.format(kinds("block").length), listed("blocks", [...blocks].filter(([status]) => status !== "ok").map(([status, number]) => `${number} ${status}`).join(", "))),
        big(whole.format(roots.reduce((sum, root) => sum + root.calls, 0)), "calls of models"),
        big(whole.format(kinds("tool").length), "calls of tools"), big(money(cost), "together")),
      table("By model", "Model", [...sums((place) => place.model || "not known")].sort((one, other) => other[1].calls - one[1].calls)),
      table("By depth", "Depth", [...sums((place) => (place.more && place.more.depth) || 0)].sort((one, other) => one[0] - other[0]).map(([depth, row]) => [depth === 0 ? "0, the root's own turns" : String(depth), row])),
      most("The most expensive calls", (call) => call.cost || 0, money), most("The longest calls", (call) => call.seconds || 0, duration)));
    },
  };
}

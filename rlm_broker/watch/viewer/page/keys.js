// All by keyboard. Keys that a focused control uses itself stay its own.

const KEYS = [
  ["↑ ↓  or  k j", "the place before, the next"], ["← →", "close or go up, open or go down"], ["Home End", "the first place, the last"],
  ["PgUp PgDn", "a page up, a page down"], ["Enter", "from the tree into the transcript; open a result"], ["Esc", "back to the tree; close the search"],
  ["/", "search everything"], ["e", "the next failure"], ["1 2 3", "transcript, timeline, totals"], ["+ − 0", "zoom the timeline; the whole run"],
  ["z", "zoom the timeline to the place"], ["Backspace", "the list of runs, if there is one"], ["?", "these keys"],
];

function makeKeys(app) {
  const help = byId("help");
  const query = byId("query");
  fill(help, el("h2", { id: "help-title" }, "Keys"), el("dl", {}, KEYS.map(([keys, what]) => [el("dt", {}, keys.split("  ").map((key) => (key === "or" ? " or " : el("kbd", {}, key)))), el("dd", {}, what)])),
    el("p", { class: "facts" }, "The address names the place you see: copy it to come back to it."),
    el("form", { method: "dialog" }, el("button", { class: "quiet", autofocus: true }, "Close")));

  function inQuery(event) {
    if (event.key === "Escape") {
      app.found.close();
      app.selected ? byId("tree").focus() : query.blur();
    } else if (event.key === "ArrowDown") app.found.step(1);
    else if (event.key === "ArrowUp") app.found.step(-1);
    else if (event.key === "Enter") app.found.open();
    else return false;
    return true;
  }

  const isIn = (id, target) => byId(id).contains(target);

  function inRuns(event) {
    const buttons = [...byId("runs").querySelectorAll(".run-open")];
    const at = buttons.indexOf(document.activeElement);
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!by || !buttons.length) return false;
    buttons[Math.max(0, Math.min(buttons.length - 1, at + by))].focus();
    return true;
  }

  function inFound(event) {
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (by) app.found.step(by);
    else if (event.key === "Enter") app.found.open();
    else return false;
    return true;
  }

  function anywhere(event) {
    const { key } = event;
    const { tree } = app;
    const isReading = (isIn("transcript", event.target) || isIn("totals", event.target)) && !["j", "k"].includes(key);
    const moves = { ArrowDown: () => tree.step(1), j: () => tree.step(1), ArrowUp: () => tree.step(-1), k: () => tree.step(-1),
      PageDown: () => tree.step(tree.page()), PageUp: () => tree.step(-tree.page()), Home: tree.first, End: tree.last, ArrowLeft: tree.left, ArrowRight: tree.right };
    const others = { e: tree.nextFailure, 1: () => app.view("transcript"), 2: () => app.view("timeline"), 3: () => app.view("totals"),
      "+": () => app.timeline.zoom(1.5), "=": () => app.timeline.zoom(1.5), "-": () => app.timeline.zoom(1 / 1.5), 0: () => app.timeline.fit(),
      z: () => app.selected && app.timeline.zoomTo(app.selected), Backspace: () => app.runList() };
    if (others[key]) others[key]();
    else if (key === "Escape") {
      if (app.found.isOpen) app.found.close();
      byId("tree").focus();
    } else if (key === "Enter" && event.target === byId("tree")) {
      if (!byId("transcript").hidden) byId("transcript").focus();
    } else if (moves[key] && !isReading && !(event.target.getAttribute("role") === "tab" && key.startsWith("Arrow"))) moves[key]();
    else return false;
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || document.querySelector("dialog[open]:not(#help)")) return;
    let isDone = false;
    if (event.target === query) isDone = inQuery(event);
    else if (event.target.matches("input, textarea, select")) return;
    else if (help.open) {
      if (event.key === "?") help.close();
      return;
    } else if (event.key === "?") {
      help.showModal();
      isDone = true;
    } else if (event.key === "/") {
      query.focus();
      query.select();
      isDone = true;
    } else if (!byId("runs").hidden) isDone = inRuns(event);
    else if (isIn("found", event.target) && inFound(event)) isDone = true;
    else if (event.target.matches("button, summary, a") && ["Enter", " "].includes(event.key)) return;
    else if (event.target === byId("grip") && event.key.startsWith("Arrow")) isDone = app.widen(event.key === "ArrowRight" ? 24 : event.key === "ArrowLeft" ? -24 : 0);
    else isDone = anywhere(event);
    if (isDone) event.preventDefault();
  });
  byId("help-open").addEventListener("click", () => help.showModal());
}

// The tabs: arrow keys move among them, as readers of the screen expect.
function makeTabs(app) {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  for (const [at, tab] of tabs.entries()) {
    tab.addEventListener("click", () => app.view(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: tabs.length - 1 }[event.key];
      if (!by) return;
      const next = tabs[(at + by) % tabs.length];
      app.view(next.getAttribute("aria-controls"));
      next.focus();
      event.preventDefault();
    });
  }
}

// The width of the tree, by drag or by arrow keys.
function makeGrip(app) {
  const grip = byId("grip");
  let width = 340;
  app.widen = (by) => {
    width = Math.max(180, Math.min(700, Math.min(innerWidth - 260, width + by)));
    byId("side").style.width = `${width}px`;
    grip.setAttribute("aria-valuenow", String(Math.round(width)));
    return true;
  };
  grip.addEventListener("pointerdown", (event) => {
    grip.setPointerCapture(event.pointerId);
    const move = (moved) => app.widen(moved.clientX - grip.getBoundingClientRect().left);
    grip.addEventListener("pointermove", move);
    grip.addEventListener("pointerup", () => grip.removeEventListener("pointermove", move), { once: true });
  });
}

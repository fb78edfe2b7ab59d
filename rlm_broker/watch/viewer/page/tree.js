// The tree of all places. Only rows that can be seen are in the document.

const ROW_PX = 28;
const ICONS = { run: "◆", turn: "○", reply: "✦", block: "▸", batch: "≡", call: "→", tool: "ƒ" };
const KINDS = { run: "run", turn: "turn", reply: "reply", block: "block", batch: "batch", call: "call", tool: "tool" };

function titleOf(place) {
  if (place.kind === "run") {
    const name = place.tree.number > 1 ? `Run ${place.path} of tree ${place.tree.number}` : `Run ${place.path}`;
    if (!place.branch) return name;
    const { of, after } = place.branch;
    return `${name}, after turn ${after} of ${of ? `tree ${of.number}` : "a run of another trace"}`;
  }
  if (place.kind === "turn") return `Turn ${place.number}`;
  if (place.kind === "reply") return "Model";
  if (place.kind === "block") return `Block ${place.number}`;
  if (place.kind === "batch") return `Batch of ${whole.format(place.number)}`;
  return place.kind === "tool" ? place.model || "Tool" : "Call";
}

function statusWord(place) {
  if (place.status === "running") return place.tree.isOver || app.isFile ? "did not end" : "running";
  return place.isFailed ? (place.kind === "run" && place.more && place.more.kind ? endWord(place.more.kind) : place.status) : "";
}

// Seconds of a place; of one that goes on, until now.
function secondsOf(place) {
  if (place.end !== null || app.isFile || place.tree.isOver) return place.seconds || 0;
  return Math.max(0, Date.now() / 1000 - place.start);
}

function makeTree(app) {
  const box = byId("tree");
  let rows = [];
  const lines = fixedRows(box, ROW_PX, () => rows.length, (at) => line(rows[at]));

  function line(place) {
    const isHere = place === app.selected;
    const hasBelow = place.children.length > 0;
    const siblings = place.parent ? place.parent.children.length : place.tree.roots.length;
    const row = el("div", {
      class: `row kind-${place.kind}${isHere ? " is-selected" : ""}${place.isFailed ? " is-failed" : ""}`,
      role: "treeitem", id: `place-${place.index}`, "aria-level": place.level + 1, "aria-selected": String(isHere),
      "aria-expanded": hasBelow ? String(place.isOpen) : null, "aria-setsize": siblings, "aria-posinset": place.order + 1,
      onclick: (event) => {
        if (event.target.classList.contains("twist")) tree.toggle(place);
        else app.select(place);
      },
      ondblclick: () => tree.toggle(place),
    },
    el("span", { class: "twist", "aria-hidden": "true" }, hasBelow ? (place.isOpen ? "⌄" : "›") : ""),
    el("span", { class: "icon", "aria-hidden": "true" }, ICONS[place.kind]),
    el("span", { class: "name" }, titleOf(place)),
    el("span", { class: "label" }, place.label),
    statusWord(place) ? el("span", { class: place.isFailed ? "badge bad" : "badge" }, statusWord(place)) : null,
    el("span", { class: "measure" }, duration(place.seconds)));
    row.style.paddingLeft = `${6 + Math.min(place.level, 16) * 13}px`;
    return row;
  }

  function flatten() {
    rows = [];
    const stack = [];
    for (let at = app.model.trees.length - 1; at >= 0; at -= 1) stack.push(...app.model.trees[at].roots.slice().reverse());
    while (stack.length) {
      const place = stack.pop();
      rows.push(place);
      if (place.isOpen) for (let at = place.children.length - 1; at >= 0; at -= 1) stack.push(place.children[at]);
    }
  }

  const tree = {
    draw() {
      flatten();
      lines.draw();
      if (app.selected) box.setAttribute("aria-activedescendant", `place-${app.selected.index}`);
    },
    reveal(place) {
      for (let each = place.parent; each; each = each.parent) each.isOpen = true;
      flatten();
      lines.reveal(rows.indexOf(place));
      tree.draw();
    },
    toggle(place, isOpen = !place.isOpen) {
      if (!place.children.length) return;
      place.isOpen = isOpen;
      tree.draw();
    },
    step(by) {
      const at = rows.indexOf(app.selected);
      const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
      if (next) app.select(next);
    },
    page: () => lines.page(),
    first: () => rows[0] && app.select(rows[0]),
    last: () => rows.length && app.select(rows[rows.length - 1]),
    // Left and right, as in every tree: close, then go up; open, then go down.
    left() {
      const place = app.selected;
      if (!place) return;
      if (place.isOpen && place.children.length) tree.toggle(place, false);
      else if (place.parent) app.select(place.parent);
    },
    right() {
      const place = app.selected;
      if (!place || !place.children.length) return;
      if (!place.isOpen) tree.toggle(place, true);
      else app.select(place.children[0]);
    },
    nextFailure() {
      const { places } = app.model;
      const from = app.selected ? app.selected.index : -1;
      for (let step = 1; step <= places.length; step += 1) {
        const place = places[(from + step) % places.length];
        if (place.isFailed) return app.select(place);
      }
      return say("No failure.");
    },
  };
  return tree;
}

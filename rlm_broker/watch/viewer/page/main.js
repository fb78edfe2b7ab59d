// The page: what is selected and which view is open, in step with the address.

const VIEWS = ["transcript", "timeline", "totals"];
const about = JSON.parse(decoder.decode(bytesOf(byId("about").textContent.trim())));

const app = {
  isFile: about.form === "file",
  model: makeModel(),
  store: makeStore(about.piece_bytes),
  selected: null,
  viewed: "transcript",
  runId: "",

  select(place, target) {
    app.selected = place;
    if (!app.found.isOpen) app.tree.reveal(place);
    app.transcript.show(place, target);
    app.timeline.show(place);
    app.writeAddress();
    say(listed(titleOf(place), place.label.slice(0, 100), statusWord(place)));
  },

  view(name) {
    app.viewed = VIEWS.includes(name) ? name : "transcript";
    for (const each of VIEWS) {
      byId(each).hidden = each !== app.viewed;
      const tab = byId(`tab-${each}`);
      tab.setAttribute("aria-selected", String(each === app.viewed));
      tab.tabIndex = each === app.viewed ? 0 : -1;
    }
    if (app.viewed === "transcript" && app.selected) app.transcript.show(app.selected);
    if (app.viewed === "timeline") app.timeline.refresh();
    if (app.viewed === "totals") app.totals.refresh();
    app.writeAddress();
  },

  // Draws all again after further rows have come.
  refresh() {
    const { model } = app;
    const root = model.trees.length ? model.trees[0].roots[0] : null;
    if (root) {
      const title = model.trees.length > 1 ? `${counted(model.trees.length, "run tree")}` : root.label || "The task is in the context";
      byId("title").textContent = title;
      document.title = `${title.slice(0, 60)} · rlm-broker`;
      const roots = model.trees.flatMap((tree) => tree.roots);
      const sum = (of) => roots.reduce((total, each) => total + of(each), 0);
      const cost = roots.some((each) => each.cost === null) ? null : sum((each) => each.cost);
      byId("facts").textContent = listed(app.isFile ? about.name : root.model, model.trees.length === 1 ? root.status === "running" ? statusWord(root) : endWord((root.more && root.more.kind) || root.status) : "",
        duration(sum(secondsOf)), counted(sum((each) => each.calls), "call"), `${amount(sum((each) => each.input + each.output))} tokens`, money(cost));
    }
    if (!app.selected && root) {
      const wanted = app.wanted || "";
      app.wanted = null;
      app.readAddress(wanted) || app.select(root);
    }
    if (!app.found.isOpen) app.tree.draw();
    app.transcript.refresh();
    app.timeline.refresh();
    app.totals.refresh();
    if (model.malformed) app.note(`${counted(model.malformed, "event")} could not be understood, and are left out.`);
    if (model.missed) app.note(`${counted(model.missed, "event")} came faster than they were read, and are missing.`);
  },

  notes: [],
  note(text) {
    if (app.notes.includes(text)) return;
    app.notes.push(text);
    byId("notes").hidden = false;
    fill(byId("notes"), app.notes.map((each) => el("p", {}, each)));
  },

  // The address is not written before its own place has been found.
  wanted: location.hash,
  address: "",
  writeAddress() {
    if (app.wanted !== null) return;
    const parts = new URLSearchParams();
    if (app.runId) parts.set("run", app.runId);
    if (app.selected) parts.set("at", app.model.link(app.selected));
    if (app.viewed !== "transcript") parts.set("view", app.viewed);
    if (app.found.words) parts.set("q", app.found.words);
    app.address = `#${parts.toString().replaceAll("%2F", "/").replaceAll("%3A", ":")}`;
    if (location.hash !== app.address) history.replaceState(null, "", app.address);
  },

  // Goes to the place of the address, and returns whether it is there.
  readAddress(address) {
    const parts = new URLSearchParams(address.slice(1));
    const place = app.model.find(parts.get("at") || "");
    if (!place) return false;
    const view = parts.get("view") || "transcript";
    const words = parts.get("q") || "";
    app.selected = place;
    app.view(view);
    app.select(place);
    if (words !== app.found.words) {
      byId("query").value = words;
      app.found.start(words);
      showMatches(words);
    }
    return true;
  },

  openRun(id) {
    app.runId = id;
    app.model = makeModel();
    app.store = makeStore(about.piece_bytes);
    app.selected = null;
    app.notes = [];
    opened.clear();
    recent.clear();
    app.transcript.clear();
    app.found.close();
    byId("notes").hidden = true;
    byId("title").textContent = "Reading…";
    byId("facts").textContent = "";
    byId("runs").hidden = true;
    byId("run").hidden = false;
    byId("query").parentElement.hidden = false;
    byId("back").hidden = false;
    app.tree.draw();
    app.live.follow(id);
    byId("tree").focus();
    if (new URLSearchParams(location.hash.slice(1)).get("run") === id) app.wanted = location.hash;
    else app.writeAddress();
  },

  runList() {
    if (app.isFile) return;
    app.live.leave();
    app.runId = "";
    app.wanted = null;
    app.selected = null;
    byId("runs").hidden = false;
    byId("query").parentElement.hidden = true;
    byId("run").hidden = true;
    byId("back").hidden = true;
    byId("stop").hidden = true;
    byId("notes").hidden = true;
    byId("title").textContent = "Runs on this machine";
    byId("facts").textContent = "";
    document.title = "Runs · rlm-broker";
    app.writeAddress();
    app.live.draw();
  },

  // The state of the run that is followed, as its process tells it.
  statusOf(status) {
    const goesOn = Boolean(status && (status.ended === null || status.ended === undefined));
    byId("stop").hidden = !goesOn;
    byId("stop").onclick = () => app.live.askToStop(status.id, status.question);
  },
};

app.tree = makeTree(app);
app.transcript = makeTranscript(app);
app.timeline = makeTimeline(app);
app.totals = makeTotals(app);
app.found = makeFound(app);
app.live = app.isFile ? null : makeLive(app);
makeKeys(app);
makeTabs(app);
makeGrip(app);

let typing = 0;
byId("query").addEventListener("input", () => {
  clearTimeout(typing);
  const { value } = byId("query");
  typing = setTimeout(() => {
    app.found.start(value);
    app.writeAddress();
  }, 180);
});
addEventListener("hashchange", () => {
  if (location.hash === app.address) return;
  if (!app.isFile && takeKey()) return;
  const run = new URLSearchParams(location.hash.slice(1)).get("run") || "";
  if (!app.isFile && run !== app.runId) run ? app.openRun(run) : app.runList();
  else app.readAddress(location.hash);
});
byId("back").addEventListener("click", () => app.runList());

// The key of the link goes out of the address, where a reader might copy it.
function takeKey() {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("key")) return false;
  app.live.useKey(parts.get("key"));
  parts.delete("key");
  history.replaceState(null, "", `#${parts}`);
  app.wanted = location.hash;
  return true;
}

app.view(new URLSearchParams(location.hash.slice(1)).get("view") || "transcript");
if (app.isFile) {
  app.store.setSize(about.bytes);
  for (const note of about.notes) app.note(note);
  let isDrawn = false;
  readRows(app.model.take, () => {
    // The tree is usable while further rows are read. Where the address leads may come late.
    if (!isDrawn && !new URLSearchParams(location.hash.slice(1)).has("at")) app.refresh();
    if (!isDrawn) performance.mark("usable");
    isDrawn = true;
  }).then(() => {
    app.refresh();
    if (app.model.trees.some((tree) => !tree.isOver)) app.note("The trace ends before its run did.");
    document.documentElement.dataset.ready = String(app.model.rows);
    if (document.activeElement === document.body) byId("tree").focus({ preventScroll: true });
  });
} else {
  takeKey();
  const run = new URLSearchParams(location.hash.slice(1)).get("run");
  if (run) app.openRun(run);
  else app.runList();
  app.live.poll();
}

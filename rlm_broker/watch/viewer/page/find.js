// Search over all texts: piece after piece, with matches that reach over the end of a piece, one result for each text.

const MOST_RESULTS = 2000;

const channel = new MessageChannel();
const resumed = [];
channel.port1.onmessage = () => resumed.shift()();
const nextTask = () => new Promise((done) => {
  resumed.push(done);
  channel.port2.postMessage(null);
});

const literal = (words) => words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const pattern = (words) => new RegExp(literal(words), "gi");

function ownerAt(model, offset) {
  let low = 0;
  let high = model.offsets.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (model.offsets[middle] <= offset) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Pieces of an output or a reply are found in the whole of it, once it is there.
const isInAnother = (name, texts) => (name.startsWith("printed") && texts.stdout) || (name === "reply so far" && texts.response);

// Calls `onProgress(results, share, isOver)` now and then, until `isWanted()` says no.
async function search(app, words, isWanted, onProgress) {
  const { model, store } = app;
  const wanted = pattern(words);
  const results = [];
  for (const place of model.places) {
    if (place.kind === "tool" && place.model.toLowerCase().includes(words.toLowerCase())) {
      results.push({ place, name: "name", count: 1, offset: 0, before: "", match: place.model, after: "" });
    }
  }
  const number = Math.ceil(store.size / store.pieceBytes);
  const most = 4 * words.length;
  let kept = new Uint8Array(0);
  let last = null;
  let began = performance.now();
  for (let at = 0; at < number && results.length < MOST_RESULTS; at += 1) {
    const bytes = await store.passing(at);
    if (!isWanted()) return;
    const start = at * store.pieceBytes - kept.length;
    const text = decoder.decode(kept.length ? joined([kept, bytes]) : bytes);
    const isAscii = text.length === kept.length + bytes.length;
    let place = 0; // character and byte of the last match
    let byte = 0;
    wanted.lastIndex = 0;
    for (let match = wanted.exec(text); match && results.length < MOST_RESULTS; match = wanted.exec(text)) {
      byte = isAscii ? match.index : byte + encoder.encode(text.slice(place, match.index)).length;
      place = match.index;
      const offset = start + byte;
      const end = offset + (isAscii ? match[0].length : encoder.encode(match[0]).length);
      if (end <= start + kept.length) continue; // found with the piece before
      const owner = ownerAt(model, offset);
      if (end > model.ends[owner] || offset < model.offsets[owner]) continue; // it begins in one text and ends in another
      if (isInAnother(model.names[owner], model.owners[owner].texts || {})) continue;
      if (last && last.owner === owner) {
        last.count += 1;
        continue;
      }
      last = {
        owner, place: model.owners[owner], name: model.names[owner], count: 1, offset: offset - model.offsets[owner],
        before: text.slice(Math.max(0, match.index - Math.min(22, byte), match.index - offset + model.offsets[owner]), match.index),
        match: match[0], after: text.slice(match.index + match[0].length, match.index + match[0].length + 90),
      };
      results.push(last);
    }
    let from = Math.max(0, bytes.length - most);
    while (from < bytes.length && (bytes[from] & 0xc0) === 0x80) from += 1;
    kept = bytes.slice(from);
    if (performance.now() - began > 14) {
      onProgress(results, at / number, false);
      await nextTask();
      if (!isWanted()) return;
      began = performance.now();
    }
  }
  onProgress(results, 1, true);
}

const WHERE = { prompt: "shown to the model", response: "reply", reply: "reply", code: "code", stdout: "output",
  stderr: "errors", question: "question", answer: "answer", final_answer: "answer given", draft: "best answer so far", error: "error", printed: "output", retry: "failed attempt", system: "system prompt", metadata: "settings" };

function makeFound(app) {
  const list = byId("found-list");
  const facts = byId("found-facts");
  const query = byId("query");
  let results = [];
  let at = -1;
  let turn = 0;
  const rows = fixedRows(list, 58, () => results.length, (index) => {
    const result = results[index];
    return el("div", {
      class: index === at ? "result is-selected" : "result", role: "option", id: `result-${index}`,
      "aria-selected": String(index === at), onclick: () => found.open(index),
    },
    el("p", { class: "result-where" }, el("span", { class: "result-place" }, titleOf(result.place)),
      el("span", {}, WHERE[result.name.replace(/ \d+$/, "")] || result.name), el("span", {}, result.count > 1 ? `${whole.format(result.count)} times` : "")),
    el("p", { class: "result-text" }, result.before.replace(/\s+/g, " "), el("mark", {}, result.match),
      result.after.replace(/\s+/g, " ")));
  });

  const found = {
    words: "",
    get isOpen() { return !byId("found").hidden; },
    start(words) {
      turn += 1;
      const mine = turn;
      found.words = words;
      results = [];
      at = -1;
      byId("found").hidden = !words;
      byId("tree").hidden = Boolean(words);
      list.scrollTop = 0;
      if (!words) {
        showMatches("");
        app.tree.draw();
        return;
      }
      facts.textContent = "Searching…";
      search(app, words, () => mine === turn, (all, share, isOver) => {
        results = all;
        const many = all.length >= MOST_RESULTS ? `${whole.format(MOST_RESULTS)} texts or more` : counted(all.length, "text");
        facts.textContent = isOver ? (all.length ? `Found in ${many}.` : "Found in no text.") : `${many}, ${Math.round(share * 100)}% read…`;
        document.documentElement.dataset.searched = isOver ? words : "";
        rows.draw();
      });
    },
    step(by) {
      if (!results.length) return;
      at = Math.max(0, Math.min(results.length - 1, at + by));
      rows.reveal(at);
      rows.draw();
      list.setAttribute("aria-activedescendant", `result-${at}`);
      query.setAttribute("aria-activedescendant", `result-${at}`);
      const result = results[at];
      say(`${titleOf(result.place)}: ${result.before}${result.match}${result.after}`.slice(0, 200));
    },
    open(index = Math.max(0, at)) {
      const result = results[index];
      if (!result) return;
      at = index;
      rows.draw();
      showMatches(found.words);
      app.view("transcript");
      app.select(result.place, { name: result.name, offset: result.offset });
    },
    close() {
      query.value = "";
      found.start("");
    },
  };
  return found;
}

// The transcript of one run: what the model was shown, what it replied, what its code did.

const CALLS_AT_FIRST = 12;

function makeTranscript(app) {
  const box = byId("transcript");
  const scroller = makeScroller(box);
  let run = null;
  let items = [];
  let byPlace = new Map(); // place -> index of its item

  function build() {
    items = [];
    byPlace = new Map();
    const push = (key, height, places, make) => {
      const version = places.reduce((sum, place) => sum + place.version + (opened.get(`call ${place.index}`) ? 0.5 : 0), 0) + places.length;
      for (const place of places) if (!byPlace.has(place)) byPlace.set(place, items.length);
      items.push({ key, height, version, build: make, isHere: () => places.includes(app.selected) });
    };
    push("head", 150, [run], () => runHead(app, run));
    for (const turn of run.children) {
      if (turn.kind === "turn") ofTurn(turn, push);
      else ofBlockChild([turn], push);
    }
    push("end", 110, [], () => runEnd(app, run));
    items[items.length - 1].version = run.version;
  }

  function ofTurn(turn, push) {
    push(`head ${turn.index}`, 52, [turn], () => turnHead(app, turn));
    const replies = turn.children.filter((child) => child.kind === "reply");
    const last = replies[replies.length - 1];
    for (const reply of replies) {
      if (reply.texts && (reply.texts.prompt || reply.texts.system)) push(`shown ${reply.index}`, 180, [], () => shownToModel(app, reply));
      if (reply !== last) push(`reply ${reply.index}`, 120, [reply], () => modelReply(app, null, reply));
    }
    if (last) push(`reply ${last.index}`, 120, [last], () => modelReply(app, turn, last));
    for (const block of turn.children) {
      if (block.kind === "reply") continue;
      if (block.kind !== "block") {
        ofBlockChild([block], push);
        continue;
      }
      push(`block ${block.index}`, 220, [block], () => blockCard(app, block));
      ofCalls(block, push);
    }
  }

  // Equal calls are one item: the same kind, prompt, reply and error.
  function groups(places) {
    const found = new Map();
    for (const place of places) {
      const { prompt, question, response, answer, error, arguments: given, result } = place.texts || {};
      const of = place.kind === "batch" || place.status === "running" ? place.index
        : `${place.kind} ${place.model} ${[prompt, question, response, answer, error, given, result].map((ref) => (ref ? ref[0] : "")).join(" ")}`;
      if (found.has(of)) found.get(of).push(place);
      else found.set(of, [place]);
    }
    return [...found.values()];
  }

  function ofCalls(parent, push) {
    const all = groups(parent.children);
    const isAll = opened.get(`all ${parent.index}`) || all.length <= CALLS_AT_FIRST + 3;
    for (const group of isAll ? all : all.slice(0, CALLS_AT_FIRST)) ofBlockChild(group, push);
    if (isAll) return;
    const rest = all.slice(CALLS_AT_FIRST).flat();
    push(`rest ${parent.index}`, 44, rest.filter((place) => place.kind !== "batch"), () => el("button", { class: "more all-calls", type: "button", onclick: () => {
      opened.set(`all ${parent.index}`, true);
      transcript.refresh();
    } }, `Show ${whole.format(rest.length)} more`));
  }

  function ofBlockChild(group, push) {
    const [place] = group;
    if (place.kind === "run") push(`run ${place.index}`, 44, group, () => childRun(app, group));
    else if (place.kind === "batch") {
      push(`batch ${place.index}`, 40, group, () => batchHead(app, place));
      ofCalls(place, push);
    } else push(`call ${place.index}`, 44, group, () => subCall(app, group));
  }

  // Brings the match of a search into view once its text has been drawn.
  function showMatch(key, words, tries = 20) {
    const node = scroller.nodeOf(key);
    const found = node && [...(CSS.highlights && CSS.highlights.get("found")) || []].find((range) => node.contains(range.startContainer));
    if (!found) {
      if (tries) setTimeout(() => showMatch(key, words, tries - 1), 40);
      return;
    }
    const top = found.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (top < 40 || top > box.clientHeight - 60) scroller.nudge(top - box.clientHeight / 3);
  }

  const USES = { prompt: ["prompt", PROMPT_FIRST], response: ["prompt", 6000], reply: ["reply", 16000], code: ["of-code", CODE_FIRST],
    stdout: ["output", OUTPUT_FIRST], stderr: ["bad", OUTPUT_FIRST], error: ["bad", OUTPUT_FIRST], question: ["question", 1200],
    answer: ["answer", 6000], system: ["mono", 6000], metadata: ["mono", 6000], arguments: ["mono", 6000], result: ["mono", 6000] };

  const transcript = {
    get run() { return run; },
    clear() {
      run = null;
      items = [];
      byPlace = new Map();
      scroller.set(items, true);
    },
    refresh() {
      if (!run || box.hidden) return;
      build();
      scroller.set(items, false);
    },
    // Shows the run of a place, and the place in it. `target` is a text of the place, and the offset in it.
    show(place, target) {
      const isOther = run !== place.run;
      run = place.run;
      if (!run) return;
      if (target && target.name) {
        const ref = place.texts && place.texts[target.name];
        const isOfTurn = place.kind === "reply" && target.name === "response";
        const [use, first] = USES[isOfTurn ? "reply" : target.name] || ["mono", 6000];
        if (ref) openAt(ref, use, place.kind === "call" && use === "prompt" ? 6000 : first, target.offset);
        if (target.name === "system") opened.set(`fold system ${place.index}`, true);
        if (target.name === "metadata") opened.set(`fold settings ${place.index}`, true);
      }
      if ((place.kind === "call" || place.kind === "tool") && !(target && target.isStill)) opened.set(`call ${place.index}`, true);
      build();
      let index = byPlace.get(place);
      if (items[index] && items[index].key.startsWith("rest ")) {
        for (let each = place.parent; each && each.kind !== "turn"; each = each.parent) opened.set(`all ${each.index}`, true);
        build();
        index = byPlace.get(place);
      }
      if (target && target.name === "prompt" && place.kind === "reply") index = items.findIndex((item) => item.key === `shown ${place.index}`);
      if (target && target.name === "answer") index = items.length - 1;
      const key = index >= 0 && items[index] ? items[index].key : "";
      scroller.set(items, isOther);
      if (!(target && target.isStill) && key) scroller.reveal(index);
      else scroller.draw();
      if (target && target.name && key) showMatch(key, target);
    },
    box,
  };
  return transcript;
}

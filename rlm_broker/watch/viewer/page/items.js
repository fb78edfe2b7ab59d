// What stands in a transcript: one function for each kind of item.

const PROMPT_FIRST = 900;
const OUTPUT_FIRST = 2400;
const CODE_FIRST = 8000;

const chip = (text, kind = "") => (text ? el("span", { class: `chip ${kind}` }, text) : null);

function spent(place) {
  if (!place.calls) return "";
  return listed(`${amount(place.input)} → ${amount(place.output)} tokens`, money(place.cost));
}

function part(title, ...content) {
  return el("section", { class: "part" }, el("p", { class: "part-title" }, title), content);
}

function folded(key, title, build) {
  const details = el("details", { class: "fold", ontoggle: () => {
    if (details.open && details.children.length === 1) details.append(build());
    opened.set(`fold ${key}`, details.open);
  } }, el("summary", {}, title));
  if (opened.get(`fold ${key}`)) details.open = true;
  return details;
}

function runHead(app, run) {
  const texts = run.texts || {};
  const more = run.more || {};
  const state = run.status === "running" ? statusWord(run) : run.status === "error" ? endWord(more.kind || "failed") : run.status;
  return el("header", { class: "run-head" },
    el("p", { class: "over" }, titleOf(run), run.parent ? el("button", { class: "link", type: "button", onclick: () => app.select(run.parent) },
      `asked by ${titleOf(run.parent).toLowerCase()} of run ${run.parent.run.path}`) : null),
    texts.question ? textBox(app, texts.question, { use: "question", first: 1200 }) : el("p", { class: "question" }, "The task is in the context."),
    el("p", { class: "chips" }, chip(state, run.isFailed ? "bad" : run.status === "running" ? "live" : "good"), chip(run.model),
      chip(duration(run.seconds)), chip(run.calls ? counted(run.calls, "call") : ""), chip(spent(run)),
      chip(more.limit ? `limit: ${more.limit}` : "", "bad"), chip(more.level ? `isolation ${more.level}` : "")),
    texts.metadata ? folded(`settings ${run.index}`, "Models, limits and context", () => textBox(app, texts.metadata, { use: "mono", first: 6000 })) : null);
}

function turnHead(app, turn) {
  const reply = turn.children.find((child) => child.kind === "reply");
  return el("h2", { class: "turn-head" }, titleOf(turn), el("span", { class: "facts" },
    listed(reply && reply.model, duration(turn.seconds), reply && spent(reply))));
}

function shownToModel(app, reply) {
  const { system, prompt } = reply.texts;
  return el("div", { class: "card quiet-card" },
    system ? folded(`system ${reply.index}`, `System prompt, ${size(system[1])}`, () => textBox(app, system, { use: "mono", first: 6000 })) : null,
    prompt ? part("Shown to the model", textBox(app, prompt, { use: "prompt", first: PROMPT_FIRST })) : null);
}

// The reply. Code that ran is shown below it, with its output, so here stands only a line that leads to it.
function modelReply(app, turn, reply) {
  const ref = (turn && turn.texts && turn.texts.reply) || (reply && reply.texts && reply.texts.response);
  const failed = reply && reply.texts && reply.texts.error;
  const blocks = turn ? turn.children.filter((child) => child.kind === "block" && child.texts && child.texts.code) : [];
  const body = [];
  if (ref) body.push(textBox(app, ref, { use: "reply", first: 16000, draw: (text) => replyParts(app, text, blocks) }));
  else if (reply && reply.more && reply.more.pieces) body.push(pieces(app, reply.more.pieces, "reply"));
  else if (!failed) body.push(el("p", { class: "waiting" }, reply && reply.status === "running" ? `The model is ${statusWord(reply) === "running" ? "writing" : "not done"}…` : "No reply."));
  if (failed) body.push(part("The call failed", textBox(app, failed, { use: "bad", first: OUTPUT_FIRST })));
  if (turn && turn.texts && turn.texts["not run"]) body.push(part("Not run", textBox(app, turn.texts["not run"], { use: "prompt", first: PROMPT_FIRST })));
  for (let at = 1; reply && reply.more && at <= (reply.more.retries || 0); at += 1) {
    body.push(part(`Attempt ${at} failed`, textBox(app, reply.texts[`retry ${at}`] || [0, 0], { use: "bad", first: OUTPUT_FIRST })));
  }
  return el("div", { class: "card reply-card" }, el("h2", {}, "Reply", reply && reply.more && reply.more.stored ? chip("from a cache or recording") : null, reply && reply.more && reply.more.isRemembered ? chip("from memory") : null), body);
}

function pieces(app, refs, use) {
  const last = refs[refs.length - 1];
  const first = refs[0];
  const isWhole = refs.every((ref, at) => at === 0 || ref[0] === refs[at - 1][0] + refs[at - 1][1]);
  if (isWhole) return textBox(app, [first[0], last[0] + last[1] - first[0]], { use, first: OUTPUT_FIRST });
  return el("div", { class: "text" }, refs.slice(-200).map((ref) => textBox(app, ref, { use, first: OUTPUT_FIRST })));
}

function replyParts(app, text, blocks) {
  const drawn = [];
  const pattern = /^[ \t]*(`{3,}|~{3,})([^\n`]*)\n([\s\S]*?)(?:^[ \t]*\1[ \t]*$|$(?![\s\S]))/gm;
  let from = 0;
  let number = 0;
  const prose = (words) => {
    if (words.trim()) drawn.push(el("pre", { class: "prose" }, words.trim()));
  };
  for (const match of text.matchAll(pattern)) {
    prose(text.slice(from, match.index));
    from = match.index + match[0].length;
    const code = match[3];
    const block = /^(repl|python)/.test(match[2].trim()) ? blocks[number] : undefined;
    if (block && encoder.encode(code.trim()).length <= block.texts.code[1] + 2) {
      number += 1;
      drawn.push(el("button", { class: "ran", type: "button", onclick: () => app.select(block) },
        `${counted(code.trim().split("\n").length, "line")} of code ran as block ${block.number}`));
    } else drawn.push(el("pre", { class: "fence" }, code.replace(/\n$/, "")));
  }
  prose(text.slice(from));
  return drawn;
}

// What a kill has left of the variables.
function leftBy(undone) {
  if (!undone) return "all variables are lost";
  return undone === 1 ? "variables are as before it" : `variables are as they were ${undone} blocks ago`;
}

function blockCard(app, block) {
  const texts = block.texts || {};
  const more = block.more || {};
  const word = { ok: "ran", error: "raised", exited: "exited", interrupted: "interrupted", killed: "killed" }[block.status] || statusWord(block);
  const bits = [];
  if (texts.code) bits.push(textBox(app, texts.code, { use: "of-code", first: CODE_FIRST, draw: (code) => [codeBox(code)] }));
  if (texts.stdout) bits.push(part("Output", textBox(app, texts.stdout, { use: "output", first: OUTPUT_FIRST })));
  else if (more.printed) bits.push(part("Output", pieces(app, more.printed, "output")));
  if (texts.stderr) bits.push(part("Errors", textBox(app, texts.stderr, { use: "bad", first: OUTPUT_FIRST })));
  else if (texts.error) bits.push(part("Error", textBox(app, texts.error, { use: "bad", first: OUTPUT_FIRST })));
  if (texts.where) bits.push(part("Where it was", textBox(app, texts.where, { use: "prompt", first: OUTPUT_FIRST })));
  if (texts.stack) bits.push(folded(`stack ${block.index}`, "Stack", () => textBox(app, texts.stack, { use: "mono", first: OUTPUT_FIRST })));
  if (texts.final_answer) bits.push(part("Answer given", textBox(app, texts.final_answer, { use: "answer", first: OUTPUT_FIRST })));
  else if (texts.draft) bits.push(folded(`draft ${block.index}`, "Best answer so far", () => textBox(app, texts.draft, { use: "prompt", first: OUTPUT_FIRST })));
  if (texts.displays) bits.push(folded(`displays ${block.index}`, "Displays, by their sizes", () => textBox(app, texts.displays, { use: "mono", first: OUTPUT_FIRST })));
  return el("div", { class: `card block-card${block.isFailed ? " is-failed" : ""}` },
    el("h2", {}, titleOf(block), chip(word, block.isFailed ? "bad" : block.status === "running" ? "live" : ""), chip(more.limit, "bad"),
      chip(block.status === "killed" ? leftBy(more.undone) : ""),
      el("span", { class: "facts" }, listed(duration(block.seconds), block.calls ? counted(block.calls, "sub-call") : "", spent(block)))), bits);
}

function batchHead(app, batch) {
  const done = batch.children.filter((call) => call.status !== "running").length;
  return el("p", { class: "batch-head" }, `Batch of ${counted(batch.number, "call")}`,
    el("span", { class: "facts" }, listed(done < batch.number ? `${done} ended` : "", duration(batch.seconds), spent(batch),
      batch.errors ? `${batch.errors} failed` : "")));
}

// One sub-call, or several with the same prompt and the same reply.
function subCall(app, places) {
  const [call] = places;
  const texts = call.texts || {};
  const isOpen = opened.get(`call ${call.index}`) || false;
  const isTool = call.kind === "tool";
  const tokens = places.reduce((sum, each) => sum + each.output, 0);
  const head = el("button", { class: "sub-head", type: "button", "aria-expanded": String(isOpen), onclick: () => {
    opened.set(`call ${call.index}`, !isOpen);
    app.select(call, { isStill: true });
  } },
  el("span", { class: `icon kind-${call.kind}`, "aria-hidden": "true" }, ICONS[call.kind]),
  el("span", { class: "sub-name" }, isTool ? call.model : call.model || "model"),
  places.length > 1 ? el("span", { class: "chip times" }, `× ${whole.format(places.length)}`) : null,
  el("span", { class: "sub-label" }, call.label),
  el("span", { class: call.status === "error" ? "sub-answer bad-text" : "sub-answer" },
    call.status === "running" ? statusWord(call) : call.status === "error" ? "failed" : (call.more && call.more.answer) || ""),
  el("span", { class: "measure" }, listed(places.every((each) => each.more && each.more.isRemembered) ? "from memory" : duration(call.seconds), tokens ? `${amount(tokens)} tok` : "")));
  const body = !isOpen ? null : el("div", { class: "sub-body" },
    places.length > 1 ? el("p", { class: "facts" }, `${whole.format(places.length)} equal calls: ${places.slice(0, 12).map((each) => each.number).join(", ")}${places.length > 12 ? "…" : ""}`) : null,
    texts.system ? part("System prompt", textBox(app, texts.system, { use: "mono", first: OUTPUT_FIRST })) : null,
    texts.prompt ? part("Prompt", textBox(app, texts.prompt, { use: "prompt", first: 6000 })) : null,
    texts.arguments ? part("Arguments", textBox(app, texts.arguments, { use: "mono", first: 6000 })) : null,
    texts.response ? part("Reply", textBox(app, texts.response, { use: "prompt", first: 6000 })) : null,
    !texts.response && call.more && call.more.pieces ? part("Reply so far", pieces(app, call.more.pieces, "prompt")) : null,
    texts.result ? part("Result", textBox(app, texts.result, { use: "mono", first: 6000 })) : null,
    texts.error ? part("Error", textBox(app, texts.error, { use: "bad", first: 6000 })) : null,
    el("p", { class: "facts" }, listed(`${isTool ? "tool call" : "call"} ${call.number}`, call.model, spent(call), duration(call.seconds))));
  return el("div", { class: `sub${call.parent && call.parent.kind === "batch" ? " in-batch" : ""}` }, head, body);
}

function childRun(app, places) {
  const [run] = places;
  return el("div", { class: "sub" }, el("button", { class: "sub-head", type: "button", onclick: () => app.select(run) },
    el("span", { class: "icon kind-run", "aria-hidden": "true" }, ICONS.run),
    el("span", { class: "sub-name" }, titleOf(run)), places.length > 1 ? el("span", { class: "chip times" }, `× ${whole.format(places.length)}`) : null,
    el("span", { class: "sub-label" }, run.label),
    el("span", { class: run.isFailed ? "sub-answer bad-text" : "sub-answer" }, statusWord(run) || (run.more && run.more.answer) || ""),
    el("span", { class: "measure" }, listed(duration(run.seconds), spent(run)))));
}

function runEnd(app, run) {
  const texts = run.texts || {};
  if (texts.error) {
    return el("div", { class: "card is-failed" }, el("h2", {}, "The run failed", chip(run.more && run.more.limit, "bad")),
      textBox(app, texts.error, { use: "bad", first: OUTPUT_FIRST }),
      texts["partial answer"] ? part("Best answer so far", textBox(app, texts["partial answer"], { use: "answer", first: 6000 })) : null);
  }
  if (texts.answer) return el("div", { class: "card answer-card" }, el("h2", {}, run.status === "stopped" ? "Answer, when it was stopped" : "Answer"), textBox(app, texts.answer, { use: "answer", first: 6000 }));
  return el("p", { class: "waiting" }, run.status === "running" ? (statusWord(run) === "running" ? "The run goes on…" : "The trace ends before this run did.") : "No answer.");
}

// Texts of any length as text: a part at first, more when asked for. Code has line numbers and colours.

const STEP_BYTES = 48 << 10;
const opened = new Map(); // "offset:bytes" of a text and its use -> part that is shown: [from, to]

const MOST_RECENT = 60;
const recent = new Map(); // the same with its part -> text: what is drawn again while a run goes on does not flicker

const WORDS = new Set(("and as assert async await break class continue def del elif else except finally for from global if " +
  "import in is lambda nonlocal not or pass raise return try while with yield match case None True False").split(" "));
const TOKENS = /(#[^\n]*)|((?:\b[rbfu]{1,2})?(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

function coloured(code) {
  const parts = [];
  let from = 0;
  const push = (text, kind) => {
    if (text) parts.push(kind ? el("span", { class: kind }, text) : text);
  };
  for (const match of code.matchAll(TOKENS)) {
    const kind = match[1] ? "c" : match[2] ? "s" : match[3] ? "m" : WORDS.has(match[4]) ? "k" : code[match.index + match[0].length] === "(" ? "f" : "";
    if (!kind) continue;
    push(code.slice(from, match.index), "");
    push(match[0], kind);
    from = match.index + match[0].length;
  }
  push(code.slice(from), "");
  return parts;
}

function codeBox(code) {
  const numbers = Array.from({ length: code.split("\n").length }, (_, at) => at + 1).join("\n");
  return el("div", { class: "code" }, el("pre", { class: "numbers", "aria-hidden": "true" }, numbers),
    el("pre", { class: "source", tabindex: "0", "aria-label": "Code" }, coloured(code)));
}

// Texts are unpacked one after the other, some milliseconds a frame, the latest first. Those that were scrolled away in
// the meantime are not: so fast scrolling stays smooth.
const UNPACK_MS = 8;
const toUnpack = [];
let isUnpacking = false;
const nextFrame = () => new Promise((done) => requestAnimationFrame(done));

async function unpackSoon(box, work) {
  toUnpack.push([box, work]);
  if (isUnpacking) return;
  isUnpacking = true;
  await nextFrame();
  let began = performance.now();
  while (toUnpack.length) {
    const [wanted, unpackIt] = toUnpack.pop();
    if (!wanted.isConnected) continue;
    await unpackIt().catch(() => wanted.append("This text cannot be read."));
    if (performance.now() - began > UNPACK_MS) {
      await nextFrame();
      began = performance.now();
    }
  }
  isUnpacking = false;
}

// A text that is unpacked when its element is made. `options`: use, first (bytes at first), draw (of the loaded text).
function textBox(app, ref, options) {
  const key = `${ref[0]}:${ref[1]}:${options.use}`;
  const box = el("div", { class: `text ${options.use}` });
  const [, length] = ref;
  box.style.minHeight = `${Math.min(8, 1 + length / 90) * 20}px`;

  function show() {
    const [from, to] = opened.get(key) || [0, Math.min(length, options.first)];
    const name = `${key}:${from}:${to}`;
    if (recent.has(name)) {
      draw(recent.get(name), from, to);
      return;
    }
    unpackSoon(box, async () => {
      const text = await app.store.text(ref, from, to - from);
      if (text.length < STEP_BYTES) recent.set(name, text);
      if (recent.size > MOST_RECENT) recent.delete(recent.keys().next().value);
      draw(text, from, to);
    });
  }

  function draw(text, from, to) {
    const drawn = options.draw ? options.draw(text) : [el("pre", {}, text)];
    const more = [];
    const step = (label, part) => el("button", { class: "more", type: "button", onclick: () => {
      opened.set(key, part);
      show();
    } }, label);
    if (from > 0) drawn.unshift(step(`Show what is before: ${size(from)}`, [Math.max(0, from - STEP_BYTES), to]));
    if (to < length) more.push(step(length - to > STEP_BYTES ? `Show more: ${size(length - to)} are left` : `Show all ${size(length)}`, [from, Math.min(length, to + STEP_BYTES)]));
    if (to > options.first && from === 0 && length > options.first) more.push(step("Show less", [0, options.first]));
    fill(box, drawn, more.length ? el("p", { class: "mores" }, more) : null);
    box.style.minHeight = "";
    markMatches();
  }
  show();
  return box;
}

// Widens the part that is shown of a text so that a byte of it can be seen.
function openAt(ref, use, first, offset) {
  if (offset + 200 < first) return;
  opened.set(`${ref[0]}:${ref[1]}:${use}`, [offset < STEP_BYTES ? 0 : offset - 2000, Math.min(ref[1], offset + 6000)]);
}

// Matches of the search in what is shown, as a highlight of the browser's: no element is made for them.
let marked = null;
const markMatches = inNextFrame(() => {
  if (!self.CSS || !CSS.highlights) return;
  CSS.highlights.delete("found");
  if (!marked) return;
  const ranges = [];
  const walker = document.createTreeWalker(byId("transcript"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && ranges.length < 2000; node = walker.nextNode()) {
    for (const match of node.data.matchAll(marked)) {
      const range = new Range();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
});

function showMatches(words) {
  marked = words ? pattern(words) : null;
  markMatches();
}

// A list of items of any height: only those near the part that can be seen are in the document. What the reader looks at
// stays where it is while heights above it become known.

function makeScroller(box) {
  const inner = el("div", { class: "scroller-inner" });
  box.append(inner);
  let items = [];
  let tops = new Float64Array(1);
  let shown = new Map(); // key -> { node, version }
  let heights = new Map(); // key -> pixels
  let anchor = { key: "", offset: 0 };
  let placed = -1; // where this list has scrolled to by itself

  const observer = new ResizeObserver((entries) => {
    let isChanged = false;
    for (const entry of entries) {
      const key = entry.target.dataset.key;
      const height = entry.borderBoxSize[0].blockSize;
      if (height && heights.get(key) !== height) {
        heights.set(key, height);
        isChanged = true;
      }
    }
    if (isChanged) {
      measure();
      hold();
      draw();
    }
  });

  function measure() {
    tops = new Float64Array(items.length + 1);
    for (let at = 0; at < items.length; at += 1) tops[at + 1] = tops[at] + (heights.get(items[at].key) || items[at].height);
    inner.style.height = `${tops[items.length]}px`;
  }

  function at(pixel) {
    let low = 0;
    let high = Math.max(0, items.length - 1);
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tops[middle] <= pixel) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  const indexOf = (key) => items.findIndex((item) => item.key === key);

  // Scrolls so that the anchor is where it was.
  function hold() {
    const index = indexOf(anchor.key);
    if (index < 0) return;
    const top = Math.max(0, Math.min(tops[index] + anchor.offset, tops[items.length] - box.clientHeight));
    if (Math.abs(box.scrollTop - top) > 0.5) {
      box.scrollTop = top;
      placed = box.scrollTop;
    }
  }

  function draw() {
    const from = at(box.scrollTop - 300);
    const to = at(box.scrollTop + box.clientHeight + 300);
    const next = new Map();
    for (let index = from; index <= to && index < items.length; index += 1) {
      const item = items[index];
      let here = shown.get(item.key);
      if (!here || here.version !== item.version) {
        if (here) {
          observer.unobserve(here.node);
          here.node.remove();
        }
        here = { node: el("div", { class: "item", "data-key": item.key }, item.build()), version: item.version };
        inner.append(here.node);
        observer.observe(here.node);
      }
      here.node.classList.toggle("is-here", item.isHere());
      here.node.style.transform = `translateY(${tops[index]}px)`;
      next.set(item.key, here);
    }
    for (const [key, here] of shown) {
      if (next.get(key) !== here && !next.has(key)) {
        observer.unobserve(here.node);
        here.node.remove();
      }
    }
    shown = next;
  }

  box.addEventListener("scroll", inNextFrame(() => {
    if (Math.abs(box.scrollTop - placed) > 1 && items.length) {
      const index = at(box.scrollTop);
      anchor = { key: items[index].key, offset: box.scrollTop - tops[index] };
    }
    draw();
  }), { passive: true });
  new ResizeObserver(inNextFrame(() => draw())).observe(box);

  return {
    set(next, isOther) {
      const isAtEnd = !isOther && items.length > 0 && box.scrollTop + box.clientHeight > tops[items.length] - 24;
      items = next;
      if (isOther) {
        heights = new Map();
        for (const here of shown.values()) here.node.remove();
        shown = new Map();
        anchor = { key: items.length ? items[0].key : "", offset: 0 };
      }
      measure();
      hold();
      draw();
      if (isAtEnd) box.scrollTop = tops[items.length];
    },
    draw,
    reveal(index, offset = -12) {
      if (index < 0) return;
      anchor = { key: items[index].key, offset };
      hold();
      draw();
    },
    nodeOf: (key) => (shown.get(key) || {}).node,
    // Moves so that something within an item can be seen.
    nudge(pixels) {
      box.scrollTop += pixels;
    },
  };
}

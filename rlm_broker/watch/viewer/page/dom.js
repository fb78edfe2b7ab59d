// Elements are made by name and filled as text. No function here takes markup.

const byId = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") made.append(child);
  }
  return made;
}

const fill = (parent, ...children) => parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null));

// One call in the next frame, however often it is asked for.
function inNextFrame(work) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      work();
    });
  };
}

function say(text) {
  byId("said").textContent = text;
}

// Rows of one height: only those that can be seen are in the document.
function fixedRows(box, height, count, build) {
  const inner = el("div", { class: "rows", role: "presentation" });
  box.append(inner);
  let shown = new Map();
  function draw(isNew) {
    const first = Math.max(0, Math.floor(box.scrollTop / height) - 6);
    const last = Math.min(count() - 1, Math.ceil((box.scrollTop + box.clientHeight) / height) + 6);
    const next = new Map();
    for (let at = first; at <= last; at += 1) {
      let row = isNew ? null : shown.get(at);
      if (!row) {
        row = build(at);
        row.style.transform = `translateY(${at * height}px)`;
        row.style.height = `${height}px`;
      }
      next.set(at, row);
    }
    inner.style.height = `${count() * height}px`;
    inner.replaceChildren(...next.values());
    shown = next;
  }
  const onScroll = inNextFrame(() => draw(false));
  box.addEventListener("scroll", onScroll, { passive: true });
  new ResizeObserver(onScroll).observe(box);
  return {
    draw: () => draw(true),
    reveal(at) {
      inner.style.height = `${count() * height}px`; // else the box could not scroll to rows that have just come
      const top = at * height;
      if (top < box.scrollTop) box.scrollTop = top;
      else if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
    },
    page: () => Math.max(1, Math.floor(box.clientHeight / height) - 1),
  };
}

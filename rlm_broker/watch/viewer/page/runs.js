// Live: the list of runs that the server knows, and the rows of one run as they come.

const POLL_MS = 1000;
const REFRESH_MS = 150;

function makeLive(app) {
  const box = byId("runs");
  let key = sessionStorage.getItem("key") || "";
  let following = null;
  let statuses = [];
  let timer = 0;
  let problem = "Reading ...";

  function useKey(given) {
    key = given;
    sessionStorage.setItem("key", key);
  }

  const ask = (path, options = {}) => fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options,
    headers: { Authorization: `Bearer ${key}`, ...options.headers } });

  const isOver = (status) => status.ended !== null && status.ended !== undefined;

  async function stop(id, isNow) {
    try {
      const done = await ask("api/stop", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run: id, now: isNow }) });
      say(done.ok ? "The run is being stopped." : "The run could not be stopped.");
    } catch {
      say("The server does not answer.");
    }
    poll();
  }

  function askToStop(id, question) {
    const dialog = el("dialog", { class: "help ask", "aria-label": "Stop the run" }, el("h2", {}, "Stop this run?"), el("p", { class: "sub-label" }, question || id),
      el("form", { method: "dialog", class: "choices-row" },
        el("button", { class: "quiet", value: "no", autofocus: true }, "Keep it"),
        el("button", { class: "stop", value: "soon" }, "Stop, with its best answer"),
        el("button", { class: "stop", value: "now" }, "Stop now")));
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "soon" || dialog.returnValue === "now") stop(id, dialog.returnValue === "now");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  }

  function card(status) {
    const over = isOver(status);
    const seconds = (status.ended || Date.now() / 1000) - status.started;
    return el("li", { class: "run-card" },
      el("button", { class: "run-open", type: "button", "data-run": status.id, onclick: () => app.openRun(status.id) },
        el("span", { class: "run-line" }, chip(over ? endWord(status.state) : status.state, over ? (["answered", "stopped"].includes(status.state) ? "good" : "bad") : "live"),
          el("strong", {}, status.question || "The task is in the context.")),
        el("span", { class: "facts" }, listed(status.model, duration(seconds), status.turn ? `turn ${status.turn}` : "", status.runs > 1 ? counted(status.runs, "run") : "",
          `${amount(status.tokens)} tokens`, money(status.cost_usd), `process ${status.pid}`, status.owner)),
        over ? null : el("span", { class: "doing" }, `${status.doing || "starts"}, for ${duration(Math.max(0, Date.now() / 1000 - status.doing_since)) || "0 ms"}`)),
      over ? null : el("button", { class: "stop", type: "button", "aria-label": `Stop ${status.question || status.id}`, onclick: () => askToStop(status.id, status.question) }, "Stop"));
  }

  function keyForm(why) {
    const input = el("input", { type: "password", name: "key", "aria-label": "Key", autocomplete: "off", placeholder: "Key" });
    const form = el("form", { class: "empty", onsubmit: (event) => {
      event.preventDefault();
      useKey(input.value.trim());
      poll();
    } }, el("h2", {}, "A key is needed"), el("p", {}, why), input, el("button", { class: "quiet", type: "submit" }, "Go on"));
    fill(box, form);
  }

  function draw() {
    if (box.hidden) return;
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.run : null;
    const going = statuses.filter((status) => !isOver(status)).sort((one, other) => other.started - one.started);
    const over = statuses.filter(isOver).sort((one, other) => other.ended - one.ended);
    const list = (title, some) => (some.length ? [el("h2", {}, title), el("ul", { class: "run-cards" }, some.map(card))] : []);
    fill(box, problem ? el("p", { class: "waiting", role: "status" }, problem) : null, list(`Running, ${going.length}`, going), list(`Ended, ${over.length}`, over),
      statuses.length || problem ? null : el("div", { class: "empty" }, el("h2", {}, "No run at this moment"), el("p", {}, "A run of rlm-broker on this machine appears here as soon as it starts.")));
    if (focused) {
      const again = [...box.querySelectorAll("button[data-run]")].find((each) => each.dataset.run === focused);
      if (again) again.focus();
    }
  }

  async function poll() {
    clearTimeout(timer);
    try {
      const answer = await ask("api/runs");
      if (answer.status === 401 || answer.status === 403) return keyForm("Open the link that the command printed, or give the key here.");
      if (!answer.ok) throw new Error(String(answer.status));
      statuses = await answer.json();
      problem = "";
    } catch {
      problem = "The server does not answer; the page asks again.";
    }
    draw();
    app.statusOf(statuses.find((status) => status.id === app.runId));
    timer = setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
    return undefined;
  }

  async function follow(id) {
    const mine = { id, stop: new AbortController() };
    if (following) following.stop.abort();
    following = mine;
    while (following === mine) {
      try {
        const answer = await ask(`api/rows?run=${encodeURIComponent(id)}&after=${app.model.last || 0}`, { signal: mine.stop.signal });
        if (answer.status === 404) return app.note("This run is not there any more.");
        if (answer.ok && (await read(answer.body.getReader(), mine))) return undefined;
      } catch {
        if (following !== mine) return undefined;
      }
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
    return undefined;
  }

  // Reads messages, one a line, and returns whether the run is over.
  async function read(reader, mine) {
    const base = app.store.size;
    const text = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (following !== mine) return true;
      rest += text.decode(value, { stream: !done });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.trim()) continue;
        const message = JSON.parse(line);
        if (message.note) app.note(message.note);
        if (message.end) {
          later();
          return true;
        }
        app.store.add(message.text || "");
        for (const row of message.rows || []) app.model.take(row, base);
      }
      later();
      if (done) return false;
    }
  }

  let isAsked = false;
  function later() {
    if (isAsked) return;
    isAsked = true;
    setTimeout(() => {
      isAsked = false;
      app.refresh();
    }, REFRESH_MS);
  }

  return { useKey, poll, follow, askToStop, draw, leave: () => {
    if (following) following.stop.abort();
    following = null;
  } };
}

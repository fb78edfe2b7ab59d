// The tree of what happened: runs, turns, replies, blocks, calls and tools, made of rows in the order of their events.

class Place {
  constructor(kind, path, parent, tree, start) {
    this.kind = kind; // "run", "turn", "reply", "block", "batch", "call" or "tool"
    this.path = path;
    this.parent = parent;
    this.tree = tree;
    this.run = kind === "run" ? this : parent && parent.run;
    this.level = parent ? parent.level + 1 : 0;
    this.children = [];
    this.index = 0; // among all places
    this.order = parent ? parent.children.length : 0; // among its siblings
    this.start = start;
    this.end = null;
    this.label = "";
    this.status = "running";
    this.model = "";
    this.number = 0;
    this.input = 0;
    this.output = 0;
    this.cost = 0;
    this.errors = 0;
    this.calls = 0;
    this.texts = null;
    this.more = null;
    this.isOpen = kind === "run" || kind === "turn" || kind === "block";
    this.version = 0;
    if (parent) parent.children.push(this);
  }

  get isFailed() {
    return this.status === "error" || this.status === "killed" || this.status === "interrupted";
  }

  get seconds() {
    return this.end === null ? null : Math.max(0, this.end - this.start);
  }
}

function makeModel() {
  const model = {
    places: [], trees: [], missed: 0, malformed: 0, rows: 0,
    // What search finds is at: offsets of texts in order, and for each its place and its name.
    offsets: [], ends: [], owners: [], names: [],
  };
  const byKey = new Map();
  let known = 0;

  function tree(name, time) {
    let found = byKey.get(name);
    if (!found) {
      found = { name, number: model.trees.length + 1, roots: [], start: time, end: time, places: new Map(), isOver: false };
      byKey.set(name, found);
      model.trees.push(found);
    }
    if (time < found.start) found.start = time;
    if (time > found.end) found.end = time;
    return found;
  }

  function add(kind, path, parent, of, start) {
    const place = new Place(kind, path, parent, of, start);
    place.index = model.places.length;
    model.places.push(place);
    of.places.set(path, place);
    if (!parent) {
      place.order = of.roots.length;
      of.roots.push(place);
    }
    return place;
  }

  function keep(place, name, ref) {
    if (!ref) return;
    place.texts = place.texts || {};
    place.texts[name] = ref;
    if (ref[0] >= known) {
      model.offsets.push(ref[0]);
      model.ends.push(ref[0] + ref[1]);
      model.owners.push(place);
      model.names.push(name);
      known = ref[0] + ref[1];
    }
  }

  function runOf(of, name, time) {
    const known = of.places.get(name);
    if (known) return known;
    const above = name.includes(".") ? of.places.get(name.slice(0, name.lastIndexOf("."))) : null;
    return add("run", name, above, of, time); // its first event was missed
  }

  const spend = (place, change) => {
    for (let each = place; each; each = each.parent) {
      change(each);
      each.version += 1;
    }
  };

  const failed = (place) => spend(place, (each) => { each.errors += 1; });

  const takers = {
    run_started(of, time, name, fields) {
      const above = name.includes(".") ? runOf(of, name.slice(0, name.lastIndexOf(".")), time) : null;
      const block = above && of.places.get(`${above.path}/b${fields.block}`);
      const run = of.places.get(name) || add("run", name, block || above, of, time);
      run.label = fields.label || "";
      run.model = fields.model || "";
      if (fields.branch_of) run.branch = { of: byKey.get(fields.branch_of) || null, after: fields.after_turn || 0 };
      keep(run, "question", fields.question);
      keep(run, "metadata", fields.metadata);
    },
    repl_ready(of, time, name, fields) {
      const run = runOf(of, name, time);
      run.more = { level: fields.level, ready: fields.duration_s };
      keep(run, "layers", fields.layers);
    },
    iteration_started(of, time, name, fields) {
      const run = runOf(of, name, time);
      endTurn(run, time);
      const turn = add("turn", `${name}/t${fields.number}`, run, of, time);
      turn.number = fields.number;
      run.turn = turn;
    },
    replied(of, time, name, fields) {
      const turn = of.places.get(`${name}/t${fields.number}`) || runOf(of, name, time);
      turn.label = fields.label || "";
      keep(turn, "reply", fields.text);
      keep(turn, "not run", fields.not_run);
    },
    block_started(of, time, name, fields) {
      const run = runOf(of, name, time);
      const turn = of.places.get(`${name}/t${fields.iteration}`) || run;
      const block = add("block", `${name}/b${fields.block}`, turn, of, time);
      block.number = fields.block;
      block.label = fields.label || "";
      keep(block, "code", fields.code);
    },
    block_printed(of, time, name, fields) {
      const block = of.places.get(`${name}/b${fields.block}`);
      if (!block || !fields.text) return;
      block.more = block.more || {};
      block.more.printed = block.more.printed || [];
      block.more.printed.push(fields.text);
      keep(block, `printed ${block.more.printed.length}`, fields.text);
      delete block.texts[`printed ${block.more.printed.length}`];
    },
    block_ended(of, time, name, fields) {
      const block = of.places.get(`${name}/b${fields.block}`);
      if (!block) return;
      block.end = time;
      block.status = fields.status || "ok";
      block.more = { limit: fields.limit, exit: fields.exit_code, omitted: fields.displays_omitted, undone: fields.blocks_undone };
      for (const text of ["stdout", "stderr", "error", "final_answer", "draft", "where", "stack", "displays"]) {
        keep(block, text, fields[text]);
      }
      if (block.isFailed) failed(block);
    },
    call_started(of, time, name, fields) {
      const run = runOf(of, name, time);
      let above = (fields.block && of.places.get(`${name}/b${fields.block}`)) || run.turn || run;
      if (fields.of > 1) {
        const path = `${name}/batch${fields.batch}`;
        const batch = of.places.get(path) || add("batch", path, above, of, time);
        batch.number = fields.of;
        above = batch;
      }
      const call = add(fields.block ? "call" : "reply", `${name}/c${fields.call}`, above, of, time);
      call.number = fields.call;
      call.label = fields.label || "";
      call.model = fields.requested_model || "";
      call.more = { depth: fields.depth };
      keep(call, "prompt", fields.prompt);
      keep(call, "system", fields.system);
    },
    call_text(of, time, name, fields) {
      const call = of.places.get(`${name}/c${fields.call}`);
      if (!call || !fields.text) return;
      call.more.pieces = call.more.pieces || [];
      call.more.pieces.push(fields.text);
      keep(call, "reply so far", fields.text);
    },
    call_retried(of, time, name, fields) {
      const call = of.places.get(`${name}/c${fields.call}`);
      if (!call) return;
      call.more.retries = (call.more.retries || 0) + 1;
      keep(call, `retry ${call.more.retries}`, fields.reason);
    },
    call_ended(of, time, name, fields) {
      const call = of.places.get(`${name}/c${fields.call}`) ||
        add("call", `${name}/c${fields.call}`, runOf(of, name, time), of, time - (fields.duration_s || 0));
      call.end = time;
      call.model = fields.model || call.model;
      call.status = fields.error ? "error" : "ok";
      const isRemembered = Boolean(fields.is_remembered);
      call.more = { ...call.more, depth: fields.depth, stored: fields.stored_calls || 0, isRemembered, pieces: null };
      if (call.texts) delete call.texts["reply so far"];
      keep(call, "response", fields.response);
      keep(call, "error", fields.error);
      if (call.kind === "reply") call.label = fields.label || "";
      else call.more.answer = fields.label || "";
      if (call.parent && call.parent.kind === "batch") {
        call.parent.end = time;
        if (call.parent.status === "running") call.parent.status = "ok";
      }
      const input = fields.total_input_tokens || 0;
      const output = fields.total_output_tokens || 0;
      const cost = fields.total_cost === undefined ? (fields.error ? 0 : null) : fields.total_cost;
      spend(call, (each) => {
        each.calls += fields.error || isRemembered ? 0 : 1; // only calls that were answered, as the command line counts them
        each.input += input;
        each.output += output;
        each.cost = each.cost === null || cost === null ? null : each.cost + cost;
      });
      if (fields.error) failed(call);
    },
    tool_started(of, time, name, fields) {
      const above = of.places.get(`${name}/b${fields.block}`) || runOf(of, name, time);
      const tool = add("tool", `${name}/f${fields.call}`, above, of, time);
      tool.number = fields.call;
      tool.model = fields.tool || "";
      tool.label = fields.label || "";
      keep(tool, "arguments", fields.arguments);
    },
    tool_ended(of, time, name, fields) {
      const tool = of.places.get(`${name}/f${fields.call}`);
      if (!tool) return;
      tool.end = time;
      tool.status = fields.error ? "error" : "ok";
      tool.more = { answer: fields.label || "" };
      keep(tool, "result", fields.result);
      keep(tool, "error", fields.error);
      if (fields.error) failed(tool);
    },
    run_ended(of, time, name, fields) {
      const run = runOf(of, name, time);
      endTurn(run, time);
      run.end = time;
      const kind = fields.kind || (fields.error ? "failed" : "answered"); // traces of early releases have no kind
      run.status = kind === "answered" || kind === "stopped" ? kind : "error";
      run.more = { ...run.more, kind, limit: fields.limit, answer: fields.label || "" };
      keep(run, "answer", fields.response);
      keep(run, "error", fields.error);
      keep(run, "partial answer", fields.partial_answer);
      if (run.status === "error") failed(run);
      if (!run.parent) of.isOver = true;
    },
    events_missed(of, time, name, fields) {
      model.missed += fields.count || 0;
    },
  };

  function endTurn(run, time) {
    const turn = run.turn;
    if (!turn) return;
    turn.end = time;
    turn.status = "ok";
    turn.version += 1;
    run.turn = null;
  }

  // Offsets of a live run begin at `base`: a new connection counts anew.
  model.take = ([kind, number, time, name, path, fields], base = 0) => {
    if (base) {
      for (const key of Object.keys(fields)) {
        if (Array.isArray(fields[key])) fields[key] = [fields[key][0] + base, fields[key][1]];
      }
    }
    // A trace of an early release names no trees: each root run begins one.
    let key = name;
    if (!key && kind === "run_started" && !path.includes(".")) model.unnamed = (model.unnamed || 0) + 1;
    if (!key) key = `#${model.unnamed || 1}`;
    const last = model.trees[model.trees.length - 1];
    const of = tree(key, time === null ? (last ? last.end : 0) : time);
    try {
      takers[kind](of, time === null ? of.end : time, path, fields);
    } catch {
      model.malformed += 1; // a hostile trace may have its events in any order
    }
    model.rows += 1;
    model.last = number || model.last;
    const touched = of.places.get(path);
    if (touched) touched.version += 1;
  };

  model.find = (at) => {
    const [number, path] = at.includes(":") ? at.split(":") : ["1", at];
    const of = model.trees[Number(number) - 1];
    return (of && of.places.get(path)) || null;
  };
  model.link = (place) => (place.tree.number === 1 ? place.path : `${place.tree.number}:${place.path}`);
  return model;
}

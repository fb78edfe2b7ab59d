// The places of flames: from left to right by time, downward by depth. What ran at the same time is stacked.

// Returns bars as { place, y } by rows, and how many rows there are. A place that goes on ends now.
function flames(trees, now) {
  const rowsOf = new Map(); // place -> rows of it and all below it
  const offsets = new Map(); // place -> rows below its parent's

  const endOf = (place) => (place.end === null ? Math.max(now(place), place.start) : place.end);

  // Each child goes into the first lane that is free at its start. A lane is as high as its highest child.
  function lanes(children) {
    const ends = [];
    const heights = [];
    const taken = [];
    for (const child of children) {
      let lane = ends.findIndex((end) => end <= child.start + 1e-6);
      if (lane < 0) lane = ends.length;
      if (lane > 400) lane = at(ends); // more would be too thin to tell apart: they share the lane that is free first
      ends[lane] = Math.max(endOf(child), ends[lane] || 0);
      heights[lane] = Math.max(heights[lane] || 0, rowsOf.get(child));
      taken.push(lane);
    }
    const tops = [0];
    for (let lane = 0; lane < heights.length; lane += 1) tops.push(tops[lane] + heights[lane]);
    children.forEach((child, index) => offsets.set(child, tops[taken[index]]));
    return tops[heights.length];
  }

  const at = (ends) => ends.reduce((best, end, lane) => (end < ends[best] ? lane : best), 0);

  // Children first, without recursion: a hostile trace may be deep.
  function measure(root) {
    const order = [];
    const stack = [root];
    while (stack.length) {
      const place = stack.pop();
      order.push(place);
      stack.push(...place.children);
    }
    for (let index = order.length - 1; index >= 0; index -= 1) {
      const place = order[index];
      const own = place.kind === "batch" ? 0 : 1; // a batch is its calls
      rowsOf.set(place, own + lanes(place.children));
      if (!rowsOf.get(place)) rowsOf.set(place, 1);
    }
    return order;
  }

  const bars = [];
  let top = 0;
  for (const tree of trees) {
    for (const root of tree.roots) {
      const order = measure(root);
      const ys = new Map([[root, top]]);
      for (const place of order) {
        const y = ys.get(place);
        const below = place.kind === "batch" ? y : y + 1;
        if (place.kind !== "batch") bars.push({ place, y, start: place.start - tree.start, end: endOf(place) - tree.start });
        for (const child of place.children) ys.set(child, below + offsets.get(child));
      }
      top += rowsOf.get(root) + 1;
    }
  }
  bars.sort((one, other) => one.y - other.y || one.start - other.start);
  return { bars, rows: top };
}

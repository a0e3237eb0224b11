"use strict";
// Sizes and prices, after schedule/sizes.py and planner/pricing.py. A test compares the times with the Python planner's.

const FLOPS = { forward: 4, backward: 10 };
const MERGE_COPIES = 1.5;
const RESULTS = { forward: ["out"], backward: ["dq", "dkv"] };

// Bytes of a whole piece of every kind. Throws an Error with the equation that fails.
function sizesOf(schedule, { heads, kvHeads, headDim, itemsize }, layout) {
  const over = schedule.numHeads, groups = schedule.groups;
  if (heads % kvHeads) throw new Error(`${heads} query heads are not a multiple of ${kvHeads} KV heads`);
  if (heads % over) throw new Error(`plan ${schedule.plan}: ${heads} query heads cannot be split over u${over}`);
  let copies = 1;
  while ((heads / kvHeads) % copies || (kvHeads * copies) % over) copies += 1;
  const share = over * groups;
  if (heads % share || (kvHeads * copies) % share) {
    throw new Error(`plan ${schedule.plan}: groups=${groups} does not divide the heads of a rank`);
  }
  const rows = (heads / share) * layout.tokens, keys = ((kvHeads * copies) / share) * layout.tokens;
  const wide = Math.max(itemsize, 4);
  const item = (kind) => (schedule.sums.includes(kind) ? wide : itemsize);
  const query = (kind) => rows * headDim * item(kind);
  const key = (kind) => 2 * keys * headDim * item(kind);
  return {
    q: query("q"), dq: query("dq"), kv: key("kv"), dkv: key("dkv"),
    out: rows * wide + query("out"), do: 2 * rows * wide + query("do"),
    headsPerRank: heads / share, copies,
  };
}

function curveAt(points, size) {
  if (size <= points[0][0]) return points[0][1];
  for (let at = 1; at < points.length; at++) {
    const [x0, y0] = points[at - 1], [x1, y1] = points[at];
    if (size <= x1) return y0 + ((Math.log(size) - Math.log(x0)) / (Math.log(x1) - Math.log(x0))) * (y1 - y0);
  }
  return points[points.length - 1][1];
}

class PagePrices {
  constructor(cluster, schedule, call, mask) {
    this.cluster = cluster;
    this.schedule = schedule;
    this.device = cluster.device;
    this.mask = mask;
    this.layout = new PageLayout(schedule, call.length);
    this.sizes = sizesOf(schedule, call, this.layout);
    this.headDim = call.headDim;
    this.areas = new Map();
  }

  copy(bytes) {
    return (2 * bytes) / this.device.copy;
  }

  // Visible pairs that a block is priced by. Without window and documents all blocks are equal in zigzag.
  area(row, column) {
    const { mask, layout } = this;
    if (mask.window === null && mask.ends.length === 2) return layout.tokens ** 2 / (mask.causal ? 2 : 1);
    const key = row * this.schedule.numShards + column;
    if (!this.areas.has(key)) this.areas.set(key, layout.pairs(mask, row, column));
    return this.areas.get(key);
  }

  block(pass, row, column) {
    const area = this.area(row, column);
    if (!area) return 0;
    const flops = area * FLOPS[pass] * this.headDim * this.sizes.headsPerRank;
    return flops / curveAt(this.device[pass], Math.sqrt(area)) + this.device.call;
  }

  // One rank's tasks: {post: messages}, {wait: numbers} or {seconds, parts}, each with its step.
  tasks(pass, rank) {
    const { device, sizes, schedule } = this;
    const program = schedule.program(pass, rank);
    const tasks = [];
    let parts = [], at = 0;
    const work = (seconds, label) => parts.push({ seconds, step: at, ...label });
    const flush = () => {
      const seconds = parts.reduce((total, part) => total + part.seconds, 0);
      if (seconds) tasks.push({ seconds, parts, step: at });
      parts = [];
    };
    const wait = (numbers, piece) => {
      if (!numbers.length) return;
      flush();
      tasks.push({ wait: numbers, step: at, piece });
    };
    work(device.start / 2, { other: "start" });
    program.steps.forEach((step, index) => {
      at = index;
      for (const event of step) {
        if (event.type === AWAIT) {
          wait(event.numbers, event.piece);
          if (event.inParts) work(this.copy(sizes[event.piece.kind]), { other: `join ${pieceText(event.piece)}` });
        } else if (event.type === POST) {
          const exchanged = event.exchanged.reduce((total, piece) => total + sizes[piece.kind], 0);
          if (exchanged) work(this.copy(exchanged), { other: "split by heads" });
          for (const message of event.messages) {
            message.bytes = message.overHeads ? exchanged / schedule.numHeads : sizes[message.pieces[0].kind];
            if (message.packs) work(this.copy(message.bytes), { other: `pack ${pieceText(message.pieces[0])}` });
            work(device.post, { other: "post" });
          }
          flush();
          tasks.push({ post: event.messages, step: at });
        } else if (event.type === PREPARE) {
          if (event.piece.kind === "do") work(device.call + this.copy(sizes.do), { other: "prepare" });
        } else if (event.type === COMPUTE) {
          work(this.block(pass, event.row, event.column), { block: event });
        } else {
          wait([event.message], event.piece);
          work(device.call + MERGE_COPIES * this.copy(sizes[event.piece.kind]), { merge: event.piece });
        }
      }
    });
    wait(program.home);
    const results = RESULTS[pass].reduce((total, kind) => total + sizes[kind] * schedule.groups, 0);
    work(this.copy(results), { other: "store results" });
    wait(program.sends);
    work(device.start / 2, { other: "end" });
    flush();
    return tasks;
  }
}

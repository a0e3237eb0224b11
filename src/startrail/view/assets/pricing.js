"use strict";
// Sizes and prices, after schedule/sizes.py and planner/pricing.py. A test compares the times with the Python planner's.

const FLOPS = { forward: 4, backward: 10 };
const WIDE = 4; // bytes per element of sums
const SAMPLED_SHARDS = 16;
const RESULTS = { forward: ["out"], backward: ["dq", "dkv"] };
const ALL_RESULTS = Object.values(RESULTS).flat();

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
  const wide = Math.max(itemsize, WIDE);
  const item = (kind) => (schedule.sums.includes(kind) ? wide : itemsize);
  const query = (kind) => rows * headDim * item(kind);
  const key = (kind) => 2 * keys * headDim * item(kind);
  return {
    q: query("q"), dq: query("dq"), kv: key("kv"), dkv: key("dkv"),
    out: rows * wide + query("out"), do: 2 * rows * wide + query("do"),
    wide: { out: rows * (1 + headDim) * wide, dq: rows * headDim * wide, dkv: 2 * keys * headDim * wide }, // as sums
    headsPerRank: heads / share, keyHeadsPerRank: (kvHeads * copies) / share,
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

// FLOP/s by head dim (planner/kernels): between two linear in their logarithm, outside them that of the nearest.
function speedByDim(curves, headDim, size) {
  if (!curves) return null;
  const dims = Object.keys(curves).map(Number).sort((a, b) => a - b);
  const low = dims.findLast((dim) => dim <= headDim) ?? dims[0];
  const high = dims.find((dim) => dim >= headDim) ?? dims[dims.length - 1];
  const [least, most] = [low, high].map((dim) => curveAt(curves[dim], size));
  return low === high ? least : least + ((most - least) * Math.log2(headDim / low)) / Math.log2(high / low);
}

class PagePrices {
  constructor(cluster, schedule, call, mask, layout = new PageLayout(schedule, call.length)) {
    this.cluster = cluster;
    this.schedule = schedule;
    this.device = cluster.device;
    this.mask = mask;
    this.layout = layout;
    this.sizes = sizesOf(schedule, call, this.layout);
    this.headDim = call.headDim;
    this.itemsize = call.itemsize;
    this.plain = mask.window === null && mask.ends.length === 2; // neither window nor documents
    this.inStep = false; // one rank stands for all: every hop takes as long as the slowest rank's
    this.seen = new Map();
    this.blocks = new Map();
  }

  // Reading and writing this many bytes in all.
  touch(bytes) {
    return bytes / this.device.copy;
  }

  copy(bytes) {
    return this.touch(2 * bytes);
  }

  // Copying a piece into a message: inputs as they are, results from their sums.
  pack(kind) {
    return this.touch(this.sizes[kind] + (ALL_RESULTS.includes(kind) ? this.sizes.wide[kind] : this.sizes[kind]));
  }

  speed(pass, causal, size) {
    const { speeds } = this.device, [mask, other] = causal ? ["causal", "full"] : ["full", "causal"];
    const of = (which, name) => speedByDim(speeds[which][name], this.headDim, size);
    const own = of(pass, mask);
    if (own !== null) return own;
    const alike = of("forward", mask), known = of("forward", other); // as much slower as in the forward pass
    return of(pass, other) * (alike && known ? alike / known : 1);
  }

  // One kernel call, in `parts` of similar size that do not see each other.
  kernel(pass, area, rows, causal, parts = 1) {
    const { occupancy, call } = this.device, heads = this.sizes.headsPerRank;
    let side = Math.sqrt(area / parts), share = 1;
    if (occupancy) {
      const { rows: tile, processors, reference } = occupancy, idle = (programs) => 1 + processors / (2 * programs);
      if (causal) side = Math.sqrt((2 * area) / parts);
      share = idle(reference) / idle(Math.max((heads * rows) / tile, 1));
    }
    return (area * FLOPS[pass] * this.headDim * heads) / (this.speed(pass, causal, side) * share) + call;
  }

  // Adding a block's results to rows of a shard and, in the backward pass, to keys of a shard, or of a bundle of
  // `allKeys`; a new sum is converted or zeroed.
  accumulate(pass, rows, keys, newRow, newKey, allKeys = this.layout.tokens) {
    const { sizes, headDim, itemsize, layout } = this, parts = [[sizes.headsPerRank, rows, newRow, layout.tokens]];
    const byKey = [sizes.keyHeadsPerRank, keys, newKey, allKeys];
    if (pass === "backward") parts.push(byKey, byKey);
    let bytes = 0;
    for (const [heads, tokens, isNew, every] of parts) {
      let each = tokens * (itemsize + 2 * WIDE) + (isNew ? every * WIDE : 0);
      if (isNew && tokens === every) each = itemsize === WIDE ? 0 : tokens * (itemsize + WIDE);
      bytes += heads * headDim * each;
    }
    return this.touch(bytes) + parts.length * this.device.call;
  }

  // What a block's kernel computes: visible pairs, and the rows and keys that they lie in.
  shape(row, column) {
    const { mask, layout } = this, tokens = layout.tokens, key = row * this.schedule.numShards + column;
    if (!this.plain) {
      if (!this.seen.has(key)) this.seen.set(key, { ...layout.seen(mask, row, column), causal: row === column });
      return this.seen.get(key);
    }
    if (!mask.causal) return { pairs: tokens ** 2, rows: tokens, keys: tokens, causal: false };
    if (row === column) return { pairs: tokens ** 2 / 2, rows: tokens, keys: tokens, causal: true };
    const half = Math.ceil(tokens / 2); // all rows see half of an earlier shard, half the rows all of a later one
    const [rows, keys] = row > column ? [tokens, half] : [half, tokens];
    return { pairs: rows * keys, rows, keys, causal: false };
  }

  block(pass, row, column, newRow, newKey) {
    if (this.plain && this.inStep && row !== column && pass === "backward") {
      return Math.max(this.shaped(pass, 1, 0, newRow, newKey), this.shaped(pass, 0, 1, newRow, newKey));
    }
    return this.shaped(pass, row, column, newRow, newKey);
  }

  shaped(pass, row, column, newRow, newKey) {
    const { pairs, rows, keys, causal } = this.shape(row, column), key = `${[pass, pairs, rows, keys, causal, newRow, newKey]}`;
    if (!pairs) return 0;
    if (!this.blocks.has(key)) {
      this.blocks.set(key, this.kernel(pass, pairs, rows, causal) + this.accumulate(pass, rows, keys, newRow, newKey));
    }
    return this.blocks.get(key);
  }

  // The rank with the most work among a sample of the shards; it stands for all.
  busiest(pass) {
    const { schedule } = this, shards = schedule.numShards, step = Math.ceil(shards / SAMPLED_SHARDS);
    if (shards === 1 || (this.plain && !this.mask.causal)) return 0;
    const sample = this.plain ? [0, Math.floor(shards / 2), shards - 1] : [];
    if (!this.plain) for (let shard = 0; shard < shards; shard += step) sample.push(shard);
    const work = (shard) => {
      const events = schedule.events(pass, schedule.rankOf(shard, 0)).flat();
      const blocks = events.filter(([type, , , group]) => type === COMPUTE && group === 0);
      if (!this.plain) return blocks.reduce((total, [, row, column]) => total + this.block(pass, row, column, false, false), 0);
      const before = blocks.filter(([, row, column]) => column < row).length;
      const after = blocks.filter(([, row, column]) => column > row).length;
      return before * this.block(pass, 1, 0, false, false) + after * this.block(pass, 0, 1, false, false);
    };
    const most = sample.map((shard) => [work(shard), shard]).reduce((a, b) => (b[0] > a[0] ? b : a));
    return schedule.rankOf(most[1], 0);
  }

  // One rank's tasks: {post: messages}, {wait: numbers} or {seconds, parts}, each with its step.
  tasks(pass, rank) {
    const tasks = [], program = this.schedule.program(pass, rank);
    const pricing = new ProgramPricing(this, pass, program, tasks);
    pricing.work(this.device.start / 2, { other: "start" });
    program.steps.forEach((events, at) => pricing.step(events, at));
    pricing.finish();
    pricing.work(this.device.start / 2, { other: "end" });
    pricing.flush();
    return tasks;
  }
}

// Turns the events of a program into tasks. Programs that run in turns add to the same tasks.
class ProgramPricing {
  constructor(prices, pass, program, tasks) {
    Object.assign(this, { prices, pass, program, tasks, sizes: prices.sizes, device: prices.device });
    this.begun = new Set(); // results that blocks or merges have added to
    this.parts = [];
    this.at = 0;
  }

  work(seconds, label) {
    this.parts.push({ seconds, step: this.at, ...label });
  }

  flush() {
    const seconds = sum(this.parts.map((part) => part.seconds));
    if (seconds) this.tasks.push({ seconds, parts: this.parts, step: this.at });
    this.parts = [];
  }

  wait(numbers, piece) {
    if (!numbers.length) return;
    this.flush();
    this.tasks.push({ wait: numbers, step: this.at, piece });
  }

  // True if no block or merge has added to this result yet.
  begin(kind, shard, group) {
    const text = `${kind}${shard}.${group}`, isNew = !this.begun.has(text);
    this.begun.add(text);
    return isNew;
  }

  // The tokens of a bundle, as a share of those of a shard.
  share(shard) {
    const bundle = this.program.bundle(shard);
    return bundle ? bundle.tokens / this.prices.layout.tokens : 1;
  }

  bytesOf({ kind, shard }) {
    const bundle = this.program.bundle(shard), bytes = this.sizes[kind];
    return bundle ? Math.floor(bytes / this.prices.layout.tokens) * bundle.tokens : bytes;
  }

  step(events, at) {
    const { device, prices, sizes, pass } = this;
    this.at = at;
    for (const event of events) {
      if (event.type === AWAIT) {
        this.wait(event.numbers, event.piece);
        if (event.inParts) this.work(prices.copy(sizes[event.piece.kind]), { other: `join ${event.piece.text}` });
      } else if (event.type === POST) {
        this.post(event);
      } else if (event.type === PREPARE) {
        if (event.piece.kind === "do") this.work(device.call + prices.copy(sizes.do), { other: "prepare" });
      } else if (event.type === COMPUTE) {
        const { row, column, group } = event, forward = pass === "forward";
        const newRow = this.begin(forward ? "out" : "dq", row, group), newKey = !forward && this.begin("dkv", column, group);
        this.work(prices.block(pass, row, column, newRow, newKey), { block: event });
      } else {
        this.combine(event);
      }
    }
  }

  post(event) {
    const { prices, sizes, program } = this, exchanged = sum(event.exchanged.map(({ kind }) => sizes[kind]));
    if (exchanged) this.work(sum(event.exchanged.map(({ kind }) => prices.pack(kind))), { other: "split by heads" });
    for (const message of event.messages) {
      const [piece] = message.pieces;
      message.bytes = message.overHeads ? exchanged / program.numHeads : this.bytesOf(piece);
      if (message.packs) {
        this.work(prices.pack(piece.kind) * this.share(piece.shard), { other: `pack ${piece.text}` });
        this.begun.delete(`${piece.kind}${piece.shard}.${piece.group}`); // a sent result is no longer ours
      }
      this.work(this.device.post, { other: "post" });
    }
    this.flush();
    this.tasks.push({ post: event.messages, step: this.at });
  }

  // A partial result; a bundle is added to the sums of all pieces that its tokens came from.
  combine({ piece, message }) {
    this.wait([message], piece);
    const { kind, shard, group } = piece, wide = this.sizes.wide[kind], bundle = this.program.bundle(shard);
    const into = bundle ? this.program.sources(bundle) : [shard];
    let bytes = (this.sizes[kind] + 2 * wide) * this.share(shard);
    for (const each of into) if (this.begin(kind, each, group)) bytes += wide * this.share(each);
    const launches = into.length * (kind === "dkv" ? 2 : 1);
    this.work(launches * this.device.call + this.prices.touch(bytes), { merge: piece });
  }

  finish() {
    const { prices, program } = this;
    this.wait(program.home);
    const store = (kind) => (program.numHeads > 1 ? prices.copy(this.sizes[kind]) : prices.pack(kind));
    this.work(sum(RESULTS[this.pass].map((kind) => program.groups * store(kind))), { other: "store results" });
    this.wait(program.sends);
    this.flush();
  }
}

"use strict";
// Which keys a query sees, as geometry/mask.py defines it: one interval, neither end of which ever decreases.

class PageMask {
  // kind: full, causal, window (causal) or documents (causal); documents are lengths that sum to the sequence's.
  constructor(kind, length, window, documents) {
    this.causal = kind !== "full";
    this.window = kind === "window" ? window : null;
    this.length = length;
    this.ends = [0];
    for (const each of kind === "documents" ? documents : [length]) this.ends.push(this.ends[this.ends.length - 1] + each);
  }

  // With a window or documents, zones and direct fetches run instead of the plan alone.
  get isSparse() {
    return this.window !== null || this.ends.length > 2;
  }

  document(position) {
    let low = 0, high = this.ends.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] <= position) low = middle;
      else high = middle;
    }
    return low;
  }

  visible(position) {
    const at = this.document(position);
    let low = this.ends[at], high = this.ends[at + 1];
    if (this.window !== null) low = Math.max(low, position - this.window + 1);
    if (this.causal) high = Math.min(high, position + 1);
    return [low, high];
  }

  // Visible pairs of queries [q0, q1) and keys [k0, k1).
  pairs(q0, q1, k0, k1) {
    [q1, k1] = [Math.min(q1, this.length), Math.min(k1, this.length)];
    let total = 0;
    for (let start = q0; start < q1 && k0 < k1; ) {
      const [low, high] = this.visible(start);
      const end = this.ends[this.document(start) + 1];
      let stop = Math.min(q1, end), slope = 0;
      if (this.window !== null) {
        const bend = this.ends[this.document(start)] + this.window - 1; // from here on the window's low end rises
        if (start < bend) stop = Math.min(stop, bend);
        else slope = 1;
      }
      const rows = stop - start;
      total += sumOfMin(high, this.causal ? 1 : 0, rows, k1) - sumOfMin(high, this.causal ? 1 : 0, rows, k0);
      total -= sumOfMin(low, slope, rows, k1) - sumOfMin(low, slope, rows, k0);
      start = stop;
    }
    return total;
  }

  // The queries of [q0, q1) that see a key of [k0, k1), and the keys that they see, or null. Each is one interval.
  reach(q0, q1, k0, k1) {
    [q1, k1] = [Math.min(q1, this.length), Math.min(k1, this.length)];
    const from = firstOf(q0, q1, (query) => this.visible(query)[1] > k0);
    const until = firstOf(from, q1, (query) => this.visible(query)[0] >= k1);
    if (from >= until || k0 >= k1) return null;
    return { rows: [from, until], keys: [Math.max(k0, this.visible(from)[0]), Math.min(k1, this.visible(until - 1)[1])] };
  }

  // Does a query of [q0, q1) see a key of [k0, k1)? "none", "all" or "some".
  seen(q0, q1, k0, k1) {
    [q1, k1] = [Math.min(q1, this.length), Math.min(k1, this.length)];
    if (q0 >= q1 || k0 >= k1) return "none";
    if (!this.reach(q0, q1, k0, k1)) return "none";
    return this.visible(q1 - 1)[0] <= k0 && this.visible(q0)[1] >= k1 ? "all" : "some";
  }
}

// The first of low .. high - 1 that passes a test, which all after it pass too; high if none does.
function firstOf(low, high, passes) {
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (passes(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Numbers in at least one of some intervals, at most two.
function unionSize(intervals) {
  const sizes = intervals.reduce((total, [from, until]) => total + until - from, 0);
  if (intervals.length < 2) return sizes;
  const [[a, b], [c, d]] = intervals;
  return sizes - Math.max(0, Math.min(b, d) - Math.max(a, c));
}

// The sum of min(first + slope * t, limit) for t = 0 .. rows - 1; slope is 0 or 1.
function sumOfMin(first, slope, rows, limit) {
  if (!slope) return rows * Math.min(first, limit);
  const below = Math.max(0, Math.min(rows, limit - first));
  return below * first + (below * (below - 1)) / 2 + (rows - below) * limit;
}

// The zigzag layout over shards: each has a chunk from the front and the mirrored one from the back.
class PageLayout {
  constructor(schedule, length) {
    const world = schedule.world;
    this.chunk = Math.ceil(length / (2 * world)) * schedule.numHeads;
    this.num = 2 * schedule.numShards;
    this.local = 2 * Math.ceil(length / (2 * world)); // tokens per rank, with padding
    this.tokens = this.local * schedule.numHeads; // of a whole piece
  }

  shardOfChunk(chunk) {
    return chunk < this.num / 2 ? chunk : this.num - 1 - chunk;
  }

  chunks(shard) {
    return [shard, this.num - 1 - shard];
  }

  range(chunk) {
    return [chunk * this.chunk, (chunk + 1) * this.chunk];
  }

  pairs(mask, row, column) {
    let total = 0;
    for (const q of this.chunks(row)) {
      for (const k of this.chunks(column)) total += mask.pairs(...this.range(q), ...this.range(k));
    }
    return total;
  }

  // Visible pairs of a block, and how many rows and keys they lie in.
  seen(mask, row, column) {
    const pairs = this.pairs(mask, row, column), sides = [row, column].map((shard) => this.chunks(shard));
    if (!pairs) return { pairs, rows: 0, keys: 0 };
    const reached = sides[0].map((q) => sides[1].map((k) => mask.reach(...this.range(q), ...this.range(k))));
    const byKeys = [0, 1].map((at) => reached.map((pair) => pair[at]));
    const count = (pairs, side) => pairs.reduce((total, pair) => total + unionSize(pair.filter(Boolean).map((one) => one[side])), 0);
    return { pairs, rows: count(reached, "rows"), keys: count(byKeys, "keys") };
  }
}

"use strict";
// What the kernels compute of a block, after geometry/tiles.py and geometry/bands.py. A segment {q0, q1, low, dlow, high,
// dhigh}: rows [q0, q1) see keys [low + t * dlow, high + t * dhigh). A test compares the predicted times with Python's.

const SHORT = 128, MASKED_ROWS = 256, CALL_COST = 128 * 128;
const rowsOf = (s) => s.q1 - s.q0;
const lastHigh = (s) => s.high + s.dhigh * (rowsOf(s) - 1);

function segmentsOf(mask, queries, keys) {
  if (!queries.length || !keys.length) return [];
  const end = Math.max(runEnd(keys[keys.length - 1]), runEnd(queries[queries.length - 1]), mask.ends.length > 2 ? mask.length : 0);
  const indexOf = (position) => sum(keys.map(([start, count]) => Math.min(Math.max(position - start, 0), count)));
  const boundsAt = (position) => mask.visible(position).map(indexOf);
  const edges = keys.flatMap((run) => [run[0], runEnd(run)]), merged = [];
  let offset = 0;
  for (const [start, count] of queries) {
    const points = [start, ...breakpoints(mask, start, start + count, edges, end), start + count];
    for (let at = 1; at < points.length; at++) {
      const [p0, p1] = [points[at - 1], points[at]], row = offset + p0 - start;
      const [low, high] = boundsAt(p0), next = p1 - p0 > 1 ? boundsAt(p0 + 1) : [low, high];
      const segment = { q0: row, q1: row + p1 - p0, low, dlow: next[0] - low, high, dhigh: next[1] - high };
      const extended = merged.length && extendedBy(merged[merged.length - 1], segment);
      if (extended) merged[merged.length - 1] = extended;
      else merged.push(segment);
    }
    offset += count;
  }
  return merged.map(withoutEmptyRows).filter(Boolean);
}

// Queries in (start, stop) at which an end of the visible interval may change its slope, sorted.
function breakpoints(mask, start, stop, edges, end) {
  const window = Math.min(mask.window || 0, end + 1), anchors = new Set([0, end, ...edges]), cuts = new Set();
  if (mask.ends.length > 2) {
    const from = Math.max(mask.ends.findIndex((each) => each >= start - window) - 1, 0);
    for (let at = from; at < mask.ends.length; at++) {
      anchors.add(mask.ends[at]);
      if (mask.ends[at] > stop + window) break;
    }
  }
  const shifts = mask.window === null ? [0, -1] : [0, -1, window - 1, -window];
  for (const anchor of anchors) for (const shift of shifts) cuts.add(anchor + shift);
  return [...cuts].filter((cut) => start < cut && cut < stop).sort((a, b) => a - b);
}

function extendedBy(a, b) {
  const [dlow, dhigh] = rowsOf(a) > 1 ? [a.dlow, a.dhigh] : [b.low - a.low, b.high - a.high];
  if (![0, 1].includes(dlow) || ![0, 1].includes(dhigh)) return null;
  if (rowsOf(b) > 1 && (b.dlow !== dlow || b.dhigh !== dhigh)) return null;
  if (b.low !== a.low + rowsOf(a) * dlow || b.high !== a.high + rowsOf(a) * dhigh) return null;
  return { q0: a.q0, q1: b.q1, low: a.low, dlow, high: a.high, dhigh };
}

function withoutEmptyRows(segment) {
  let s = segment, width = s.high - s.low;
  const grows = s.dhigh - s.dlow;
  if (width <= 0) {
    if (grows <= 0) return null;
    s = { ...s, q0: s.q0 + 1, low: s.low + s.dlow, high: s.high + s.dhigh };
    width = s.high - s.low;
  }
  if (grows < 0) s = { ...s, q1: Math.min(s.q1, s.q0 + width) };
  return s.q1 > s.q0 ? s : null;
}

function areaOf(tile) {
  const rows = rowsOf(tile);
  if (tile.form === "full") return rows * (tile.k1 - tile.k0);
  if (!tile.bounds) return (rows * (rows + 1)) / 2;
  return sum(tile.bounds.map((s) => rowsOf(s) * (s.high - s.low) + ((s.dhigh - s.dlow) * rowsOf(s) * (rowsOf(s) - 1)) / 2));
}

// Full, causal and anticausal rectangles, and masked ones where these would be tiny: for kernels without windows.
function coverOf(segments) {
  const tiles = [];
  let short = [];
  const flush = () => {
    const exact = short.flatMap(exactTiles);
    if (exact.length) {
      const k0 = Math.min(...exact.map((tile) => tile.k0)), k1 = Math.max(...exact.map((tile) => tile.k1));
      const shared = { q0: short[0].q0, q1: short[short.length - 1].q1, k0, k1, form: "masked", bounds: short };
      const separate = sum(exact.map((tile) => rowsOf(tile) * (tile.k1 - tile.k0) + CALL_COST));
      tiles.push(...(separate <= Math.floor((rowsOf(shared) * (k1 - k0) * 3) / 2) + CALL_COST ? exact : [shared]));
    }
    short = [];
  };
  for (const part of segments.flatMap(shortParts)) {
    if (rowsOf(part) >= SHORT) {
      flush();
      tiles.push(...exactTiles(part));
      continue;
    }
    if (short.length && (short[short.length - 1].q1 !== part.q0 || part.q1 - short[0].q0 > MASKED_ROWS)) flush();
    short.push(part);
  }
  flush();
  return tiles;
}

function shortParts(s) {
  const width = s.high - s.low, parts = [];
  if (!(s.dlow && s.dhigh) || rowsOf(s) < width) return [s];
  const step = width > SHORT ? width - 1 : SHORT / 2;
  for (let q0 = s.q0; q0 < s.q1; q0 += step) {
    parts.push({ q0, q1: Math.min(q0 + step, s.q1), low: s.low + q0 - s.q0, dlow: 1, high: s.high + q0 - s.q0, dhigh: 1 });
  }
  return parts;
}

function exactTiles(s) {
  const rows = rowsOf(s), { q0, q1 } = s, tiles = [];
  if (s.dlow && s.dhigh && rows >= s.high - s.low) return [{ q0, q1, k0: s.low, k1: s.high + rows - 1, form: "masked", bounds: [s] }];
  let full0 = s.low, full1 = s.high;
  if (s.dlow && rows > 1) {
    tiles.push({ q0, q1, k0: s.low, k1: s.low + rows, form: "anticausal" });
    full0 = s.low + rows;
  }
  if (s.dhigh && rows > 1) {
    tiles.push({ q0, q1, k0: s.high - 1, k1: s.high - 1 + rows, form: "causal" });
    full1 = s.high - 1;
  }
  if (full1 > full0) tiles.push({ q0, q1, k0: full0, k1: full1, form: "full" });
  return tiles;
}

// --- kernels with windows and several sequences per call

// Rows [q0, q1): row q0 + t sees keys [max(k0, t + low), min(k1, t + high)); null: that end is not limited.
class Band {
  constructor(q0, q1, k0, k1, low, high, full, segments) {
    Object.assign(this, { q0, q1, k0, k1, low, high, full, segments });
  }

  static of(s) {
    const low = s.dlow && rowsOf(s) > 1 ? s.low : null, high = s.dhigh && rowsOf(s) > 1 ? s.high : null;
    return new Band(s.q0, s.q1, s.low, lastHigh(s), low, high, high === null, [s]);
  }

  extended(s) {
    const t = s.q0 - this.q0, single = rowsOf(s) === 1;
    let { low, high, full } = this;
    if (low === null && (s.low === this.k0 + 1 || (s.low === this.k0 && s.dlow && !single))) low = s.low - t;
    if (s.q0 !== this.q1 || s.low !== (low === null ? this.k0 : t + low)) return null;
    if (low !== null && !(single || s.dlow)) return null;
    if (full && t === 1 && s.high === this.k1 + 1 && (single || s.dhigh)) [high, full] = [s.high - t, false];
    const rising = full || high === null ? null : t + high;
    if (s.high !== rising || !(single || s.dhigh)) {
      if (![this.k1, rising].includes(s.high) || !(single || !s.dhigh)) return null;
      full = true;
    }
    const band = new Band(this.q0, s.q1, this.k0, Math.max(this.k1, lastHigh(s)), low, high, full, [...this.segments, s]);
    return isExact(band.window, band.rows, band.keys) ? band : null;
  }

  get rows() {
    return this.q1 - this.q0;
  }

  get keys() {
    return this.k1 - this.k0;
  }

  get window() {
    const left = this.low === null ? -1 : this.keys - this.rows - (this.low - this.k0);
    return [left, this.high === null ? -1 : this.high - this.k0 - 1 - this.keys + this.rows];
  }
}

// As FlashAttention 2 reads a window (geometry/bands.py).
const isExact = ([left, right], rows, keys) => (left === -1 && right === -1) || (right >= 0 && right < keys) || rows <= keys + 1;

function bandsOf(segments) {
  const bands = [], calls = [];
  for (const segment of segments) {
    const extended = bands.length && bands[bands.length - 1].extended(segment);
    if (extended) bands[bands.length - 1] = extended;
    else bands.push(Band.of(segment));
  }
  for (const band of bands) {
    if (!calls.length || !addBand(calls[calls.length - 1], band)) calls.push({ bands: [band], window: band.window, rows: band.rows, keys: band.keys });
  }
  return calls.map(({ bands: own, window: [left, right] }) => {
    const first = own[0], last = own[own.length - 1], plain = left === -1 && right === -1;
    const tile = { q0: first.q0, q1: last.q1, k0: first.k0, k1: last.k1 };
    if (own.length === 1 && (plain || (left === -1 && right === 0 && first.rows === first.keys))) {
      return { ...tile, form: plain ? "full" : "causal" };
    }
    return { ...tile, form: "bands", bounds: own.flatMap((band) => band.segments), packs: own.length };
  });
}

function addBand(call, band) {
  const last = call.bands[call.bands.length - 1], window = [];
  const needs = [[call.keys - 1, band.keys - 1], [call.rows - 1, band.rows - 1]];
  for (const [at, [need, bandNeed]] of needs.entries()) {
    const end = call.window[at], bandEnd = band.window[at];
    if (end === bandEnd || (bandEnd === -1 && end >= bandNeed)) window.push(end);
    else if (end === -1 && bandEnd >= need) window.push(bandEnd);
    else return false;
  }
  const rows = Math.max(call.rows, band.rows), keys = Math.max(call.keys, band.keys);
  if (last.q1 !== band.q0 || last.k1 !== band.k0 || !isExact(window, rows, keys)) return false;
  Object.assign(call, { window, rows, keys });
  call.bands.push(band);
  return true;
}

"use strict";
// Who owns which tokens, after geometry/zones.py and geometry/needs.py. A run is [first position, count]. A test compares
// the zones of many batches with Python's.

const TOKEN_SLACK = 0.014, WORK_SLACK = 0.045, ROUNDING = 256, MAX_SWAPS = 20000;
const runEnd = ([start, count]) => start + count;
const tokensOf = (runs) => runs.reduce((total, [, count]) => total + count, 0);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const byStart = (documents) => [...documents].sort((a, b) => a.start - b.start);
const largestFirst = (a, b) => b.tokens - a.tokens || b.start - a.start;

// The part of runs before `length`, sorted; adjacent runs are merged.
function joinedRuns(runs, length) {
  const merged = [];
  for (const [start, whole] of [...runs].sort((a, b) => a[0] - b[0])) {
    const count = Math.min(whole, length - start), last = merged[merged.length - 1];
    if (count <= 0) continue;
    if (last && runEnd(last) === start) last[1] += count;
    else merged.push([start, count]);
  }
  return merged;
}

class PageZone {
  constructor(level, first, runs, length) {
    Object.assign(this, { level, first, runs, length, size: runs.length, tokens: tokensOf(runs[0]) });
  }

  runsOf(members) {
    return joinedRuns(members.flatMap((member) => this.runs[member]), this.length);
  }
}

// levels: [{level, slots}] from all ranks to single ones; documents: cu_seqlens. Zones, the largest first.
function zonesOf(levels, documents) {
  const length = documents[documents.length - 1], world = levels[0].slots.length;
  if (documents.length <= 2) return [zigzagZone(levels[0].slots, length)];
  const whole = documents.slice(1).map((stop, at) => ({ tokens: stop - documents[at], start: documents[at] })).sort(largestFirst);
  const zones = [], held = new Array(world).fill(0);
  const tokens = length / world, work = sum(whole.map((document) => document.tokens ** 2)) / world;
  const shared = Array.from({ length: world }, () => [0, 0]); // tokens and work of what was cut
  let groups = [[0, whole]]; // the first rank of each zone of a level, and the documents inside
  for (let depth = 1; depth < levels.length; depth++) {
    const { level, slots } = levels[depth - 1], size = levels[depth].slots.length, parts = [];
    for (const [first, inside] of groups) {
      const trials = [...new Set([depth / (levels.length - 1), 1])].map((slack) => {
        const maxTokens = size * (tokens * (1 + slack * TOKEN_SLACK) - shared[first][0]);
        const maxWork = size * (work * (1 + slack * WORK_SLACK) - shared[first][1]);
        return divide(inside, slots.length / size, maxTokens, maxWork);
      });
      const cutTokens = ([cut]) => sum(cut.map((document) => document.tokens));
      const [cut, shares] = trials.reduce((a, b) => (cutTokens(b) < cutTokens(a) ? b : a));
      if (cut.length) {
        zones.push(cutZone(level, first, slots, byStart(cut), length));
        const more = [1, 2].map((power) => sum(cut.map((document) => document.tokens ** power)) / slots.length);
        for (let rank = first; rank < first + slots.length; rank++) {
          held[rank] += zones[zones.length - 1].tokens;
          shared[rank] = [shared[rank][0] + more[0], shared[rank][1] + more[1]];
        }
      }
      shares.forEach((share, index) => parts.push([first + index * size, share]));
    }
    groups = parts;
  }
  const total = groups.map(([rank, inside]) => held[rank] + sum(inside.map((document) => document.tokens)));
  const most = Math.max(...total), unit = Math.floor(most / ROUNDING) || 1, local = Math.ceil(most / unit) * unit;
  groups.forEach(([rank, inside], at) => {
    const runs = byStart(inside).map((document) => [document.start, document.tokens]);
    if (local > total[at]) runs.push([length, local - total[at]]);
    if (runs.length) zones.push(new PageZone(levels[levels.length - 1].level, rank, [runs], length));
  });
  return zones;
}

function zigzagZone(slots, length) {
  const world = slots.length, chunk = Math.ceil(length / (2 * world));
  return new PageZone(0, 0, slots.map((slot) => [[slot * chunk, chunk], [(2 * world - 1 - slot) * chunk, chunk]]), length);
}

class DocumentPart {
  constructor() {
    Object.assign(this, { documents: [], tokens: 0, work: 0 });
  }

  add(document) {
    this.documents.push(document);
    this.tokens += document.tokens;
    this.work += document.tokens ** 2;
  }

  remove(index) {
    const [document] = this.documents.splice(index, 1);
    this.tokens -= document.tokens;
    this.work -= document.tokens ** 2;
    return document;
  }
}

// Whole documents for each of `parts`, largest first, and those to be cut instead: [cut, documents of each part].
function divide(documents, parts, maxTokens, maxWork) {
  const work = sum(documents.map((document) => document.tokens ** 2)) / parts;
  const limits = { tokens: maxTokens, work: maxWork }, cut = [];
  const bins = Array.from({ length: parts }, () => new DocumentPart());
  const allows = (part, count = 0) => part.tokens + count <= limits.tokens && part.work + count ** 2 <= limits.work;
  const cutOff = (document) => {
    cut.push(document);
    limits.tokens -= document.tokens / parts;
    limits.work -= document.tokens ** 2 / parts;
  };
  const least = (candidates, name) => candidates.reduce((a, b) => (b[name] < a[name] ? b : a));
  let heavy = documents.length, rest = 0;
  while (heavy && rest + documents[heavy - 1].tokens ** 2 <= (WORK_SLACK * work * parts) / 4) {
    heavy -= 1;
    rest += documents[heavy].tokens ** 2;
  }
  for (const document of documents.slice(0, heavy)) {
    const able = bins.filter((part) => allows(part, document.tokens));
    if (able.length) least(able, "work").add(document);
    else cutOff(document);
  }
  for (const document of documents.slice(heavy)) least(bins, "tokens").add(document);
  for (;;) {
    const full = bins.filter((part) => part.documents.length && !allows(part));
    if (!full.length) return [cut, bins.map((part) => part.documents)];
    const worse = (a, b) => b.work / work - a.work / work || b.tokens - a.tokens;
    const part = full.reduce((a, b) => (worse(a, b) > 0 ? b : a));
    if (swapOut(part, bins, limits)) continue;
    const excess = Math.max(part.tokens - limits.tokens, Math.sqrt(Math.max(part.work - limits.work, 0)));
    cutOff(part.remove(Math.max(0, part.documents.findLastIndex((document) => document.tokens >= excess))));
  }
}

// Moves a document of a part that has too much to another part, for a smaller one or for none, if that is enough.
function swapOut(part, parts, limits) {
  if (part.documents.length * sum(parts.map((other) => other.documents.length)) > MAX_SWAPS) return false;
  for (const [index, document] of part.documents.entries()) {
    const tokens = part.tokens - document.tokens, work = part.work - document.tokens ** 2;
    for (const other of parts) {
      if (other === part) continue;
      for (const [place, back] of [{ tokens: 0 }, ...other.documents].entries()) {
        const more = document.tokens - back.tokens, square = document.tokens ** 2 - back.tokens ** 2;
        if (
          more > 0 && more <= limits.tokens - other.tokens && square <= limits.work - other.work &&
          tokens + back.tokens <= limits.tokens && work + back.tokens ** 2 <= limits.work
        ) {
          if (place) part.add(other.remove(place - 1));
          other.add(part.remove(index));
          for (const changed of [part, other]) changed.documents.sort(largestFirst);
          return true;
        }
      }
    }
  }
  return false;
}

// Each document cut over all ranks of a zone: chunks i and 2S-1-i for slot i; longer chunks are dealt out in turn.
function cutZone(level, first, slots, documents, length) {
  const size = slots.length, runs = slots.map(() => []); // by slot
  let turn = 0;
  for (const { tokens, start } of documents) {
    const longer = tokens % (2 * size), each = Math.floor(longer / size), more = longer % size;
    const sizes = new Array(2 * size).fill((tokens - longer) / (2 * size));
    for (let slot = 0; slot < size; slot++) {
      const extra = each + ((slot - turn + size) % size < more ? 1 : 0);
      sizes[slot] += extra > 0 ? 1 : 0;
      sizes[2 * size - 1 - slot] += extra > 1 ? 1 : 0;
    }
    turn = (turn + more) % size;
    let at = start;
    sizes.forEach((count, chunk) => {
      if (count) runs[Math.min(chunk, 2 * size - 1 - chunk)].push([at, count]);
      at += count;
    });
  }
  const held = runs.map(tokensOf), longest = Math.max(...held);
  runs.forEach((own, slot) => held[slot] < longest && own.push([length, longest - held[slot]]));
  return new PageZone(level, first, slots.map((slot) => runs[slot]), length);
}

// Runs of keys that some query of the runs `own` sees, without those runs.
function neededKeys(mask, own) {
  const seen = own.map(([start, count]) => [mask.visible(start)[0], mask.visible(start + count - 1)[1]]);
  const needed = [];
  let at = 0, number = 0;
  for (const [low, high] of seen.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    at = Math.max(at, low);
    while (at < high) {
      while (number < own.length && runEnd(own[number]) <= at) number += 1;
      const [start, stop] = number < own.length ? [own[number][0], runEnd(own[number])] : [high, high];
      const until = Math.min(start, high), last = needed[needed.length - 1];
      if (at < until) {
        if (last && runEnd(last) === at) last[1] = until - last[0];
        else needed.push([at, until - at]);
      }
      at = start < high ? stop : high;
    }
  }
  return needed;
}

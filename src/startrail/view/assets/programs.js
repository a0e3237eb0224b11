"use strict";
// Programs as the Python builders made them (view/encode.py). Nothing here decides what a rank does: a template is rank
// 0's program, and `Shift` adds another rank's position to its shards and peers.

const KINDS = ["q", "do", "kv", "out", "dq", "dkv"];
const INPUTS = ["q", "do", "kv"];
const NEEDS = { forward: ["q", "kv"], backward: ["q", "do", "kv"] };
const AWAIT = 0, POST = 1, PREPARE = 2, COMPUTE = 3, COMBINE = 4;
const SEND = 1, PACKS = 2, OVER_HEADS = 4;

function toDigits(number, sizes) {
  const digits = new Array(sizes.length);
  for (let at = sizes.length - 1; at >= 0; at--) {
    digits[at] = number % sizes[at];
    number = Math.floor(number / sizes[at]);
  }
  return digits;
}

function fromDigits(digits, sizes) {
  return digits.reduce((number, digit, at) => number * sizes[at] + digit, 0);
}

class Schedule {
  constructor(encoded) {
    Object.assign(this, encoded);
    const pick = (wanted) => this.sizes.map((_, at) => at).filter((at) => this.by_heads[at] === wanted);
    this.headLanes = pick(true);
    this.shardLanes = pick(false);
    this.headSizes = this.headLanes.map((at) => this.sizes[at]);
    this.shardSizes = this.shardLanes.map((at) => this.sizes[at]);
    this.numHeads = this.headSizes.reduce((a, b) => a * b, 1);
    this.numShards = this.shardSizes.reduce((a, b) => a * b, 1);
    this.grid = this.shardLanes.map((at) => (this.levels[at].length === 2 ? this.levels[at] : [1, this.sizes[at]]));
    this.isStar = this.plan.includes("star");
    this.cache = new Map();
  }

  shardOf(rank) {
    const digits = toDigits(rank, this.sizes);
    return fromDigits(this.shardLanes.map((at) => digits[at]), this.shardSizes);
  }

  headOf(rank) {
    const digits = toDigits(rank, this.sizes);
    return fromDigits(this.headLanes.map((at) => digits[at]), this.headSizes);
  }

  rankOf(shard, head) {
    const ofShards = toDigits(shard, this.shardSizes), ofHeads = toDigits(head, this.headSizes);
    let s = 0, h = 0;
    return fromDigits(this.sizes.map((_, at) => (this.by_heads[at] ? ofHeads[h++] : ofShards[s++])), this.sizes);
  }

  shiftShard(shard, by) {
    const here = toDigits(shard, this.shardSizes), own = toDigits(by, this.shardSizes);
    const moved = this.grid.map(([team, ring], at) => {
      const position = (Math.floor(here[at] / team) + Math.floor(own[at] / team)) % ring;
      return position * team + ((here[at] % team) + (own[at] % team)) % team;
    });
    return fromDigits(moved, this.shardSizes);
  }

  // A rank's events, step by step, encoded as in view/encode.py.
  events(pass, rank) {
    const { templates, of } = this[pass];
    if (of) return templates[of[rank]];
    return templates[0].map((step) => step.map((event) => this.shifted(event, rank)));
  }

  shifted(event, rank) {
    const own = this.shardOf(rank), head = this.headOf(rank), shards = this.numShards;
    const shard = (each) => this.shiftShard(each, own);
    const peer = (each) => this.rankOf(shard(this.shardOf(each)), (this.headOf(each) + head) % this.numHeads);
    const piece = (number) => {
      const kind = number % KINDS.length, whole = (number - kind) / KINDS.length;
      return (Math.floor(whole / shards) * shards + shard(whole % shards)) * KINDS.length + kind;
    };
    if (event[0] === POST) {
      const messages = event[1].map(([flags, lane, to, one]) => [flags, lane, peer(to), one < 0 ? one : piece(one)]);
      return [POST, messages, event[2].map(piece)];
    }
    if (event[0] === COMPUTE) return [COMPUTE, shard(event[1]), shard(event[2]), event[3]];
    return [event[0], piece(event[1]), ...event.slice(2)];
  }

  // The same events with names, and every message with its number; kept for a later look.
  program(pass, rank) {
    const key = `${pass} ${rank}`;
    if (!this.cache.has(key)) this.cache.set(key, namedProgram(this.events(pass, rank), this));
    return this.cache.get(key);
  }

  // Coefficients of the closed form: pieces of each kind that a rank sends over each level.
  closed(pass, rank) {
    const { lanes, of } = this[pass].closed;
    return lanes[of ? of[rank] : 0];
  }

  closedBytes(pass, rank, sizes) {
    return this.closed(pass, rank).map((lane) => lane.reduce((total, pieces, kind) => total + pieces * sizes[KINDS[kind]], 0));
  }

  // The closed form of what a rank sends over a level, as terms {text, value, kinds}.
  terms(pass, lane, rank) {
    const schedule = this, level = schedule.levels[lane], forward = pass === "forward";
    const used = (kinds) => kinds.filter((kind) => schedule.closed(pass, rank)[lane][KINDS.indexOf(kind)]);
    const groups = schedule.groups, times = groups > 1 ? `${groups}·` : "";
    if (schedule.by_heads[lane]) {
      let over = 1;
      for (let at = 0; at <= lane; at++) if (schedule.by_heads[at]) over *= schedule.sizes[at];
      const size = schedule.sizes[lane];
      return size > 1 ? [{ text: `${times}(${size}−1)/${over}`, value: (groups * (size - 1)) / over, kinds: used(KINDS) }] : [];
    }
    const keep = (schedule.plan.match(/keep=(\w+)/) || [])[1];
    if (schedule.isStar) {
      const team = level[0], shards = schedule.numShards, hops = shards / team ** 2;
      const gathered = forward ? ["q", "kv", "out"] : [...{ all: ["do"], queries: ["do", "kv"] }[keep] || ["q", "do", "kv"], "dq", "dkv"];
      const placed = forward ? ["kv"] : keep === "all" ? ["dkv"] : ["kv", "dkv"];
      const ring = forward ? ["kv"] : ["q", "do", "dq"];
      const probe = placed[placed.length - 1], total = schedule.closed(pass, rank)[lane][KINDS.indexOf(probe)] / groups;
      const rest = total - (gathered.includes(probe) ? team - 1 : 0) - (ring.includes(probe) ? team * (hops - 1) : 0);
      return [
        { text: `${times}(${team}−1)`, value: groups * (team - 1), kinds: gathered },
        { text: rest > 0 ? `${times}${team}` : `0`, value: groups * rest, kinds: placed },
        { text: `${times}${team}·(${shards}/${team}²−1)`, value: groups * team * (hops - 1), kinds: ring },
      ];
    }
    const outer = schedule.shardLanes.filter((at) => at < lane);
    const product = (digit) => outer.reduce((total, at) => total * schedule.levels[at][digit], 1);
    const queries = schedule.plan.includes("backward=queries") && !forward;
    const byRow = forward ? ["q", "out"] : ["q", "do", "dq"], byColumn = forward ? ["kv"] : ["kv", "dkv"];
    const [teamKinds, ringKinds] = (queries ? [byColumn, byRow] : [byRow, byColumn]).map(used);
    const term = (digit, kinds) => {
      const before = product(digit), size = level[digit];
      const text = `${times}${before > 1 ? `${before}·` : ""}(${size}−1)`;
      return size > 1 && kinds.length ? [{ text, value: groups * before * (size - 1), kinds }] : [];
    };
    return [...term(0, teamKinds), ...term(1, ringKinds)];
  }

  // owners()[row * shards + column]: the shard whose ranks compute the block.
  owners(pass) {
    const key = `owners ${pass}`;
    if (!this.cache.has(key)) {
      const shards = this.numShards, owners = new Int32Array(shards * shards).fill(-1);
      const { templates, of } = this[pass];
      const blocksOf = (template) => template.flatMap((step) => step.filter((event) => event[0] === COMPUTE));
      const shared = of ? null : blocksOf(templates[0]);
      for (let shard = 0; shard < shards; shard++) {
        const blocks = shared || blocksOf(templates[of[this.rankOf(shard, 0)]]);
        const move = new Map();
        const moved = (each) => {
          if (!move.has(each)) move.set(each, this.shiftShard(each, shard));
          return move.get(each);
        };
        for (const [, row, column] of blocks) {
          owners[shared ? moved(row) * shards + moved(column) : row * shards + column] = shard;
        }
      }
      this.cache.set(key, owners);
    }
    return this.cache.get(key);
  }
}

// A walk with names. Messages are numbered from `base` on; `channel` is added to their lanes where programs that run in
// turns use lanes of their own; `levels` lie below the lanes that have them. `name`: what to call a shard.
function namedProgram(steps, { numHeads, numShards, groups }, { base = 0, channel = 0, levels = Infinity, fetches = null, name = String } = {}) {
  const home = [], sends = [];
  const piece = (number) => {
    const kind = KINDS[number % KINDS.length], whole = Math.floor(number / KINDS.length);
    const [shard, group] = fetches ? [whole, 0] : [whole % numShards, Math.floor(whole / numShards)];
    return { kind, shard, group, text: `${kind}${name(shard)}` + (group ? `.${group}` : "") };
  };
  let number = base;
  const named = steps.map((step) => step.map((event) => {
    const [type, first, second, third] = event;
    if (type === AWAIT) return { type, piece: piece(first), numbers: second.map((each) => base + each), inParts: third === 1 };
    if (type === PREPARE) return { type, piece: piece(first) };
    if (type === COMPUTE) return { type, row: first, column: second, group: third, rowText: name(first), columnText: name(second) };
    if (type === COMBINE) return { type, piece: piece(first), message: base + second };
    const exchanged = second.map(piece);
    const messages = first.map(([flags, lane, peer, one]) => {
      number += 1;
      const send = (flags & SEND) > 0, overHeads = (flags & OVER_HEADS) > 0, pieces = overHeads ? exchanged : [piece(one)];
      if (send) sends.push(number);
      else if (overHeads && !INPUTS.includes(pieces[0].kind)) home.push(number);
      return { send, packs: (flags & PACKS) > 0, overHeads, lane: lane + channel, level: lane < levels ? lane : lane - levels, peer, pieces, number };
    });
    return { type, messages, exchanged };
  }));
  const bundle = (shard) => (fetches ? fetches.bundle(shard) : undefined), sources = (edge) => fetches.sources(edge);
  return { steps: named, home, sends, numHeads, groups, bundle, sources };
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

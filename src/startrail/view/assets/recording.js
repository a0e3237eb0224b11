"use strict";
// Recordings as Python wrote them (view/recording.py has the format). Nothing here decides what a rank does or when.

const KINDS = ["q", "do", "kv", "out", "dq", "dkv"], INPUTS = ["q", "do", "kv"];
const NEEDS = { forward: ["q", "kv"], backward: ["q", "do", "kv"] };
const AWAIT = 0, POST = 1, PREPARE = 2, COMPUTE = 3, COMBINE = 4, FINISH = 5;
const SEND = 1, OVER_HEADS = 2;

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

class Recording {
  constructor(data, ticks) {
    Object.assign(this, data);
    this.ticks = ticks;
    this.kept = new Map();
    let base = 1; // shards and bundles are counted through all zones
    for (const zone of this.zones) {
      zone.base = base;
      base += zone.names.length;
    }
    this.shardNames = [null, ...this.zones.flatMap((zone) => zone.names)];
    this.shardColours = [null, ...this.zones.flatMap((zone) => zone.colours)];
    this.cells = this.matrix.edges.length - 1;
    this.pairs = new Map(this.matrix.partial.map(([q, k, pairs]) => [`${q} ${k}`, pairs]));
  }

  get seconds() {
    return this.forward.seconds + this.backward.seconds;
  }

  once(key, make) {
    if (!this.kept.has(key)) this.kept.set(key, make());
    return this.kept.get(key);
  }

  zonesOf(rank) {
    return this.zones.filter(({ first, size }) => rank >= first && rank < first + size);
  }

  zoneOf(id) {
    return this.zones.find(({ base, names }) => id < base + names.length);
  }

  // A rank's events, step by step: {type, step, zone, start, work, end}, which waits until `work`, and more by type.
  program(pass, rank) {
    return this.once(`${pass} ${rank}`, () => this.decode(pass, rank));
  }

  decode(pass, rank) {
    const recorded = this[pass], index = this.ranks.indexOf(rank), zones = this.zonesOf(rank);
    const [spans, arrivals] = ["spans", "arrivals"].map((name) => recorded[name][recorded[`${name}_of`][index]]);
    const tick = recorded.seconds / this.ticks;
    let now = 0, nextSpan = 0, nextArrival = 0;
    const timed = (event) => {
      if (!spans) return event;
      const [wait, work] = [spans[nextSpan++], spans[nextSpan++]];
      Object.assign(event, { start: now * tick, work: (now + wait) * tick, end: (now + wait + work) * tick });
      now += wait + work;
      return event;
    };
    const steps = recorded.programs[recorded.of[index]].map((number, step) => {
      const [part, events] = recorded.steps[number], zone = zones[part], names = new PieceNames(this, zone, rank);
      return events.map((event) => {
        const decoded = timed({ step, zone, ...this.event(event, names, rank) });
        for (const message of decoded.messages || []) {
          if (message.send || !arrivals) continue;
          const [start, seconds] = [arrivals[nextArrival++], arrivals[nextArrival++]];
          Object.assign(message, { start: start * tick, end: (start + seconds) * tick });
        }
        return decoded;
      });
    });
    const last = steps.length - 1, finish = zones.flatMap((zone) => [0, 1].map(() => timed({ type: FINISH, step: last, zone })));
    return { steps, spans: spans ? [...steps.flat(), ...finish] : [] };
  }

  event([type, ...rest], names, rank) {
    if (type === POST) {
      const messages = rest.map(([flags, level, peer, ...pieces]) => ({
        send: (flags & SEND) > 0, overHeads: (flags & OVER_HEADS) > 0, level, peer: (peer + rank) % this.world,
        pieces: pieces.map((piece) => names.piece(piece)),
      }));
      return { type, messages };
    }
    if (type !== COMPUTE) return { type, piece: names.piece(rest[0]) };
    const [row, column] = [names.id(rest[0]), names.id(rest[1])];
    return { type, row, column, group: rest[2], hidden: rest[3] === 1, block: this.blockId(row, column) };
  }

  blockId(row, column) {
    return row * this.shardNames.length + column;
  }

  // Who computes a block and when: {rank, event}, ordered by heads.
  computed(pass, block) {
    const found = this.once(`blocks ${pass}`, () => {
      const blocks = new Map();
      for (const rank of this.ranks) {
        for (const event of this.program(pass, rank).steps.flat()) {
          if (event.type !== COMPUTE || event.group) continue;
          if (!blocks.has(event.block)) blocks.set(event.block, []);
          blocks.get(event.block).push({ rank, event, head: event.zone.head[rank - event.zone.first] });
        }
      }
      for (const list of blocks.values()) list.sort((a, b) => a.head - b.head);
      return blocks;
    });
    return found.get(block) || [];
  }

  // Ranks whose times are recorded.
  timed(pass) {
    return this.ranks.filter((_, index) => this[pass].spans_of[index] >= 0);
  }

  // Messages that timed ranks receive: {to, message, zone}.
  transfers(pass) {
    return this.once(`transfers ${pass}`, () => this.timed(pass).flatMap((to) => this.program(pass, to).steps.flat().flatMap(({ messages, zone }) =>
      (messages || []).filter((message) => !message.send).map((message) => ({ to, message, zone })))));
  }

  // What a rank sends over each level: rows {zone, level, terms, closed, counted}.
  bytes(pass, rank) {
    const recorded = this[pass], zones = this.zonesOf(rank);
    return recorded.bytes[recorded.bytes_of[this.ranks.indexOf(rank)]].map(([part, level, terms, closed, counted]) => ({ zone: zones[part], level, terms, closed, counted }));
  }
}

// Shards and pieces of a zone as a rank numbers them: from its own shard.
class PieceNames {
  constructor(recording, zone, rank) {
    Object.assign(this, { recording, zone, own: zone.own[rank - zone.first] });
  }

  id(number) {
    const { zone } = this;
    return zone.base + (number < zone.shards ? (number + this.own) % zone.shards : number);
  }

  piece(code) {
    const kind = KINDS[code % KINDS.length], whole = Math.floor(code / KINDS.length), { zone } = this;
    const bundle = zone.runs === "direct", group = bundle ? 0 : Math.floor(whole / zone.shards);
    const id = this.id(bundle ? whole : whole % zone.shards);
    return { kind, group, id, text: `${kind}${this.recording.shardNames[id]}${group ? `.${group}` : ""}` };
  }
}

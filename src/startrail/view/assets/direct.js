"use strict";
// The `direct` schedule, after schedule/families/direct.py and schedule/walk.py: each rank fetches just the keys that its
// queries see. A test compares its events with the builder's, rank by rank.

// All messages of a zone, numbered after its ranks. An edge is {depth, sender, receiver, runs, pieces, number, level};
// pieces are [start, count, the edge that brought them to the sender or null].
class Fetches {
  constructor(owned, needed, sizes) {
    Object.assign(this, { size: owned.length, sizes });
    const trees = new Map(), edges = new Map();
    for (const { start, count, owner, ranks } of regionsOf(owned, needed)) {
      const key = `${owner}:${ranks}`;
      if (!trees.has(key)) trees.set(key, deliver(owner, ranks, sizes));
      for (const [edge, source] of trees.get(key)) {
        const name = this.key(edge);
        if (!edges.has(name)) edges.set(name, { ...edge, pieces: [] });
        edges.get(name).pieces.push([start, count, source && this.key(source)]);
      }
    }
    this.edges = [...edges.entries()].sort(([a], [b]) => a - b).map(([, edge]) => edge);
    this.edges.forEach((edge, at) => {
      edge.number = owned.length + at;
      edge.runs = mergedRuns(edge.pieces);
      edge.tokens = tokensOf(edge.runs);
      edge.level = this.level(edge);
      for (const piece of edge.pieces) piece[2] = piece[2] === null ? null : edges.get(piece[2]);
    });
    this.depth = 1 + Math.max(-1, ...this.edges.map((edge) => edge.depth));
  }

  key({ depth, sender, receiver }) {
    return (depth * this.size + sender) * this.size + receiver;
  }

  level({ sender, receiver }) {
    const [from, to] = [sender, receiver].map((rank) => toDigits(rank, this.sizes));
    return from.findIndex((digit, at) => digit !== to[at]);
  }

  // Tokens whose keys are sent over each level's links: all, or those of one sender or receiver.
  tokensByLevel(which = () => true) {
    const tokens = this.sizes.map(() => 0);
    for (const edge of this.edges) if (which(edge)) tokens[edge.level] += edge.tokens;
    return tokens;
  }

  bundle(number) {
    return this.edges[number - this.size];
  }

  // The pieces that a bundle's tokens came from, at its sender.
  sources(edge) {
    return [...new Set(edge.pieces.map(([, , source]) => (source ? source.number : edge.sender)))];
  }

  // Steps {posts, blocks, merges, after} of a rank. Lanes come after those of the plan's levels.
  steps(rank, pass) {
    const received = this.edges.filter((edge) => edge.receiver === rank), sent = this.edges.filter((edge) => edge.sender === rank);
    const posts = (depth, kind, incoming, outgoing) => [[false, incoming], [true, outgoing]].flatMap(([send, edges]) =>
      edges.filter((edge) => edge.depth === depth).map((edge) => ({
        send, kind, lane: this.sizes.length + edge.level, shard: edge.number, peer: edge.sender + edge.receiver - rank,
      })));
    const steps = [];
    for (let depth = 0; depth <= this.depth; depth++) {
      const columns = depth ? received.filter((edge) => edge.depth === depth - 1).map((edge) => edge.number) : [rank];
      const passed = sent.filter((edge) => edge.depth === depth).flatMap((edge) => this.sources(edge)).filter((shard) => shard !== rank);
      const after = [...new Set(passed)].sort((a, b) => a - b);
      steps.push({ posts: posts(depth, "kv", received, sent), blocks: columns.map((column) => [rank, column]), merges: [], after });
    }
    for (let depth = this.depth - 1; pass === "backward" && depth >= 0; depth--) {
      const merges = sent.filter((edge) => edge.depth === depth).map((edge) => [edge.number, edge.receiver]);
      steps.push({ posts: posts(depth, "dkv", sent, received), blocks: [], merges, after: [] });
    }
    return steps.filter((step) => step.posts.length + step.blocks.length + step.merges.length + step.after.length);
  }

  // The walk of a rank's steps as encoded events (view/encode.py); `first` is added to all ranks.
  walk(rank, pass, first) {
    const piece = (kind, shard) => shard * KINDS.length + KINDS.indexOf(kind);
    const packed = new Set(), prepared = new Set(), inFlight = new Map(), partials = new Map();
    const take = (number) => {
      const messages = inFlight.get(number);
      inFlight.delete(number);
      return [AWAIT, number, messages, 0];
    };
    let count = 0;
    return this.steps(rank, pass).map(({ posts, blocks, merges, after }) => {
      const events = [], before = posts.filter((post) => post.send).map((post) => piece(post.kind, post.shard));
      for (const number of [...after.map((shard) => piece("kv", shard)), ...before]) if (inFlight.has(number)) events.push(take(number));
      if (posts.length) {
        events.push([POST, posts.map(({ send, kind, lane, shard, peer }) => {
          const number = piece(kind, shard), packs = send && !packed.has(number);
          count += 1;
          if (INPUTS.includes(kind)) {
            packed.add(number);
            if (!send) inFlight.set(number, [count]);
            if (!send) prepared.delete(number);
          } else if (!send) partials.set(`${number} ${peer}`, [...(partials.get(`${number} ${peer}`) || []), count]);
          return [(send ? SEND : 0) + (packs ? PACKS : 0), lane, first + peer, number];
        }), []]);
      }
      for (const [row, column] of blocks) {
        for (const number of NEEDS[pass].map((kind) => piece(kind, kind === "kv" ? column : row))) {
          if (inFlight.has(number)) events.push(take(number));
          if (!prepared.has(number)) events.push([PREPARE, number]);
          prepared.add(number);
        }
        events.push([COMPUTE, row, column, 0]);
      }
      for (const [shard, peer] of merges) events.push([COMBINE, piece("dkv", shard), partials.get(`${piece("dkv", shard)} ${peer}`).shift()]);
      return events;
    });
  }
}

// Runs of tokens with one owner that the same ranks need, by position.
function regionsOf(owned, needed) {
  const edges = needed.flatMap((runs, rank) => runs.flatMap((run) => [[run[0], 1, rank], [runEnd(run), -1, rank]]));
  edges.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const owners = owned.flatMap((runs, rank) => runs.map((run) => [run[0], runEnd(run), rank])).sort((a, b) => a[0] - b[0]);
  const active = new Set(), regions = [];
  let number = 0;
  for (let index = 0; index + 1 < edges.length; index++) {
    const [position, change, rank] = edges[index], stop = edges[index + 1][0];
    if (change > 0) active.add(rank);
    else active.delete(rank);
    if (!active.size || stop === position) continue;
    const ranks = [...active].sort((a, b) => a - b);
    while (owners[number][1] <= position) number += 1;
    for (let start = position, by = number; start < stop; by++) {
      const until = Math.min(stop, owners[by][1]);
      regions.push({ start, count: until - start, owner: owners[by][2], ranks });
      start = until;
    }
  }
  return regions;
}

// The messages that bring tokens from their owner to ranks, each with the one that brings them to its sender.
function deliver(owner, ranks, sizes) {
  const found = [], waiting = [[owner, ranks, 0, null]];
  while (waiting.length) {
    const [holder, others, level, source] = waiting.pop();
    if (!others.length || level === sizes.length) continue;
    const size = sizes.slice(level + 1).reduce((a, b) => a * b, 1), groups = new Map();
    for (const rank of others) {
      const subtree = Math.floor(rank / size);
      groups.set(subtree, [...(groups.get(subtree) || []), rank]);
    }
    for (const [subtree, members] of groups) {
      if (subtree === Math.floor(holder / size)) {
        waiting.push([holder, members, level + 1, source]);
        continue;
      }
      const distance = (rank) => (((rank - owner) % size) + size) % size;
      const relay = members.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      const edge = { depth: source === null ? 0 : source.depth + 1, sender: holder, receiver: relay };
      found.push([edge, source]);
      waiting.push([relay, members.filter((rank) => rank !== relay), level + 1, edge]);
    }
  }
  return found;
}

function mergedRuns(pieces) {
  const merged = [];
  for (const [start, count] of pieces) {
    const last = merged[merged.length - 1];
    if (last && runEnd(last) === start) last[1] += count;
    else merged.push([start, count]);
  }
  return merged;
}

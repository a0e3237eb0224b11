"use strict";
// An event-driven simulation of all ranks on a cluster, after planner/simulator.py and planner/predict.py: messages
// start when both ends have posted them and share links max-min fairly. It also records when everything happened.

const SIMULTANEOUS = 1e-9;

class Heap {
  constructor() {
    this.items = [];
  }

  get size() {
    return this.items.length;
  }

  static before(a, b) {
    return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
  }

  push(item) {
    const items = this.items;
    let at = items.push(item) - 1;
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (!Heap.before(items[at], items[up])) break;
      [items[at], items[up]] = [items[up], items[at]];
      at = up;
    }
  }

  pop() {
    const items = this.items, top = items[0], last = items.pop();
    if (items.length) {
      items[0] = last;
      for (let at = 0; ; ) {
        let least = at;
        for (const down of [2 * at + 1, 2 * at + 2]) {
          if (down < items.length && Heap.before(items[down], items[least])) least = down;
        }
        if (least === at) break;
        [items[at], items[least]] = [items[least], items[at]];
        at = least;
      }
    }
    return top;
  }
}

class PageSimulator {
  // tasks: by rank; route(rank, message) -> {links: [[link, weight]], latency, levels: [share of its bytes by level]}
  constructor(cluster, tasks, capacity, route, alone) {
    Object.assign(this, { cluster, capacity, route, alone });
    this.ranks = tasks.map((own, number) => ({
      tasks: own, number, at: -1, done: new Set(), missing: new Set(), since: 0, waiting: 0, lanes: new Map(), spans: [],
    }));
    this.now = 0;
    this.end = 0;
    this.sequence = 0;
    this.events = new Heap();
    this.posted = new Map();
    this.pairs = new Map();
    this.crossing = capacity.map(() => new Map());
    this.changed = new Set();
    this.sent = cluster.levels.map(() => 0);
    this.busy = capacity.map(() => 0);
    this.transfers = [];
    this.cores = new Cores(this, alone ? cluster.cores / cluster.world : cluster.cores);
  }

  run() {
    for (const rank of this.ranks) this.advance(rank);
    this.shareLinks();
    while (this.events.size) {
      this.now = this.events.items[0][0];
      const until = this.now + SIMULTANEOUS;
      while (this.events.size && this.events.items[0][0] <= until) this.events.pop()[2]();
      if (this.changed.size) this.shareLinks();
    }
    const stuck = this.ranks.find((rank) => rank.at < rank.tasks.length);
    if (stuck) throw new Error(`rank ${stuck.number} never got past task ${stuck.at}`);
    return this.end; // not the last event, which may be the old end of a transfer that became faster
  }

  schedule(seconds, act) {
    this.sequence += 1;
    this.events.push([this.now + seconds, this.sequence, act]);
  }

  advance(rank) {
    for (rank.at += 1; rank.at < rank.tasks.length; rank.at += 1) {
      const task = rank.tasks[rank.at];
      if (task.parts) {
        const start = this.now;
        const end = () => {
          rank.spans.push({ start, end: this.now, task });
          this.advance(rank);
        };
        if (this.cluster.cores) this.cores.add(task.seconds, end);
        else this.schedule(task.seconds, end);
        return;
      }
      if (task.wait) {
        const missing = task.wait.filter((number) => !rank.done.has(number));
        if (missing.length) {
          rank.missing = new Set(missing);
          rank.since = this.now;
          return;
        }
      } else {
        this.post(rank, task);
      }
    }
    this.end = this.now;
  }

  arrive(rank, number) {
    rank.done.add(number);
    if (!rank.missing.delete(number) || rank.missing.size) return;
    rank.waiting += this.now - rank.since;
    rank.spans.push({ start: rank.since, end: this.now, task: rank.tasks[rank.at] });
    this.advance(rank);
  }

  post(rank, task) {
    const batches = new Map();
    for (const message of task.post) {
      let batch = null;
      if (this.cluster.transport === "nccl") {
        batch = batches.get(message.lane);
        if (!batch) {
          if (!rank.lanes.has(message.lane)) rank.lanes.set(message.lane, []);
          batch = { open: 0, queue: rank.lanes.get(message.lane), ready: [] };
          batches.set(message.lane, batch);
          batch.queue.push(batch);
        }
        batch.open += 1;
      }
      const ends = message.send ? [rank.number, message.peer] : [message.peer, rank.number];
      const key = this.alone ? `${message.lane}` : `${message.lane} ${ends}`;
      if (!this.posted.has(key)) this.posted.set(key, [[], []]);
      const [sends, receives] = this.posted.get(key);
      (message.send ? sends : receives).push({ rank, message, batch, step: task.step, at: this.now });
      if (sends.length && receives.length) this.match(sends.shift(), receives.shift());
    }
  }

  match(send, receive) {
    const path = this.route(send.rank.number, send.message);
    path.levels.forEach((share, level) => (this.sent[level] += share * send.message.bytes));
    let batches = [send.batch, receive.batch].filter((batch) => batch !== null);
    if (!batches.length) {
      const key = `${send.message.lane} ${send.rank.number} ${send.message.peer}`;
      if (!this.pairs.has(key)) this.pairs.set(key, []);
      batches = [{ open: 1, queue: this.pairs.get(key), ready: [] }];
      batches[0].queue.push(batches[0]);
    }
    const transfer = {
      send, receive, path, batches, left: send.message.bytes, parts: 1, rate: 0, since: 0, version: 0,
      posted: this.now, start: 0, end: 0,
    };
    this.transfers.push(transfer);
    if (batches.every((batch) => batch.queue[0] === batch)) this.start(transfer);
    else for (const batch of new Set(batches)) batch.ready.push(transfer);
  }

  start(transfer) {
    transfer.start = this.now;
    let handling = this.cluster.device.handle;
    this.cluster.levels.forEach(({ socket }, at) => {
      if (socket) handling += (transfer.path.levels[at] * transfer.left) / socket;
    });
    let latency = transfer.path.latency;
    if (this.cluster.cores && handling) {
      transfer.parts += 1;
      this.cores.add(2 * handling, () => this.endPart(transfer));
    } else {
      latency += handling;
    }
    this.schedule(latency, () => this.flow(transfer));
  }

  flow(transfer) {
    if (!transfer.path.links.length || !transfer.left) {
      this.endPart(transfer);
      return;
    }
    transfer.since = this.now;
    for (const [link, weight] of transfer.path.links) {
      this.crossing[link].set(transfer, weight);
      this.busy[link] += (weight * transfer.left) / this.capacity[link];
      this.changed.add(link);
    }
  }

  shareLinks() {
    const links = this.changed, touched = new Set(), todo = [...links];
    this.changed = new Set();
    while (todo.length) {
      for (const transfer of this.crossing[todo.pop()].keys()) {
        if (touched.has(transfer)) continue;
        touched.add(transfer);
        for (const [link] of transfer.path.links) {
          if (!links.has(link)) {
            links.add(link);
            todo.push(link);
          }
        }
      }
    }
    for (const [transfer, rate] of this.fairRates(links)) {
      if (rate === transfer.rate) continue;
      transfer.left -= transfer.rate * (this.now - transfer.since);
      transfer.rate = rate;
      transfer.since = this.now;
      transfer.version += 1;
      const version = transfer.version;
      this.schedule(Math.max(transfer.left, 0) / rate, () => this.endFlow(transfer, version));
    }
  }

  fairRates(links) {
    const rates = new Map(), room = new Map(), weight = new Map();
    for (const link of links) {
      if (!this.crossing[link].size) continue;
      room.set(link, this.capacity[link]);
      let total = 0;
      for (const each of this.crossing[link].values()) total += each;
      weight.set(link, total);
    }
    while (room.size) {
      let fullest = -1, least = Infinity;
      for (const [link, free] of room) {
        const rate = free / weight.get(link);
        if (rate < least) [fullest, least] = [link, rate];
      }
      for (const transfer of this.crossing[fullest].keys()) {
        if (rates.has(transfer)) continue;
        rates.set(transfer, least);
        for (const [link, load] of transfer.path.links) {
          if (link === fullest || !room.has(link)) continue;
          room.set(link, Math.max(room.get(link) - load * least, 0));
          weight.set(link, weight.get(link) - load);
          if (weight.get(link) < 1e-9) room.delete(link);
        }
      }
      room.delete(fullest);
    }
    return rates;
  }

  endFlow(transfer, version) {
    if (version !== transfer.version) return;
    for (const [link] of transfer.path.links) {
      this.crossing[link].delete(transfer);
      this.changed.add(link);
    }
    this.endPart(transfer);
  }

  endPart(transfer) {
    transfer.parts -= 1;
    if (transfer.parts) return;
    transfer.end = this.now;
    for (const batch of transfer.batches) this.shrink(batch);
    for (const end of [transfer.send, transfer.receive]) this.arrive(end.rank, end.message.number);
  }

  shrink(batch) {
    batch.open -= 1;
    if (batch.open) return;
    batch.queue.shift();
    if (!batch.queue.length) return;
    for (const transfer of batch.queue[0].ready) {
      if (transfer.batches.every((other) => other.queue.length && other.queue[0] === other)) this.start(transfer);
    }
  }
}

class Cores {
  constructor(simulator, number) {
    Object.assign(this, { simulator, number, virtual: 0, since: 0, version: 0, sequence: 0, work: new Heap() });
  }

  rate() {
    return this.work.size ? Math.min(1, this.number / this.work.size) : 1;
  }

  add(seconds, act) {
    this.update();
    this.sequence += 1;
    this.work.push([this.virtual + seconds, this.sequence, act]);
    this.scheduleNext();
  }

  update() {
    this.virtual += (this.simulator.now - this.since) * this.rate();
    this.since = this.simulator.now;
  }

  scheduleNext() {
    this.version += 1;
    if (!this.work.size) return;
    const version = this.version;
    const seconds = Math.max(this.work.items[0][0] - this.virtual, 0) / this.rate();
    this.simulator.schedule(seconds, () => this.endWork(version));
  }

  endWork(version) {
    if (version !== this.version) return;
    this.update();
    const ended = [];
    while (this.work.size && this.work.items[0][0] <= this.virtual + SIMULTANEOUS) ended.push(this.work.pop());
    this.scheduleNext();
    for (const [, , act] of ended) act();
  }
}

// --- links

function spansOf(cluster) {
  return cluster.levels.map((_, at) => cluster.levels.slice(at + 1).reduce((total, level) => total * level.size, 1));
}

// Levels whose links a message uses: the outermost one at which its ends differ, and the ones inside it but the last.
function crossed(cluster, rank, peer) {
  const spans = spansOf(cluster);
  for (let level = 0; level < spans.length; level++) {
    if (Math.floor(rank / spans[level]) !== Math.floor(peer / spans[level])) {
      const levels = [];
      for (let at = level; at < Math.max(level + 1, spans.length - 1); at++) levels.push(at);
      return levels;
    }
  }
  return [];
}

// Lanes under compute have few channels: how many times longer they take on each level's links (planner/pricing.py).
function slowdown(cluster, schedule) {
  const slower = cluster.levels.map((level) => (level.under_compute ? Math.max(level.bandwidth / level.under_compute, 1) : 1));
  const hasFew = schedule.by_heads.map((heads) => schedule.groups > 1 || !heads); // by lane: one per level of the plan
  return (lane, at) => (hasFew[lane] ? slower[at] : 1);
}

class Wires {
  constructor(cluster, schedule) {
    this.cluster = cluster;
    this.slowdown = slowdown(cluster, schedule);
    this.spans = spansOf(cluster);
    this.first = [];
    this.capacity = [];
    cluster.levels.forEach((level, at) => {
      this.first.push(this.capacity.length);
      const ways = level.duplex ? 2 : 1;
      const number = level.peer ? cluster.world * level.size : (cluster.world / (level.shared ? this.spans[at] : 1)) * ways;
      for (let link = 0; link < number; link++) this.capacity.push(level.bandwidth);
    });
    this.paths = new Map();
  }

  route(rank, message) {
    const world = this.cluster.world;
    const key = (message.lane * world + rank) * world + message.peer;
    if (!this.paths.has(key)) {
      const levels = crossed(this.cluster, rank, message.peer);
      const links = levels.flatMap((level) =>
        this.links(level, rank, message.peer).map((link) => [link, this.slowdown(message.lane, level)]));
      const latency = Math.max(0, ...levels.map((level) => this.cluster.levels[level].latency));
      this.paths.set(key, { links, latency, levels: this.cluster.levels.map((_, at) => (levels.includes(at) ? 1 : 0)) });
    }
    return this.paths.get(key);
  }

  links(at, rank, peer) {
    const level = this.cluster.levels[at];
    if (level.peer) {
      const [one, other] = level.duplex ? [rank, peer] : [Math.min(rank, peer), Math.max(rank, peer)];
      return [this.first[at] + one * level.size + (other % level.size)];
    }
    const ways = level.duplex ? 2 : 1;
    const [out, into] = [rank, peer].map((end) => (level.shared ? Math.floor(end / this.spans[at]) : end));
    return [this.first[at] + out * ways, this.first[at] + into * ways + ways - 1];
  }
}

// The rank that stands for all, and the routes of its messages: how many messages share each link at the same time.
// That is known for lanes whose ranks are all behind the same link or all behind different ones. For others it is
// counted in the programs of the middle member's ranks.
function representative(cluster, schedule, prices, pass) {
  const spans = spansOf(cluster), last = cluster.levels.length - 1, inner = cluster.levels[last];
  const laneRoute = (crossing, shares, own) => ({
    links: [...crossing].map(([at, number]) => {
      const level = cluster.levels[at];
      return [at, (level.shared ? number : own.get(at)) * (level.duplex ? 1 : 2)];
    }),
    latency: Math.max(0, ...[...crossing.keys()].map((at) => cluster.levels[at].latency)),
    levels: cluster.levels.map((_, at) => shares.get(at) || 0),
  });
  const known = new Map(), counted = new Map();
  schedule.sizes.forEach((size, lane) => {
    const stride = schedule.sizes.slice(lane + 1).reduce((a, b) => a * b, 1);
    if (!spans.every((span) => stride % span === 0 || span % (stride * size) === 0)) return;
    const levels = stride < cluster.world ? crossed(cluster, 0, stride) : [];
    const alike = new Map(levels.map((at) => [at, 1]));
    known.set(lane, laneRoute(new Map(levels.map((at) => [at, spans[at]])), alike, alike));
  });
  let rank = prices.busiest(pass);
  if (known.size < schedule.sizes.length) {
    const first = Math.floor(cluster.levels[0].size / 2) * spans[0], sendsBy = (from) => sendsOf(schedule.program(pass, from));
    const member = Array.from({ length: spans[0] }, (_, at) => [first + at, sendsBy(first + at)]);
    const longest = Math.max(...member.map(([, own]) => own.length));
    const alike = member.filter(([, own]) => own.length === longest); // starC leaves some ranks at their own place
    if (sendsBy(rank).length !== longest) rank = alike[0][0];
    const sends = sendsBy(rank);
    let position = 0;
    for (const { messages } of schedule.program(pass, rank).steps.flat().filter((event) => event.messages)) {
      const lanes = new Map(); // positions of the messages that a post sends over one lane
      for (const { lane } of messages.filter((message) => message.send)) lanes.set(lane, [...(lanes.get(lane) || []), position++]);
      for (const [lane, positions] of lanes) {
        if (known.has(lane)) continue;
        const pairs = positions.map((at) => alike.map(([from, own]) => [from, own[at].peer]));
        const paths = countedPaths(cluster, spans, pairs);
        positions.forEach((at, index) => counted.set(sends[at].number, laneRoute(...paths[index])));
      }
    }
  }
  const slower = slowdown(cluster, schedule);
  const route = (_, message) => {
    const shared = known.get(message.lane) || counted.get(message.number);
    const path = { ...shared, links: shared.links.map(([link, load]) => [link, load * slower(message.lane, link)]) };
    if (!inner.peer || !path.links.length || path.links[path.links.length - 1][0] !== last) return path;
    const links = [...path.links.slice(0, -1), [last + 1 + (message.peer % inner.size), path.links[path.links.length - 1][1]]];
    return { ...path, links };
  };
  return { rank, route };
}

// For each message that a post sends over a lane, by level: how many of a member cross it, which share of all that is,
// and how many of one device's messages cross it. `posts`: for each message, [rank, peer] of the ranks that send it.
function countedPaths(cluster, spans, posts) {
  const crossings = (pairs, index) => {
    const counts = new Map();
    for (const [from, peer] of pairs) {
      for (const level of crossed(cluster, from, peer)) {
        if (!counts.has(level)) counts.set(level, new Map());
        const by = counts.get(level), key = index(from, level);
        by.set(key, (by.get(key) || 0) + 1);
      }
    }
    return counts;
  };
  const over = (counts, of) => new Map([...counts].map(([level, by]) => [level, of([...by.values()])]));
  const own = over(crossings(posts.flat(), (from) => from), (numbers) => Math.max(...numbers) / posts.length);
  return posts.map((pairs) => {
    const counts = crossings(pairs, (from, level) => Math.floor(from / spans[level]));
    const shares = over(counts, (numbers) => numbers.reduce((a, b) => a + b, 0) / pairs.length);
    return [over(counts, (numbers) => Math.max(...numbers)), shares, own];
  });
}

const sendsOf = (program) => program.steps.flat().flatMap((event) => (event.messages || []).filter((m) => m.send));

const MOST_SIMULATED = 64; // ranks; in larger worlds one rank stands for all

// Simulates one pass. `ranks` are those that were simulated, `busy` the seconds of each level's busiest link.
function simulate(cluster, schedule, running, pass, alone = schedule.world > MOST_SIMULATED) {
  const world = schedule.world;
  let simulator, ranks, firsts; // firsts: the first link of each level
  if (alone) {
    running.prices.inStep = true;
    const { rank, route } = representative(cluster, schedule, running.prices, pass);
    const capacity = cluster.levels.map((level) => level.bandwidth);
    const inner = cluster.levels[cluster.levels.length - 1];
    if (inner.peer) for (let at = 0; at < inner.size; at++) capacity.push(inner.bandwidth);
    [ranks, firsts] = [[rank], cluster.levels.map((_, at) => at)];
    simulator = new PageSimulator(cluster, [running.tasks(pass, rank)], capacity, route, true);
  } else {
    ranks = Array.from({ length: world }, (_, rank) => rank);
    const wires = new Wires(cluster, schedule);
    firsts = wires.first;
    const tasks = ranks.map((rank) => running.tasks(pass, rank));
    simulator = new PageSimulator(cluster, tasks, wires.capacity, (rank, message) => wires.route(rank, message), false);
  }
  const seconds = simulator.run();
  const waiting = simulator.ranks.reduce((total, rank) => total + rank.waiting, 0) / ranks.length;
  const sent = simulator.sent.map((bytes) => bytes / ranks.length);
  const busy = firsts.map((first, at) => simulator.busy.slice(first, firsts[at + 1]).reduce((a, b) => Math.max(a, b)));
  return { seconds, waiting, ranks, alone, simulator, sent, busy };
}

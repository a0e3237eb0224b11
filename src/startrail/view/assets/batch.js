"use strict";
// What a call runs, as the views ask for it. `DenseRun`: the plan's own schedule. `Batch`: with a window or documents,
// the plan's program or `direct` in every zone, after routing/route.py, schedule/parts.py and planner/sparse/predict.py.

const NARROW = 4, MAX_SHARDS = 8, MESSAGES_PER_PART = 2 ** 24, MATRIX_CELLS = 128;

class DenseRun {
  constructor(cluster, schedule, call, mask) {
    Object.assign(this, { schedule, mask, world: schedule.world, prices: new PagePrices(cluster, schedule, call, mask), kept: new Map() });
    this.layout = this.prices.layout;
    this.numCells = this.layout.num;
    this.colours = schedule.numShards;
  }

  program(pass, rank) {
    return this.schedule.program(pass, rank);
  }

  tasks(pass, rank) {
    return this.prices.tasks(pass, rank);
  }

  isVisible({ row, column }) {
    return this.layout.pairs(this.mask, row, column) > 0;
  }

  // The colour of the keys of a block, and that of the rank that computes it.
  colour({ column }) {
    return column;
  }

  colourOf({ owner }) {
    return owner;
  }

  blockId({ row, column }) {
    return row * this.schedule.numShards + column;
  }

  range(cell) {
    return this.layout.range(cell);
  }

  // The block of a cell of the matrix and who computes it.
  block(pass, q, k) {
    const row = this.layout.shardOfChunk(q), column = this.layout.shardOfChunk(k);
    const owner = this.schedule.owners(pass)[row * this.schedule.numShards + column];
    return { row, column, owner, id: this.blockId({ row, column }), schedule: this.schedule, first: 0, says: "" };
  }

  // The piece of a sender that a received one came from.
  cameFrom(_, column) {
    return column;
  }
}

class Batch {
  // scheduleOf(plan, world): schedules of the zones' plans.
  constructor(cluster, schedule, call, mask, scheduleOf) {
    Object.assign(this, { cluster, schedule, call, mask, world: schedule.world, colours: schedule.world, kept: new Map() });
    const inside = [{ level: 0, schedule }, ...schedule.inside.map(([level, plan, size]) => ({ level, schedule: scheduleOf(plan, size) }))];
    const slots = (of) => Array.from({ length: of.world }, (_, rank) => of.shardOf(rank) * of.numHeads + of.headOf(rank));
    this.zones = zonesOf(inside.map((each) => ({ level: each.level, slots: slots(each.schedule) })), mask.ends);
    const ofLevel = new Map(inside.map((each) => [each.level, each.schedule]));
    this.routes = this.zones.map((zone, index) => new ZoneRoute(this, zone, ofLevel.get(zone.level), index));
    this.ofRank = Array.from({ length: this.world }, (_, rank) => this.routes.filter(({ zone }) => rank >= zone.first && rank < zone.first + zone.size));
    this.local = sum(this.ofRank[0].map(({ zone }) => zone.tokens));
    this.numCells = Math.min(MATRIX_CELLS, call.length);
    this.owners = this.routes.flatMap((route) => route.zone.runs.flatMap((runs, member) => runs.map(([start, count]) => ({ start, count, route, member }))));
    this.owners = this.owners.filter(({ start }) => start < call.length).sort((a, b) => a.start - b.start);
  }

  // The programs of a rank's zones, step by step in the order in which they run.
  program(pass, rank) {
    const key = `${pass} ${rank}`;
    if (!this.kept.has(key)) {
      const programs = this.ofRank[rank].map((route, part) => route.program(pass, rank - route.zone.first, part));
      const order = this.order(pass, rank);
      const steps = order.map(([part, number]) => programs[part].steps[number]);
      this.kept.set(key, { steps, programs, order, sends: programs.flatMap((program) => program.sends) });
    }
    return this.kept.get(key);
  }

  // [part, step] in the order in which a rank runs them (schedule/parts.py).
  order(pass, rank) {
    const first = [], silent = [];
    let rest = [];
    this.ofRank[rank].forEach((route, part) => {
      const { steps, begun, posts } = route.outline(pass, rank - route.zone.first);
      const all = Array.from({ length: steps }, (_, number) => [part, number]);
      if (!posts) silent.push(...all);
      else {
        first.push(...all.slice(0, begun));
        rest = [...all.slice(begun), ...rest];
      }
    });
    return pass === "forward" ? [...first, ...silent, ...rest] : [...first, ...rest, ...silent];
  }

  tasks(pass, rank) {
    const tasks = [], { steps, programs, order } = this.program(pass, rank), half = this.cluster.device.start / 2;
    const pricings = programs.map((program, part) => new ProgramPricing(this.ofRank[rank][part].prices, pass, program, tasks));
    const edge = (other, step) => half && tasks.push({ seconds: half, parts: [{ seconds: half, step, other }], step });
    edge("start", 0);
    order.forEach(([part], at) => {
      pricings[part].step(steps[at], at);
      pricings[part].flush();
    });
    for (const pricing of pricings) pricing.finish();
    edge("end", order.length - 1);
    return tasks;
  }

  // What runs, by the share of tokens.
  describe() {
    const shares = new Map();
    for (const { zone, chosen } of this.routes) {
      const how = zone.size === 1 ? "on one rank" : `over ${zone.size} ranks by ${chosen}`;
      shares.set(how, (shares.get(how) || 0) + zone.tokens * zone.size);
    }
    const total = this.local * this.world;
    return [...shares].map(([how, tokens]) => `${((100 * tokens) / total).toFixed(0)} % of the tokens ${how}`).join(", ");
  }

  // Every query sees itself, so the queries of a run see one interval of keys.
  isVisible({ route, row, column }) {
    const { mask } = this, key = `${route.index}:${row}:${column} seen`;
    if (!this.kept.has(key)) {
      const keys = route.prices.runsOf(column);
      this.kept.set(key, route.prices.runsOf(row).some(([start, count]) => {
        const low = mask.visible(start)[0], [, high] = mask.visible(start + count - 1);
        const at = firstOf(0, keys.length, (each) => runEnd(keys[each]) > low);
        return at < keys.length && keys[at][0] < high;
      }));
    }
    return this.kept.get(key);
  }

  // Colours follow the order of tokens: ranks that split the heads of a shard are neighbours.
  colour({ route, column }) {
    return this.slot(route.rankOf(column));
  }

  colourOf({ route, owner, direct }) {
    return this.slot(direct ? route.zone.first + owner : route.rankOf(owner));
  }

  slot(rank) {
    return this.schedule.shardOf(rank) * this.schedule.numHeads + this.schedule.headOf(rank);
  }

  blockId({ route, row, column }) {
    return `${route.index}:${row}:${column}`;
  }

  range(cell) {
    return [cell, cell + 1].map((at) => Math.floor((at * this.call.length) / this.numCells));
  }

  ownerOf(position) {
    const at = firstOf(0, this.owners.length, (each) => this.owners[each].start > position) - 1;
    return this.owners[at];
  }

  // The block of the pair of tokens in the middle of what a cell shows.
  block(pass, q, k) {
    const { rows, keys } = this.mask.reach(...this.range(q), ...this.range(k));
    const query = Math.floor((rows[0] + rows[1] - 1) / 2), [low, high] = this.mask.visible(query);
    const [k0, k1] = [Math.max(low, keys[0]), Math.min(high, keys[1])], key = Math.floor((k0 + k1 - 1) / 2);
    const { route, member } = this.ownerOf(query), other = this.ownerOf(key);
    const { schedule, fetches, zone } = route;
    const says = `Query ${query} and key ${key} are in ${route.where()}.`, more = { schedule, first: zone.first, route, says, key };
    if (fetches) {
      const edge = member === other.member ? null : fetches.edges.find((each) => each.receiver === member && each.runs.some((run) => key >= run[0] && key < runEnd(run)));
      const column = edge ? edge.number : member, id = this.blockId({ route, row: member, column });
      return { row: member, column, owner: member, id, ...more, direct: true };
    }
    const row = schedule.shardOf(member), column = schedule.shardOf(other.member);
    return { row, column, owner: schedule.owners(pass)[row * schedule.numShards + column], id: this.blockId({ route, row, column }), ...more };
  }

  cameFrom({ route, key }, column) {
    if (!route.fetches) return column;
    const source = route.fetches.bundle(column).pieces.find(([start, count]) => key >= start && key < start + count)[2];
    return source ? source.number : null;
  }
}

// How the tokens of one zone are attended: by the plan's program or by direct fetches, whichever sends fewer bytes.
class ZoneRoute {
  constructor(batch, zone, schedule, index) {
    Object.assign(this, { batch, zone, schedule, index, fetches: null, directBytes: null });
    const { cluster, call, mask } = batch, layout = { tokens: zone.tokens * schedule.numHeads };
    this.sizes = sizesOf(schedule, call, layout);
    this.planBytes = this.bytesOfPlan();
    this.chosen = schedule.plan;
    if (zone.size > 1 && this.isNarrow()) {
      const owned = zone.runs.map((_, member) => zone.runsOf([member]));
      const fetches = new Fetches(owned, owned.map((own) => neededKeys(mask, own)), schedule.sizes);
      const direct = { plan: "direct", numHeads: 1, numShards: zone.size, groups: 1, sums: [] };
      const sizes = sizesOf(direct, call, { tokens: zone.tokens });
      this.perToken = { kv: Math.floor(sizes.kv / zone.tokens), dkv: Math.floor(sizes.dkv / zone.tokens) };
      this.directBytes = fetches.tokensByLevel().map((count) => count * (2 * this.perToken.kv + this.perToken.dkv));
      const at = this.directBytes.findIndex((bytes, level) => bytes !== this.planBytes[level]);
      if (at >= 0 && this.directBytes[at] < this.planBytes[at]) Object.assign(this, { fetches, direct, sizes, chosen: "direct" });
    }
    const shards = this.fetches ? this.direct : schedule;
    this.prices = new TilePrices(cluster, shards, call, mask, this.fetches ? { tokens: zone.tokens } : layout, (shard) => this.runsOf(shard));
  }

  bytesOfPlan() {
    const { schedule, sizes } = this, members = schedule.forward.of ? schedule.world : 1, totals = schedule.sizes.map(() => 0);
    for (const pass of ["forward", "backward"]) {
      for (let member = 0; member < members; member++) {
        schedule.closedBytes(pass, member, sizes).forEach((bytes, level) => (totals[level] += (bytes * schedule.world) / members));
      }
    }
    return totals.map(Math.round);
  }

  // No rank of the zone sees more than half of the others' tokens, or NARROW times its own.
  isNarrow() {
    const { zone, batch: { mask } } = this, most = Math.min(NARROW, (zone.size - 1) / 2) * zone.tokens;
    return zone.runs.every((_, member) => tokensOf(neededKeys(mask, zone.runsOf([member]))) <= most);
  }

  // The tokens of a shard or bundle.
  runsOf(shard) {
    const { zone, schedule, fetches } = this;
    if (fetches) return shard < zone.size ? zone.runsOf([shard]) : fetches.bundle(shard).runs;
    return zone.runsOf(Array.from({ length: schedule.numHeads }, (_, head) => schedule.rankOf(shard, head)));
  }

  // Padding alone, which makes all ranks hold equally many tokens.
  get isPadding() {
    return this.zone.runs.every((runs) => runs.every(([start]) => start >= this.zone.length));
  }

  // The first rank that holds a shard, or that sends a bundle.
  rankOf(shard) {
    const { zone, schedule, fetches } = this;
    if (fetches) return zone.first + (shard < zone.size ? shard : fetches.bundle(shard).sender);
    return zone.first + schedule.rankOf(shard, 0);
  }

  // Encoded events of a member.
  events(pass, member) {
    const { first } = this.zone;
    if (this.fetches) return this.fetches.walk(member, pass, first);
    return this.schedule.events(pass, member).map((step) => step.map((event) =>
      event[0] === POST ? [POST, event[1].map(([flags, lane, peer, piece]) => [flags, lane, peer + first, piece]), event[2]] : event));
  }

  program(pass, member, part) {
    const { batch, zone, schedule } = this, levels = schedule.sizes.length;
    const channel = batch.cluster.transport === "nccl" ? 0 : 2 * levels * zone.level;
    const options = { base: part * MESSAGES_PER_PART, channel, levels, fetches: this.fetches, name: (shard) => `${this.rankOf(shard)}` };
    const program = namedProgram(this.events(pass, member), this.fetches ? this.direct : schedule, options);
    for (const event of program.steps.flat()) for (const each of [event, ...(event.messages || [])]) each.route = this;
    return program;
  }

  // How many steps there are, how many of them begin the program, and whether any sends.
  outline(pass, member) {
    if (!this.fetches) {
      const { templates, of, begun } = this.schedule[pass], at = of ? of[member] : 0;
      return { steps: templates[at].length, begun: begun[at], posts: templates[at].flat().some(([type]) => type === POST) };
    }
    const steps = this.fetches.steps(member, pass);
    const at = steps.findIndex((step) => step.after.length || step.blocks.length);
    const begun = at < 0 ? steps.length : steps[at].after.length ? at : at + 1;
    return { steps: steps.length, begun, posts: steps.some((step) => step.posts.length > 0) };
  }

  // What a member sends over each level by closed form, as terms {text, value, bytes}.
  terms(pass, member, level) {
    const { fetches, sizes, schedule, zone } = this;
    if (zone.size === 1) return [];
    if (!fetches) return schedule.terms(pass, level, member).map(({ text, value, kinds }) => ({ text, value, kinds, bytes: sum(kinds.map((kind) => sizes[kind])) }));
    const sent = fetches.tokensByLevel((edge) => edge.sender === member)[level];
    const got = fetches.tokensByLevel((edge) => edge.receiver === member)[level];
    const terms = [{ text: "tokens sent", value: sent, kinds: ["kv"], bytes: this.perToken.kv }];
    if (pass === "backward") terms.push({ text: "tokens fetched", value: got, kinds: ["dkv"], bytes: this.perToken.dkv });
    return terms.filter(({ value }) => value > 0);
  }

  // What the program of a member sends over each level.
  counted(pass, member) {
    const totals = this.schedule.sizes.map(() => 0), program = this.program(pass, member, 0);
    const pricing = new ProgramPricing(this.prices, pass, program, []);
    for (const { pieces, level, overHeads } of sendsOf(program)) {
      const bytes = sum(pieces.map((piece) => pricing.bytesOf(piece)));
      totals[level] += overHeads ? bytes / program.numHeads : bytes;
    }
    return totals;
  }

  where() {
    const { zone, chosen } = this, last = zone.first + zone.size - 1;
    return zone.size === 1 ? `a document that only rank ${zone.first} holds` : `the zone of ranks ${zone.first} to ${last}, which runs ${chosen}`;
  }
}

// Prices of one zone: blocks cost what their visible tiles do, as the backend cuts them.
class TilePrices extends PagePrices {
  constructor(cluster, schedule, call, mask, layout, runsOf) {
    super(cluster, schedule, call, mask, layout);
    this.cut = new Map();
    this.runs = new Map();
    this.runsOf = (shard) => {
      if (!this.runs.has(shard)) this.runs.set(shard, runsOf(shard));
      return this.runs.get(shard);
    };
  }

  tiles(row, column) {
    const key = `${row} ${column}`;
    if (!this.cut.has(key)) {
      const segments = segmentsOf(this.mask, this.runsOf(row), this.runsOf(column));
      this.cut.set(key, this.device.occupancy ? bandsOf(segments) : coverOf(segments));
    }
    return this.cut.get(key);
  }

  block(pass, queries, shard, newRow, newKey) {
    const shards = this.schedule.numShards;
    let row = queries, column = shard;
    if (this.mask.window === null && shards > MAX_SHARDS && column < shards) { // shards of the same documents are alike
      const middle = Math.floor(shards / 2);
      [row, column] = [middle, column < row ? middle - 1 : column > row ? middle + 1 : middle];
    }
    const key = `${pass} ${row} ${column} ${newRow} ${newKey}`;
    if (!this.blocks.has(key)) {
      const all = tokensOf(this.runsOf(column));
      this.blocks.set(key, sum(this.tiles(row, column).map((tile, at) => {
        const fresh = [newRow, newKey].map((isNew) => isNew && at === 0);
        return this.tileKernel(pass, tile) + this.accumulate(pass, rowsOf(tile), tile.k1 - tile.k0, ...fresh, all);
      })));
    }
    return this.blocks.get(key);
  }

  tileKernel(pass, tile) {
    const rows = rowsOf(tile), keys = tile.k1 - tile.k0;
    if (tile.form === "masked") return this.kernel(pass, rows * keys, rows, false); // the kernel computes all of it
    const seconds = this.kernel(pass, areaOf(tile), rows, tile.form !== "full", tile.packs || 1);
    if (tile.form !== "anticausal") return seconds;
    const bytes = this.sizes.headsPerRank * this.headDim * (rows + keys) * this.itemsize;
    return seconds + this.copy(bytes * (pass === "forward" ? 2 : 4)); // inputs and results are copied in reverse order
  }
}

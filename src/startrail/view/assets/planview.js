"use strict";
// One plan on the page: its machine, matrix, timeline and bytes, with a text for everything that is drawn.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const joined = (texts) => (texts.length > 8 ? `${texts.slice(0, 8).join(", ")} and ${texts.length - 8} more` : texts.join(", "));
const tableRow = (tag, texts) => element("tr", {}, ...texts.map((text, at) => element(tag, at > 2 ? { class: "number" } : {}, text)));
const ranksText = ({ first, size }) => (size === 1 ? `rank ${first}` : `ranks ${first} to ${first + size - 1}`);

class PlanView {
  constructor(app) {
    this.app = app;
    const canvas = (name, label) => element("canvas", { class: name, tabindex: "0", role: "application", "aria-label": label });
    this.title = element("h2");
    this.summary = element("p");
    this.inequality = element("p", { class: "inequality" });
    this.machineCanvas = canvas("machine", "");
    this.matrixCanvas = canvas("matrix", "");
    this.timelineCanvas = canvas("timeline", "");
    this.now = element("p", { class: "now" });
    this.details = element("div", { class: "details" });
    this.table = element("table", { class: "bytes" });
    this.routesTable = element("table", { class: "routes" });
    this.routesNote = element("p", { class: "quiet" });
    this.note = element("p", { class: "quiet" });
    const scrolled = (table) => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table);
    this.routes = element("div", {}, element("h3", {}, "What runs"), scrolled(this.routesTable), this.routesNote);
    this.headShare = element("p", { class: "quiet" });
    this.root = element(
      "section", {}, this.title, this.summary, this.inequality, this.routes,
      element("div", { class: "figures" },
        element("div", {}, element("h3", {}, "Machine"), this.machineCanvas, this.now),
        element("div", {}, element("h3", {}, "Attention matrix"), this.matrixCanvas, this.headShare, this.details)),
      element("div", {}, element("h3", {}, "Timeline"), this.timelineCanvas),
      element("div", {}, element("h3", {}, "Bytes per level"), scrolled(this.table), this.note),
    );
    this.machine = new MachineFigure(this.machineCanvas);
    this.matrix = new MatrixFigure(this.matrixCanvas);
    this.timeline = new TimelineFigure(this.timelineCanvas);
    this.listen();
  }

  listen() {
    const at = (event) => {
      const box = event.target.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.machineCanvas.addEventListener("click", (event) => {
      const rank = this.machine.rankAt(...at(event));
      if (rank !== null) this.app.change({ rank });
    });
    this.machineCanvas.addEventListener("pointermove", (event) => {
      const rank = this.machine.plan ? this.machine.rankAt(...at(event)) : null;
      this.machineCanvas.title = rank === null ? "" : this.rankText(rank, this.app.step);
    });
    this.matrixCanvas.addEventListener("click", (event) => {
      const cell = this.matrix.cellAt(...at(event));
      if (cell) this.app.change({ cell: cell.join("-") });
    });
    this.timelineCanvas.addEventListener("click", (event) => {
      const { rank, seconds } = this.timeline.at(...at(event));
      this.app.change({ rank: rank === null ? this.rank : rank, step: this.stepAt(rank === null ? this.rank : rank, seconds) });
    });
    const keys = (canvas, act) => canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      act(move);
    });
    keys(this.machineCanvas, ([down, right]) => {
      this.app.change({ rank: this.neighbour(down + right) });
    });
    keys(this.matrixCanvas, (move) => {
      const most = this.recording.cells - 1;
      const cell = (this.cell || [0, 0]).map((at, axis) => Math.max(0, Math.min(most, at + move[axis])));
      this.app.change({ cell: cell.join("-") });
    });
    keys(this.timelineCanvas, ([down, right]) => {
      if (right) this.app.change({ step: this.app.step + right });
      else this.app.change({ rank: this.neighbour(down) });
    });
  }

  // The recorded rank after or before the chosen one.
  neighbour(by) {
    const { ranks } = this.recording;
    return ranks[(ranks.indexOf(this.rank) + by + ranks.length) % ranks.length];
  }

  set(scene, recording, pass) {
    Object.assign(this, { scene, recording, pass, perNode: scene.per_node, result: recording[pass] });
    this.steps = Math.max(...recording.ranks.map((rank) => recording.program(pass, rank).steps.length));
    const other = recording[pass === "forward" ? "backward" : "forward"];
    this.seconds = recording.seconds;
    this.waits = (this.result.waiting + other.waiting) / this.seconds;
    this.sent = this.result.sent.map((bytes, at) => bytes + other.sent[at]);
  }

  // Of ranks that are not recorded, the first that is stands in.
  choose(rank, cell) {
    const ranks = this.recording.alone ? this.recording.timed(this.pass) : this.recording.ranks;
    this.rank = ranks.includes(rank) ? rank : ranks[0];
    this.cell = cell ? cell.map((at) => Math.min(at, this.recording.cells - 1)) : null;
  }

  isFar(rank, peer) {
    return this.scene.levels.length > 1 && Math.floor(rank / this.perNode) !== Math.floor(peer / this.perNode);
  }

  colour({ column }) {
    return shardColour(this.recording.shardColours[column], this.recording.colours);
  }

  ownerOf(block) {
    const [first] = this.recording.computed(this.pass, block);
    return first && first.rank;
  }

  doing(rank, step) {
    const events = this.recording.program(this.pass, rank).steps[step] || [];
    const of = (type) => events.filter((event) => event.type === type);
    const blocks = of(COMPUTE).filter((block) => !block.hidden);
    return { blocks, skipped: of(COMPUTE).length - blocks.length, messages: of(POST).flatMap((post) => post.messages), merges: of(COMBINE), zone: events.length ? events[0].zone : null };
  }

  blocksOfStep(step) {
    return new Set(this.recording.ranks.flatMap((rank) => this.doing(rank, step).blocks.map(({ block }) => block)));
  }

  // Remote pieces that a rank holds or awaits at a step.
  holds(rank, step) {
    const first = new Map(), last = new Map(), arrived = new Map(), texts = new Map();
    const keyOf = ({ kind, id, group }) => `${kind} ${id} ${group}`;
    this.recording.program(this.pass, rank).steps.forEach((events, at) => {
      for (const event of events) {
        for (const message of event.messages || []) {
          for (const piece of message.pieces) {
            if (message.send) last.set(keyOf(piece), at);
            else if (INPUTS.includes(piece.kind) && !first.has(keyOf(piece))) {
              first.set(keyOf(piece), at);
              texts.set(keyOf(piece), piece.text + this.otherZone(event.zone, rank, step));
            }
          }
        }
        if (event.type === AWAIT) arrived.set(keyOf(event.piece), at);
        if (event.type === COMPUTE) {
          for (const kind of NEEDS[this.pass]) last.set(keyOf({ kind, id: kind === "kv" ? event.column : event.row, group: event.group }), at);
        }
      }
    });
    const held = [], coming = [];
    for (const [key, at] of first) {
      if (at > step || (last.get(key) ?? at) < step) continue;
      (arrived.has(key) && arrived.get(key) <= step ? held : coming).push(texts.get(key));
    }
    return { held, coming };
  }

  // Names the zone of a piece if it is not that of the step.
  otherZone(zone, rank, step) {
    const now = this.doing(rank, step).zone;
    return !now || now === zone ? "" : ` (of ${ranksText(zone)})`;
  }

  rankText(rank, step) {
    const { blocks, skipped, messages, merges, zone } = this.doing(rank, step), names = this.recording.shardNames;
    const { held, coming } = this.holds(rank, step);
    const sends = messages.filter((message) => message.send).map(({ pieces, peer, overHeads }) =>
      `${overHeads ? "part of " : ""}${pieces.map((piece) => piece.text).join("+")} to rank ${peer}`);
    const parts = [];
    if (blocks.length) parts.push(`computes ${joined(blocks.map(({ row, column }) => `q${names[row]} × kv${names[column]}`))}`);
    if (skipped) parts.push(`skips ${skipped} block${skipped > 1 ? "s" : ""} that the mask hides`);
    if (sends.length) parts.push(`sends ${joined(sends)}`);
    if (merges.length) parts.push(`merges ${joined(merges.map((event) => event.piece.text))}`);
    if (held.length) parts.push(`holds ${joined(held)}`);
    if (coming.length) parts.push(`awaits ${joined(coming)}`);
    const where = !zone || !this.recording.sparse ? "" : zone.size === 1 ? ` (${zone.padding ? "padding" : "documents of its own"})` : ` (${zone.runs} on ${ranksText(zone)})`;
    return `Rank ${rank}${where} ${parts.join("; ") || "does nothing"}.`;
  }

  describe() {
    const { recording, result } = this, { words } = recording;
    this.title.textContent = recording.plan;
    this.summary.textContent =
      `${words[0].toUpperCase()}${words.slice(1)}. ${secondsText(this.seconds)} predicted for forward and backward, ranks wait ` +
      `${(100 * this.waits).toFixed(0)} % of it; this ${this.pass} pass takes ${secondsText(result.seconds)}.` +
      (recording.alone ? ` Rank ${this.rank} stands for all ${recording.world} ranks, as it has the most work: each runs the same program from its own place.` : "");
    this.inequality.textContent = this.inequalityText();
    this.routes.hidden = !recording.sparse;
    const shares = recording.heads, heads = +this.scene.settings.heads;
    this.headShare.textContent = recording.sparse
      ? "Colours: the rank that computes the cell. Empty cells are hidden by the mask. A dot marks this step."
      : shares > 1
      ? `Every cell is computed by ${shares} ranks, each for its own ${heads / shares} of ${heads} heads. Numbers are shards.`
      : "Colours and numbers: the rank that computes the cell. Empty cells are hidden by the mask. A dot marks this step.";
    if (recording.alone) this.headShare.textContent += " Grey cells are computed by ranks that this page does not hold.";
    this.fillTable();
  }

  // Can the transfers between nodes be hidden? The busiest link's seconds against a rank's compute.
  inequalityText() {
    const { result, scene } = this, compute = result.seconds - result.waiting;
    const [, bandwidth, shared] = scene.levels[0], link = result.busy[0], bytes = link * bandwidth;
    if (!bytes || scene.levels.length < 2) return "Nothing leaves a node.";
    const verdict = link > compute ? ">" : "≤";
    const meaning = link > compute ? "so transfers between nodes cannot be hidden" : "so transfers between nodes can be hidden";
    const evenly = shared && Math.abs(result.sent[0] * this.perNode - bytes) < 1e-6 * bytes;
    const what = evenly ? `${bytesText(result.sent[0])} × ${this.perNode} ranks` : `${bytesText(bytes)} over the busiest link`;
    return `${what} / ${(bandwidth / 1e9).toPrecision(3)} GB/s = ${secondsText(link)} ${verdict} ${secondsText(compute)} of work per rank, ${meaning}.`;
  }

  // --- bytes

  fillTable() {
    const { pass, rank, recording } = this, found = recording.bytes(pass, rank);
    const rows = found.map(({ zone, level, terms, closed, counted }) => {
      const where = !recording.sparse ? `level ${level}: ${recording.levels[level]}` : zone.size === 1 ? "alone" : `${zone.size} ranks, ${zone.runs}, level ${level}`;
      const formula = terms.map(([text, , kinds]) => `${text === "1" ? "" : `${text}·`}${kinds.includes("+") ? `(${kinds})` : kinds}`).join(" + ") || "0";
      const numbers = terms.map(([, times, , bytes]) => `${(+times.toPrecision(4)).toLocaleString("en")} × ${bytesText(bytes)}`).join(" + ") || "0";
      return tableRow("td", [where, formula, numbers, bytesText(closed), bytesText(counted)]);
    });
    for (const row of rows) for (const at of [1, 2]) row.children[at].classList.add("formula");
    const head = tableRow("th", [`rank ${rank}, ${pass}`, "closed form", "with these numbers", "= bytes", "counted"]);
    this.table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
    const off = `Off a node, per rank: ${bytesText(this.scene.levels.length > 1 ? this.result.sent[0] : 0)}.`;
    const pieces = ["q", "kv", ...(pass === "forward" ? ["out"] : ["do", "dq", "dkv"])], [{ sizes }] = recording.zones;
    this.note.textContent = recording.sparse ? off : `A whole piece: ${pieces.map((kind) => `${kind} ${bytesText(sizes[kind])}`).join(", ")}. ${off}`;
    if (recording.sparse) this.fillRoutes();
  }

  // The zones of the chosen rank, what each runs, and what the plan alone would send.
  fillRoutes() {
    const { recording, rank, scene } = this, length = +scene.settings.length, { local, world } = recording;
    const perRank = (bytes, size) => bytes.map((each) => bytesText(each / size)).join(" | ");
    const rows = recording.zonesOf(rank).map((zone) => {
      const alone = zone.size === 1, share = `${zone.tokens.toLocaleString("en")} (${((100 * zone.tokens) / local).toFixed(0)} %)`;
      const runs = !alone ? zone.runs : zone.padding ? "padding" : "alone";
      return tableRow("td", [share, ranksText(zone), runs, alone ? "nothing" : perRank(zone.sent, zone.size), zone.plan_sent ? perRank(zone.plan_sent, zone.size) : "–"]);
    });
    const head = tableRow("th", [`tokens of rank ${rank}`, "shared by", "runs", "sends", "the plan alone"]);
    const padding = (100 * local * world) / length - 100;
    this.routesNote.textContent =
      `Bytes per rank${recording.levels.length > 1 ? ", level by level" : ""}, both passes. ${scene.title}: ${local.toLocaleString("en")} per rank, ` +
      `${padding.toFixed(1)} % padding. On all ranks: ${recording.runs}. The plan or direct: by bytes, outermost level first.`;
    this.routesTable.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  // --- a cell

  cellText() {
    if (!this.cell) return ["Choose a cell to see who computes it, when, and how its keys got there."];
    const { recording, pass } = this, [q, k] = this.cell, { edges, rows, columns } = recording.matrix;
    const [queries, keys] = [q, k].map((at) => (edges[at + 1] > edges[at] ? `${edges[at]} to ${edges[at + 1] - 1}` : "padding"));
    const row = rows[q][k], column = columns[q][k];
    if (!row) return [`Queries ${queries}, keys ${keys}.`, "The mask hides all of it: nothing is computed here."];
    const of = (id) => (recording.sparse ? "" : ` (shard ${recording.shardNames[id]})`), zone = recording.zoneOf(row);
    const pairs = recording.pairs.get(`${q} ${k}`) || (edges[q + 1] - edges[q]) * (edges[k + 1] - edges[k]);
    const says = !recording.sparse ? "" : zone.size === 1 ? `They are in documents that only rank ${zone.first} holds.` : `They are in the zone of ${ranksText(zone)}, which runs ${zone.runs}.`;
    const lines = [`Queries ${queries}${of(row)}, keys ${keys}${of(column)}.`, `${pairs.toLocaleString("en")} visible pairs. ${says}`];
    const computed = recording.computed(pass, recording.blockId(row, column));
    if (!computed.length) return [...lines, "A rank that this page does not hold computes it."];
    const share = +this.scene.settings.heads / zone.heads;
    for (const { rank, event, head } of computed.slice(0, 4)) {
      const who = `Rank ${rank}` + (zone.heads > 1 ? ` (heads ${head * share} to ${(head + 1) * share - 1})` : "");
      const when = event.work === undefined ? "" : `, from ${secondsText(event.work)} to ${secondsText(event.end)}. ${this.arrival(rank, column, zone)}`;
      lines.push(`${who} computes it in step ${event.step}${when || "."}`);
    }
    if (computed.length > 4) lines.push(`... and ${computed.length - 4} more ranks, each for its own heads.`);
    return lines;
  }

  // How the keys of a block reached a rank: hop by hop, with times and links.
  arrival(rank, column, zone) {
    const hops = this.hops(rank, column, zone, new Set());
    return hops.length ? `Its keys: ${hops.join("; then ")}.` : "Its keys were here from the start.";
  }

  hops(rank, id, zone, seen) {
    const { recording, pass } = this;
    const brought = recording.once(`keys ${pass}`, () => {
      const found = new Map();
      for (const { to, message } of recording.transfers(pass)) {
        for (const piece of message.pieces) {
          if (piece.kind === "kv" && !found.has(`${to} ${piece.id}`)) found.set(`${to} ${piece.id}`, message);
        }
      }
      return found;
    });
    const message = brought.get(`${rank} ${id}`);
    if (!message || seen.has(`${rank} ${id}`)) return [];
    seen.add(`${rank} ${id}`);
    if (message.overHeads) return [`its heads' part came from the other ranks of its shard by ${secondsText(message.end)}`];
    const bundle = id - zone.base - zone.shards, sources = bundle < 0 ? [id] : zone.sources[bundle].map((number) => zone.base + number);
    const before = sources.flatMap((source) => this.hops(message.peer, source, zone, seen));
    const link = this.isFar(message.peer, rank) ? "between nodes" : "within the node";
    return [...before, `rank ${message.peer} to rank ${rank} ${link}, level ${message.level} (${secondsText(message.start)} to ${secondsText(message.end)})`];
  }

  // --- drawing

  spans() {
    const { recording, pass } = this, timed = recording.timed(pass);
    return recording.program(pass, timed.includes(this.rank) ? this.rank : timed[0]).spans;
  }

  startOf(step) {
    const span = this.spans().find((event) => event.type !== FINISH && event.step >= step);
    return span ? span.start : this.result.seconds;
  }

  stepAt(rank, seconds) {
    const span = this.recording.program(this.pass, rank).spans.find(({ end }) => end >= seconds);
    return span ? span.step : this.steps - 1;
  }

  draw(step, longest) {
    const own = Math.min(step, this.steps - 1);
    this.machine.prepare(this, own);
    this.timeline.prepare(this, longest);
    this.redrawStep(own);
  }

  redrawStep(step) {
    const { recording, result } = this;
    this.matrix.draw(this, step);
    this.now.textContent = `Step ${step} of ${this.steps - 1}. ${this.rankText(this.rank, step)}`;
    this.details.replaceChildren(...this.cellText().map((line) => element("p", {}, line)));
    const label = (canvas, text) => canvas.setAttribute("aria-label", text);
    label(this.machineCanvas, `Machine of ${recording.world} ranks, plan ${recording.plan}. ${this.now.textContent} Left and right choose a rank.`);
    label(this.matrixCanvas, `Attention matrix, ${recording.cells} by ${recording.cells} cells. ${this.details.textContent} Arrow keys choose a cell.`);
    label(this.timelineCanvas, `Timeline of ${recording.plan}: ${secondsText(result.seconds)}, ranks wait ${((100 * result.waiting) / result.seconds).toFixed(0)} %. Left and right step.`);
    this.timeline.cursor(this.startOf(step));
  }

  frame(position) {
    const step = Math.min(Math.floor(position), this.steps - 1);
    this.machine.frame(position - Math.floor(position));
    const from = this.startOf(step), to = this.startOf(step + 1);
    this.timeline.cursor(from + (to - from) * (position - Math.floor(position)));
  }
}

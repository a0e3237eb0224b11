"use strict";
// One plan on the page: its machine, matrix, timeline and bytes, with a text for everything that is drawn.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const joined = (texts) => (texts.length > 8 ? `${texts.slice(0, 8).join(", ")} and ${texts.length - 8} more` : texts.join(", "));

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
      this.app.change({ rank: (this.rank + down + right + this.schedule.world) % this.schedule.world });
    });
    keys(this.matrixCanvas, (move) => {
      const most = this.running.numCells - 1, stride = Math.max(1, Math.round(this.matrix.stride));
      const cell = (this.cell || [0, 0]).map((chunk, axis) => Math.max(0, Math.min(most, chunk + move[axis] * stride)));
      this.app.change({ cell: cell.join("-") });
    });
    keys(this.timelineCanvas, ([down, right]) => {
      if (right) this.app.change({ step: this.app.step + right });
      else this.app.change({ rank: (this.rank + down + this.schedule.world) % this.schedule.world });
    });
  }

  // Everything that follows from the settings. Throws an Error if the plan does not fit them.
  set(schedule, cluster, call, mask, pass) {
    Object.assign(this, { schedule, cluster, call, mask, pass });
    this.running = this.app.running(schedule);
    this.batch = this.running instanceof Batch ? this.running : null;
    this.result = this.app.simulated(schedule, pass);
    this.other = this.app.simulated(schedule, pass === "forward" ? "backward" : "forward");
    this.steps = Math.max(...this.result.ranks.map((rank) => this.running.program(pass, rank).steps.length));
    this.seconds = this.result.seconds + this.other.seconds;
    this.waits = (this.result.waiting + this.other.waiting) / this.seconds;
    this.sent = this.result.sent.map((bytes, at) => bytes + this.other.sent[at]);
  }

  choose(rank, cell) {
    this.rank = this.result.alone ? this.result.ranks[0] : Math.min(rank, this.schedule.world - 1);
    const most = this.running.numCells - 1;
    this.cell = cell ? cell.map((chunk) => Math.min(chunk, most)) : null;
  }

  isFar(rank, peer) {
    const levels = crossed(this.cluster, rank, peer);
    return this.cluster.levels.length > 1 && levels.includes(0);
  }

  doing(rank, step) {
    const events = this.running.program(this.pass, rank).steps[step] || [];
    const of = (type) => events.filter((event) => event.type === type);
    const blocks = of(COMPUTE).filter((block) => this.running.isVisible(block));
    const messages = of(POST).flatMap((post) => post.messages);
    return { blocks, skipped: of(COMPUTE).length - blocks.length, messages, merges: of(COMBINE), route: events.length ? events[0].route : null };
  }

  blocksOfStep(step) {
    const now = new Set();
    for (const rank of this.result.ranks) {
      for (const block of this.doing(rank, step).blocks) now.add(this.running.blockId(block));
    }
    return now;
  }

  // Remote pieces that a rank holds or awaits at a step.
  holds(rank, step) {
    const first = new Map(), last = new Map(), arrived = new Map(), texts = new Map();
    const keyOf = ({ route }, { kind, shard, group }) => `${route ? route.index : ""}:${kind}${shard}.${group}`;
    this.running.program(this.pass, rank).steps.forEach((events, at) => {
      for (const event of events) {
        for (const message of event.messages || []) {
          for (const piece of message.pieces) {
            const key = keyOf(event, piece);
            texts.set(key, piece.text + this.otherZone(event, rank, step));
            if (!INPUTS.includes(piece.kind)) continue;
            if (!message.send) {
              if (!first.has(key)) first.set(key, at);
            } else last.set(key, at);
          }
        }
        if (event.type === AWAIT) arrived.set(keyOf(event, event.piece), at);
        if (event.type === COMPUTE) {
          for (const kind of NEEDS[this.pass]) {
            const shard = kind === "kv" ? event.column : event.row;
            last.set(keyOf(event, { kind, shard, group: event.group }), at);
          }
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
  otherZone({ route }, rank, step) {
    const [event] = this.running.program(this.pass, rank).steps[step] || [];
    if (!route || !event || event.route === route) return "";
    return ` (of ranks ${route.zone.first} to ${route.zone.first + route.zone.size - 1})`;
  }

  rankText(rank, step) {
    const { blocks, skipped, messages, merges, route } = this.doing(rank, step);
    const { held, coming } = this.holds(rank, step);
    const sends = messages.filter((message) => message.send).map(({ pieces, peer, overHeads }) => {
      return `${overHeads ? "part of " : ""}${pieces.map((piece) => piece.text).join("+")} to rank ${peer}`;
    });
    const parts = [];
    if (blocks.length) parts.push(`computes ${joined(blocks.map(({ rowText, columnText }) => `q${rowText} × kv${columnText}`))}`);
    if (skipped) parts.push(`skips ${skipped} block${skipped > 1 ? "s" : ""} that the mask hides`);
    if (sends.length) parts.push(`sends ${joined(sends)}`);
    if (merges.length) parts.push(`merges ${joined(merges.map((event) => event.piece.text))}`);
    if (held.length) parts.push(`holds ${joined(held)}`);
    if (coming.length) parts.push(`awaits ${joined(coming)}`);
    const { zone, chosen } = route || {};
    const where = !route ? "" : zone.size === 1 ? ` (${route.isPadding ? "padding" : "documents of its own"})` : ` (${chosen} on ranks ${zone.first} to ${zone.first + zone.size - 1})`;
    return `Rank ${rank}${where} ${parts.join("; ") || "does nothing"}.`;
  }

  describe() {
    const { schedule, result, cluster } = this;
    const words = schedule.plan.split(",")[0].split("/").map((level, at) => this.levelText(level, at)).join(", then ");
    this.title.textContent = schedule.plan;
    this.summary.textContent =
      `${words[0].toUpperCase()}${words.slice(1)}. ${secondsText(this.seconds)} predicted for forward and backward, ranks wait ` +
      `${(100 * this.waits).toFixed(0)} % of it; this ${this.pass} pass takes ${secondsText(result.seconds)}.` +
      (result.alone && this.mask.isSparse ? " In worlds this large the page shows the plan's own schedule; what runs with a window or documents sends less." : "") +
      (result.alone ? ` Rank ${result.ranks[0]} stands for all ${schedule.world} ranks, as it has the most work: each runs the same program from its own place.` : "");
    this.inequality.textContent = this.inequalityText();
    this.routes.hidden = !this.batch;
    const shares = schedule.numHeads;
    this.headShare.textContent = this.batch
      ? "Colours: the rank that computes the cell. Empty cells are hidden by the mask. A dot marks this step."
      : shares > 1
      ? `Every cell is computed by ${shares} ranks, each for its own ${this.call.heads / shares} of ${this.call.heads} heads. Numbers are shards.`
      : "Colours and numbers: the rank that computes the cell. Empty cells are hidden by the mask. A dot marks this step.";
    this.fillTable();
  }

  levelText(level, at) {
    if (level.startsWith("u")) return `heads split over ${level.slice(1)} ranks`;
    if (level.startsWith("star")) return `the paper's schedule with teams of ${level.slice(4)}`;
    const [team, ring] = this.schedule.levels[at];
    return [team > 1 ? `teams of ${team}` : "", ring > 1 ? `rings of ${ring}` : ""].filter(Boolean).join(" and ") || "one rank";
  }

  // Can the transfers between nodes be hidden? The busiest link's seconds against a rank's compute.
  inequalityText() {
    const { cluster, result } = this, compute = result.seconds - result.waiting;
    const level = cluster.levels[0], link = result.busy[0], bytes = link * level.bandwidth, ranks = spansOf(cluster)[0];
    if (!bytes || cluster.levels.length < 2) return "Nothing leaves a node.";
    const verdict = link > compute ? ">" : "≤";
    const meaning = link > compute ? "so transfers between nodes cannot be hidden" : "so transfers between nodes can be hidden";
    const evenly = level.shared && Math.abs(result.sent[0] * ranks - bytes) < 1e-6 * bytes;
    const what = evenly ? `${bytesText(result.sent[0])} × ${ranks} ranks` : `${bytesText(bytes)} over the busiest link`;
    return `${what} / ${(level.bandwidth / 1e9).toPrecision(3)} GB/s = ${secondsText(link)} ${verdict} ${secondsText(compute)} of work per rank, ${meaning}.`;
  }

  // --- bytes

  // What a rank sends over each level: rows {label, terms, closed, counted}, one zone after the other.
  traffic(pass, rank) {
    const { running, schedule } = this, names = schedule.plan.split(",")[0].split("/");
    const value = (terms) => sum(terms.map((term) => term.value * term.bytes));
    if (this.batch) {
      return running.ofRank[rank].flatMap((route) => {
        const { zone } = route, member = rank - zone.first, counted = route.counted(pass, member);
        const where = zone.size === 1 ? "alone" : `${zone.size} ranks, ${route.chosen}`;
        return names.map((_, lane) => {
          const terms = route.terms(pass, member, lane);
          return { label: `${where}, level ${lane}`, lane, terms, closed: value(terms), counted: counted[lane] };
        }).filter(({ closed, counted: bytes }, lane) => closed || bytes || (zone.size === 1 ? lane === 0 : schedule.sizes[lane] > 1 && lane >= zone.level));
      });
    }
    const { sizes } = running.prices, totals = schedule.sizes.map(() => 0);
    for (const message of sendsOf(schedule.program(pass, rank))) {
      const bytes = sum(message.pieces.map((piece) => sizes[piece.kind]));
      totals[message.lane] += message.overHeads ? bytes / schedule.numHeads : bytes;
    }
    const closed = schedule.closedBytes(pass, rank, sizes);
    return names.map((name, lane) => {
      const terms = schedule.terms(pass, lane, rank).map((term) => ({ ...term, bytes: sum(term.kinds.map((kind) => sizes[kind])) }));
      return { label: `level ${lane}: ${name}`, lane, terms, closed: closed[lane], counted: totals[lane] };
    });
  }

  fillTable() {
    const { pass, rank } = this, found = this.traffic(pass, rank);
    const cells = (tag, texts) => element("tr", {}, ...texts.map((text, at) => element(tag, at > 2 ? { class: "number" } : {}, text)));
    const rows = found.map(({ label, terms, closed, counted }) => {
      const formula = terms.map(({ text, kinds }) => `${text}·${kinds.length > 1 ? `(${kinds.join("+")})` : kinds[0]}`).join(" + ") || "0";
      const numbers = terms.map(({ value, bytes }) => `${this.batch ? value.toLocaleString("en") : +value.toPrecision(4)} × ${bytesText(bytes)}`).join(" + ") || "0";
      return cells("td", [label, formula, numbers, bytesText(closed), bytesText(counted)]);
    });
    for (const row of rows) for (const at of [1, 2]) row.children[at].classList.add("formula");
    const head = cells("th", [`rank ${rank}, ${pass}`, "closed form", "with these numbers", "= bytes", "counted in the program"]);
    this.table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
    this.note.textContent = this.sizesText();
    if (this.batch) this.fillRoutes();
  }

  sizesText() {
    const off = `Off a node, per rank: ${bytesText(this.cluster.levels.length > 1 ? this.result.sent[0] : 0)}.`;
    const pieces = ["q", "kv", ...(this.pass === "forward" ? ["out"] : ["do", "dq", "dkv"])];
    const { sizes } = this.batch ? {} : this.running.prices;
    return this.batch ? off : `A whole piece: ${pieces.map((kind) => `${kind} ${bytesText(sizes[kind])}`).join(", ")}. ${off}`;
  }

  // The zones of the chosen rank, what each runs, and what the plan alone would send (routing/explain.py).
  fillRoutes() {
    const { batch, rank } = this, cells = (tag, texts) => element("tr", {}, ...texts.map((text, at) => element(tag, at > 2 ? { class: "number" } : {}, text)));
    const perRank = (bytes, size) => bytes.map((each) => bytesText(each / size)).join(" | ");
    const rows = batch.ofRank[rank].map((route) => {
      const { zone, chosen, fetches, planBytes, directBytes } = route;
      const alone = zone.size === 1, share = `${zone.tokens.toLocaleString("en")} (${((100 * zone.tokens) / batch.local).toFixed(0)} %)`;
      const ranks = alone ? `rank ${zone.first}` : `ranks ${zone.first} to ${zone.first + zone.size - 1}`;
      const sent = alone ? "nothing" : perRank(fetches ? directBytes : planBytes, zone.size);
      return cells("td", [share, ranks, alone ? (route.isPadding ? "padding" : "alone") : chosen, sent, fetches ? perRank(planBytes, zone.size) : "–"]);
    });
    const head = cells("th", [`tokens of rank ${rank}`, "shared by", "runs", "sends", "the plan alone"]);
    const padding = (100 * (batch.local * batch.world)) / this.call.length - 100, documents = this.mask.ends.length - 1;
    this.routesNote.textContent =
      `Bytes per rank${this.schedule.sizes.length > 1 ? ", level by level" : ""}, both passes. ${this.call.length.toLocaleString("en")} tokens in ` +
      `${documents} document${documents > 1 ? "s" : ""}: ${batch.local.toLocaleString("en")} per rank, ${padding.toFixed(1)} % padding. ` +
      `On all ranks: ${batch.describe()}. The plan or direct: by bytes, outermost level first.`;
    this.routesTable.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  // --- a cell

  cellText() {
    if (!this.cell) return ["Choose a cell to see who computes it, when, and how its keys got there."];
    const { running, mask, pass, call } = this, [q, k] = this.cell, ranges = [running.range(q), running.range(k)];
    const pairs = mask.pairs(...ranges.flat()), block = pairs ? running.block(pass, q, k) : null;
    const [queries, keys] = ranges.map(([from, to]) => (from < call.length ? `${from} to ${Math.min(to, call.length) - 1}` : "padding"));
    const of = (shard) => (block && !this.batch ? ` (shard ${shard})` : "");
    const lines = [`Queries ${queries}${of(block?.row)}, keys ${keys}${of(block?.column)}.`];
    if (!pairs) return [...lines, "The mask hides all of it: nothing is computed here."];
    lines.push(`${pairs.toLocaleString("en")} visible pairs. ${block.says}`);
    const heads = block.direct ? 1 : block.schedule.numHeads;
    for (let head = 0; head < Math.min(heads, 4); head++) {
      const rank = block.first + (block.direct ? block.owner : block.schedule.rankOf(block.owner, head));
      lines.push(this.blockText(rank, block, head, heads));
    }
    if (heads > 4) lines.push(`... and ${heads - 4} more ranks, each for its own heads.`);
    return lines;
  }

  blockText(rank, block, head, heads) {
    const { result, pass, call, running } = this, share = call.heads / heads;
    const who = `Rank ${rank}` + (heads > 1 ? ` (heads ${head * share} to ${(head + 1) * share - 1})` : "");
    const index = result.ranks.indexOf(rank), isIt = (event) => event.type === COMPUTE && running.blockId(event) === block.id;
    if (index < 0) {
      const step = running.program(pass, rank).steps.findIndex((events) => events.some(isIt));
      return `${who} computes it in step ${step}.`;
    }
    for (const span of result.simulator.ranks[index].spans) {
      if (!span.task.parts) continue;
      const pace = (span.end - span.start) / span.task.seconds;
      let at = span.start;
      for (const part of span.task.parts) {
        const until = at + part.seconds * pace;
        if (part.block && isIt(part.block)) {
          return `${who} computes it in step ${part.step}, from ${secondsText(at)} to ${secondsText(until)}. ${this.arrival(rank, block)}`;
        }
        at = until;
      }
    }
    return `${who} computes it.`;
  }

  // How the keys of a block reached a rank: hop by hop, with times and links.
  arrival(rank, block) {
    const hops = [], seen = new Set([rank]);
    for (let at = rank, { column } = block; column !== null; ) {
      const transfer = this.result.simulator.transfers.find(({ receive: { rank: { number }, message } }) =>
        number === at && this.isOf(block, message) && message.pieces.some(({ kind, shard }) => kind === "kv" && shard === column));
      if (!transfer || transfer.receive.message.overHeads || seen.has(transfer.send.rank.number)) {
        if (transfer && transfer.receive.message.overHeads) hops.unshift(`its heads' part came from the other ranks of its shard by ${secondsText(transfer.end)}`);
        break;
      }
      const from = transfer.send.rank.number;
      const link = this.isFar(from, at) ? "between nodes" : "within the node";
      hops.unshift(`rank ${from} to rank ${at} ${link}, level ${transfer.send.message.level} (${secondsText(transfer.start)} to ${secondsText(transfer.end)})`);
      seen.add(from);
      column = this.running.cameFrom(block, column);
      at = from;
    }
    return hops.length ? `Its keys: ${hops.join("; then ")}.` : "Its keys were here from the start.";
  }

  // True if a message belongs to the zone of a block.
  isOf({ route }, message) {
    return !route || message.route === route;
  }

  // --- drawing

  startOf(step) {
    const index = Math.max(0, this.result.ranks.indexOf(this.rank));
    const span = this.result.simulator.ranks[index].spans.find(({ task }) => (task.parts ? task.parts[0].step : task.step) >= step);
    return span ? span.start : this.result.seconds;
  }

  stepAt(rank, seconds) {
    const index = Math.max(0, this.result.ranks.indexOf(rank));
    const span = this.result.simulator.ranks[index].spans.find(({ end }) => end >= seconds);
    return span ? (span.task.parts ? span.task.parts[0].step : span.task.step) : this.steps - 1;
  }

  draw(step, longest) {
    const own = Math.min(step, this.steps - 1);
    this.machine.prepare(this, own);
    this.timeline.prepare(this, longest);
    this.redrawStep(own);
  }

  redrawStep(step) {
    this.matrix.draw(this, step);
    this.now.textContent = `Step ${step} of ${this.steps - 1}. ${this.rankText(this.rank, step)}`;
    this.details.replaceChildren(...this.cellText().map((line) => element("p", {}, line)));
    this.machineCanvas.setAttribute("aria-label", `Machine of ${this.schedule.world} ranks, plan ${this.schedule.plan}. ${this.now.textContent} Left and right choose a rank.`);
    this.matrixCanvas.setAttribute("aria-label", `Attention matrix, ${this.running.numCells} by ${this.running.numCells} cells. ${this.details.textContent} Arrow keys choose a cell.`);
    this.timelineCanvas.setAttribute("aria-label", `Timeline of ${this.schedule.plan}: ${secondsText(this.result.seconds)}, ranks wait ${(100 * this.result.waiting / this.result.seconds).toFixed(0)} %. Left and right step.`);
    this.timeline.cursor(this.startOf(step));
  }

  frame(position) {
    const step = Math.min(Math.floor(position), this.steps - 1);
    this.machine.frame(position - Math.floor(position));
    const from = this.startOf(step), to = this.startOf(step + 1);
    this.timeline.cursor(from + (to - from) * (position - Math.floor(position)));
  }
}

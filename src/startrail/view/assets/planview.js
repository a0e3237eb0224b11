"use strict";
// One plan on the page: its machine, matrix, timeline and bytes, with a text for everything that is drawn.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const joined = (texts) => (texts.length > 8 ? `${texts.slice(0, 8).join(", ")} and ${texts.length - 8} more` : texts.join(", "));
const NEEDS = { forward: ["q", "kv"], backward: ["q", "do", "kv"] };

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
    this.headShare = element("p", { class: "quiet" });
    this.root = element(
      "section", {}, this.title, this.summary, this.inequality,
      element("div", { class: "figures" },
        element("div", {}, element("h3", {}, "Machine"), this.machineCanvas, this.now),
        element("div", {}, element("h3", {}, "Attention matrix"), this.matrixCanvas, this.headShare, this.details)),
      element("h3", {}, "Timeline"), this.timelineCanvas,
      element("h3", {}, "Bytes per level"), element("div", { class: "scroll" }, this.table),
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
      const most = this.prices.layout.num - 1, stride = Math.max(1, Math.round(this.matrix.stride));
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
    this.prices = new PagePrices(cluster, schedule, call, mask);
    this.result = this.app.simulated(schedule, this.prices, pass);
    this.other = this.app.simulated(schedule, this.prices, pass === "forward" ? "backward" : "forward");
    this.steps = Math.max(...this.result.ranks.map((rank) => schedule.program(pass, rank).steps.length));
    this.seconds = this.result.seconds + this.other.seconds;
    this.waits = (this.result.waiting + this.other.waiting) / this.seconds;
    this.sent = this.result.sent.map((bytes, at) => bytes + this.other.sent[at]);
  }

  choose(rank, cell) {
    this.rank = this.result.alone ? this.result.ranks[0] : Math.min(rank, this.schedule.world - 1);
    const most = this.prices.layout.num - 1;
    this.cell = cell ? cell.map((chunk) => Math.min(chunk, most)) : null;
  }

  isFar(rank, peer) {
    const levels = crossed(this.cluster, rank, peer);
    return this.cluster.levels.length > 1 && levels.includes(0);
  }

  doing(rank, step) {
    const events = this.schedule.program(this.pass, rank).steps[step] || [];
    const of = (type) => events.filter((event) => event.type === type);
    const blocks = of(COMPUTE).filter((block) => this.prices.layout.pairs(this.mask, block.row, block.column) > 0);
    const messages = of(POST).flatMap((post) => post.messages);
    return { blocks, skipped: of(COMPUTE).length - blocks.length, messages, merges: of(COMBINE), waits: of(AWAIT) };
  }

  blocksOfStep(step) {
    const now = new Set();
    for (const rank of this.result.ranks) {
      for (const { row, column } of this.doing(rank, step).blocks) now.add(row * this.schedule.numShards + column);
    }
    return now;
  }

  // Remote pieces that a rank holds or awaits at a step.
  holds(rank, step) {
    const first = new Map(), last = new Map(), arrived = new Map(), pieces = new Map();
    this.schedule.program(this.pass, rank).steps.forEach((events, at) => {
      for (const event of events) {
        for (const message of event.messages || []) {
          for (const piece of message.pieces) {
            const key = pieceText(piece);
            pieces.set(key, piece);
            if (!INPUTS.includes(piece.kind)) continue;
            if (!message.send) {
              if (!first.has(key)) first.set(key, at);
            } else last.set(key, at);
          }
        }
        if (event.type === AWAIT) arrived.set(pieceText(event.piece), at);
        if (event.type === COMPUTE) {
          for (const kind of NEEDS[this.pass]) {
            const shard = kind === "kv" ? event.column : event.row;
            last.set(pieceText({ kind, shard, group: event.group }), at);
          }
        }
      }
    });
    const held = [], coming = [];
    for (const [key, at] of first) {
      if (at > step || (last.get(key) ?? at) < step) continue;
      (arrived.has(key) && arrived.get(key) <= step ? held : coming).push(key);
    }
    return { held, coming };
  }

  rankText(rank, step) {
    const { blocks, skipped, messages, merges } = this.doing(rank, step);
    const { held, coming } = this.holds(rank, step);
    const sends = messages.filter((message) => message.send).map(({ pieces, peer, overHeads }) => {
      return `${overHeads ? "part of " : ""}${pieces.map(pieceText).join("+")} to rank ${peer}`;
    });
    const parts = [];
    if (blocks.length) parts.push(`computes ${joined(blocks.map(({ row, column }) => `q${row} × kv${column}`))}`);
    if (skipped) parts.push(`skips ${skipped} block${skipped > 1 ? "s" : ""} that the mask hides`);
    if (sends.length) parts.push(`sends ${joined(sends)}`);
    if (merges.length) parts.push(`merges ${joined(merges.map((event) => pieceText(event.piece)))}`);
    if (held.length) parts.push(`holds ${joined(held)}`);
    if (coming.length) parts.push(`awaits ${joined(coming)}`);
    return `Rank ${rank} ${parts.join("; ") || "does nothing"}.`;
  }

  describe() {
    const { schedule, result, cluster } = this;
    const words = schedule.plan.split(",")[0].split("/").map((level, at) => this.levelText(level, at)).join(", then ");
    this.title.textContent = schedule.plan;
    this.summary.textContent =
      `${words}. ${secondsText(this.seconds)} predicted for forward and backward, ranks wait ` +
      `${(100 * this.waits).toFixed(0)} % of it; this ${this.pass} pass takes ${secondsText(result.seconds)}.` +
      (this.mask.window !== null || this.mask.ends.length > 2 ? " Shown is the plan's own schedule; a sequence with zones, or a narrow window, sends less." : "") +
      (result.alone ? ` Rank ${result.ranks[0]} stands for all ${schedule.world} ranks, as it has the most work: each runs the same program from its own place.` : "");
    this.inequality.textContent = this.inequalityText();
    const shares = schedule.numHeads;
    this.headShare.textContent = shares > 1
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

  counted(pass, rank) {
    const totals = this.schedule.sizes.map(() => 0);
    for (const message of sendsOf(this.schedule.program(pass, rank))) {
      const bytes = message.pieces.reduce((total, piece) => total + this.prices.sizes[piece.kind], 0);
      totals[message.lane] += message.overHeads ? bytes / this.schedule.numHeads : bytes;
    }
    return totals;
  }

  closedForm(pass, rank) {
    return this.schedule.closed(pass, rank).map((lane) =>
      lane.reduce((total, pieces, kind) => total + pieces * this.prices.sizes[KINDS[kind]], 0));
  }

  // The closed form of a level as terms {text, value, kinds}.
  terms(pass, lane) {
    const { schedule } = this, level = schedule.levels[lane], forward = pass === "forward";
    const used = (kinds) => kinds.filter((kind) => schedule.closed(pass, this.rank)[lane][KINDS.indexOf(kind)]);
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
      const probe = placed[placed.length - 1], total = schedule.closed(pass, this.rank)[lane][KINDS.indexOf(probe)] / groups;
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

  fillTable() {
    const { schedule, pass, rank, prices } = this;
    const counted = this.counted(pass, rank), closed = this.closedForm(pass, rank);
    const names = schedule.plan.split(",")[0].split("/");
    const cells = (tag, texts) => element("tr", {}, ...texts.map((text, at) => element(tag, at > 2 ? { class: "number" } : {}, text)));
    const rows = names.map((name, lane) => {
      const terms = this.terms(pass, lane);
      const formula = terms.map(({ text, kinds }) => `${text}·${kinds.length > 1 ? `(${kinds.join("+")})` : kinds[0]}`).join(" + ") || "0";
      const numbers = terms.map(({ value, kinds }) => {
        const size = kinds.reduce((total, kind) => total + prices.sizes[kind], 0);
        return `${+value.toPrecision(4)} × ${bytesText(size)}`;
      }).join(" + ") || "0";
      return cells("td", [`level ${lane}: ${name}`, formula, numbers, bytesText(closed[lane]), bytesText(counted[lane])]);
    });
    for (const row of rows) for (const at of [1, 2]) row.children[at].classList.add("formula");
    const head = cells("th", [`rank ${rank}, ${pass}`, "closed form", "with these numbers", "= bytes", "counted in the program"]);
    const sizes = ["q", "kv", ...(pass === "forward" ? ["out"] : ["do", "dq", "dkv"])];
    const caption = element("caption", { class: "quiet", style: "text-align:left;caption-side:bottom" },
      `A whole piece: ${sizes.map((kind) => `${kind} ${bytesText(prices.sizes[kind])}`).join(", ")}. ` +
      `Off a node, per rank: ${bytesText(this.cluster.levels.length > 1 ? this.result.sent[0] : 0)}.`);
    this.table.replaceChildren(caption, element("thead", {}, head), element("tbody", {}, ...rows));
  }

  // --- a cell

  cellText() {
    if (!this.cell) return ["Choose a cell to see who computes it, when, and how its keys got there."];
    const { schedule, mask, prices: { layout }, pass } = this, [q, k] = this.cell;
    const row = layout.shardOfChunk(q), column = layout.shardOfChunk(k);
    const range = (chunk) => {
      const [from, to] = layout.range(chunk), end = Math.min(to, this.call.length);
      return from < end ? `${from} to ${end - 1}` : "padding";
    };
    const lines = [`Queries ${range(q)} (shard ${row}), keys ${range(k)} (shard ${column}).`];
    const pairs = mask.pairs(...layout.range(q), ...layout.range(k));
    if (!pairs) return [...lines, "The mask hides all of it: nothing is computed here."];
    lines.push(`${pairs.toLocaleString("en")} visible pairs.`);
    const owner = schedule.owners(pass)[row * schedule.numShards + column];
    for (let head = 0; head < Math.min(schedule.numHeads, 4); head++) {
      const rank = schedule.rankOf(owner, head);
      lines.push(this.blockText(rank, row, column, head));
    }
    if (schedule.numHeads > 4) lines.push(`... and ${schedule.numHeads - 4} more ranks, each for its own heads.`);
    return lines;
  }

  blockText(rank, row, column, head) {
    const { schedule, result, pass, call } = this;
    const share = call.heads / schedule.numHeads;
    const who = `Rank ${rank}` + (schedule.numHeads > 1 ? ` (heads ${head * share} to ${(head + 1) * share - 1})` : "");
    const index = result.ranks.indexOf(rank);
    if (index < 0) {
      const step = schedule.program(pass, rank).steps.findIndex((events) =>
        events.some((event) => event.type === COMPUTE && event.row === row && event.column === column));
      return `${who} computes it in step ${step}.`;
    }
    for (const span of result.simulator.ranks[index].spans) {
      if (!span.task.parts) continue;
      const pace = (span.end - span.start) / span.task.seconds;
      let at = span.start;
      for (const part of span.task.parts) {
        const until = at + part.seconds * pace;
        if (part.block && part.block.row === row && part.block.column === column) {
          return `${who} computes it in step ${part.step}, from ${secondsText(at)} to ${secondsText(until)}. ${this.arrival(rank, column)}`;
        }
        at = until;
      }
    }
    return `${who} computes it.`;
  }

  // How the keys of a shard reached a rank: hop by hop, with times and links.
  arrival(rank, column) {
    const hops = [], seen = new Set([rank]);
    for (let at = rank; ; ) {
      const transfer = this.result.simulator.transfers.find(({ receive }) =>
        receive.rank.number === at && receive.message.pieces.some(({ kind, shard }) => kind === "kv" && shard === column));
      if (!transfer || transfer.receive.message.overHeads || seen.has(transfer.send.rank.number)) {
        if (transfer && transfer.receive.message.overHeads) hops.unshift(`its heads' part came from the other ranks of shard ${column} by ${secondsText(transfer.end)}`);
        break;
      }
      const from = transfer.send.rank.number;
      const link = this.isFar(from, at) ? "between nodes" : "within the node";
      hops.unshift(`rank ${from} to rank ${at} ${link}, level ${transfer.send.message.lane} (${secondsText(transfer.start)} to ${secondsText(transfer.end)})`);
      seen.add(from);
      at = from;
    }
    return hops.length ? `Its keys: ${hops.join("; then ")}.` : "Its keys were here from the start.";
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
    this.matrixCanvas.setAttribute("aria-label", `Attention matrix, ${this.prices.layout.num} by ${this.prices.layout.num} cells. ${this.details.textContent} Arrow keys choose a cell.`);
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

"use strict";
// Drawing on canvas: the machine, the attention matrix and the timeline. Colours come from the page's style, and
// everything that colour says is also said by a shape, a pattern or a text.

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

function shardColour(shard, shards, light) {
  const lightness = light !== undefined ? light : isDark() ? 42 : 68;
  const ring = shards > 16 ? (shard % 2 ? -9 : 0) : 0; // neighbours differ in lightness where hues are close
  return `hsl(${Math.round((360 * shard) / shards)} 65% ${lightness + ring}%)`;
}

// Sizes a canvas for its box and the screen's pixels, and returns its context with CSS pixels as units.
function sized(canvas, height) {
  const width = Math.max(canvas.clientWidth, 200), ratio = Math.min(devicePixelRatio || 1, 2);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height };
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const inside = tile.getContext("2d");
  inside.strokeStyle = colour;
  inside.lineWidth = 1;
  inside.beginPath();
  for (const shift of [-6, 0, 6]) {
    inside.moveTo(shift, 6);
    inside.lineTo(shift + 6, 0);
  }
  inside.stroke();
  return context.createPattern(tile, "repeat");
}

// --- the machine

const MOST_NODES = 16;

class MachineFigure {
  constructor(canvas) {
    this.canvas = canvas;
    this.still = document.createElement("canvas");
  }

  // Nodes as boxes in rows, ranks on a circle inside each. Of many nodes, those around the chosen rank are drawn.
  layout(view) {
    const { recording, perNode } = view, nodes = recording.world / perNode;
    const recorded = [...new Set(recording.ranks.map((rank) => Math.floor(rank / perNode)))];
    const from = Math.min(Math.max(recorded.indexOf(Math.floor(view.rank / perNode)) - MOST_NODES / 2, 0), Math.max(recorded.length - MOST_NODES, 0));
    const names = recorded.slice(from, from + MOST_NODES), shown = names.length;
    const width = Math.max(this.canvas.clientWidth, 200);
    const most = width < 420 ? 2 : 4, square = Math.ceil(Math.sqrt(shown));
    const columns = shown <= 4 && width > 700 ? shown : Math.min(most, shown === 8 ? 4 : square);
    const side = Math.min(width / columns, nodes === 1 ? 340 : shown <= 4 ? 260 : 210);
    const rows = Math.ceil(shown / columns), left = (width - side * columns) / 2;
    const height = rows * side + (nodes > shown ? 22 : 4);
    const radius = Math.max(6, Math.min(20, (side * 0.25 * Math.PI) / Math.max(perNode, 3) - 1));
    const boxes = names.map((node, at) => ({ node, x: left + (at % columns) * side, y: Math.floor(at / columns) * side, side }));
    const places = new Map();
    for (const box of boxes) {
      for (let at = 0; at < perNode; at++) {
        const angle = (2 * Math.PI * at) / perNode - Math.PI / 2, reach = perNode === 1 ? 0 : side * 0.31;
        const x = box.x + side / 2 + reach * Math.cos(angle), y = box.y + side / 2 + 6 + reach * Math.sin(angle);
        places.set(box.node * perNode + at, { x, y, node: box.node });
      }
    }
    return { boxes, places, radius, height, nodes, shown };
  }

  messages(view, step) {
    const { places } = this.plan;
    const ofRank = (rank) => view.doing(rank, step).messages.filter((message) => message.send && places.has(message.peer));
    return [...places.keys()].flatMap((rank) => ofRank(rank).map((message) => ({ rank, message })));
  }

  // The picture without moving parts; drawn once per step.
  prepare(view, step) {
    this.plan = this.layout(view);
    const { context, width } = sized(this.canvas, this.plan.height);
    this.context = context;
    this.width = width;
    const { boxes, places, radius } = this.plan;
    context.lineWidth = 1;
    for (const box of boxes) {
      context.strokeStyle = cssColour("--line");
      context.fillStyle = cssColour("--panel");
      context.beginPath();
      context.roundRect(box.x + 4, box.y + 4, box.side - 8, box.side - 8, 10);
      context.fill();
      context.stroke();
      context.fillStyle = cssColour("--quiet");
      context.textAlign = "left";
      if (this.plan.nodes > 1) context.fillText(`node ${box.node}`, box.x + 12, box.y + 20);
    }
    if (this.plan.nodes > this.plan.shown) {
      context.fillText(`... and ${this.plan.nodes - this.plan.shown} more nodes`, 8, this.plan.height - 6);
    }
    this.moving = this.messages(view, step);
    const crowd = this.moving.length;
    for (const each of this.moving) {
      const from = places.get(each.rank), to = places.get(each.message.peer);
      each.far = from.node !== to.node;
      each.chosen = each.rank === view.rank || each.message.peer === view.rank;
      Object.assign(each, curve(from, to, radius));
      context.globalAlpha = each.chosen ? 1 : crowd > 300 ? 0.08 : crowd > 60 ? 0.3 : 0.65;
      context.strokeStyle = cssColour(each.far ? "--far" : "--near");
      context.lineWidth = each.chosen ? 2.4 : 1.3;
      context.setLineDash(each.far ? [6, 4] : []);
      context.beginPath();
      context.moveTo(each.x0, each.y0);
      context.quadraticCurveTo(each.cx, each.cy, each.x1, each.y1);
      context.stroke();
      if (crowd <= 300 || each.chosen) arrowHead(context, each);
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
    context.textAlign = "center";
    for (const [rank, place] of places) {
      const doing = view.doing(rank, step);
      const [block] = doing.blocks;
      context.fillStyle = block ? view.colour(block) : cssColour("--panel");
      context.strokeStyle = cssColour(rank === view.rank ? "--accent" : "--text");
      context.lineWidth = rank === view.rank ? 3.5 : 1;
      context.beginPath();
      context.arc(place.x, place.y, radius, 0, 2 * Math.PI);
      context.fill();
      if (!block) {
        context.fillStyle = hatch(context, cssColour("--quiet"));
        context.fill();
      }
      context.stroke();
      context.fillStyle = cssColour("--text");
      const named = radius >= 15 && block; // the rank above the name of its keys
      context.font = `${radius < 11 ? 9 : 12}px system-ui, sans-serif`;
      context.fillText(`${rank}`, place.x, place.y + (named ? 0 : 4));
      if (named) {
        context.font = "9px system-ui, sans-serif";
        context.fillText(`kv${view.recording.shardNames[block.column]}`, place.x, place.y + 10);
      }
    }
    const ratio = this.canvas.width / width;
    this.still.width = this.canvas.width;
    this.still.height = this.canvas.height;
    this.still.getContext("2d").drawImage(this.canvas, 0, 0);
    this.ratio = ratio;
  }

  // One frame: transfers are dots (within a node) and squares (between nodes) on their way.
  frame(progress) {
    const context = this.context;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.still, 0, 0);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    if (progress <= 0) return;
    const near = cssColour("--near"), far = cssColour("--far");
    const shown = this.moving.length > 600 ? this.moving.filter((each) => each.chosen) : this.moving;
    for (const each of shown) {
      const t = progress, s = 1 - t;
      const x = s * s * each.x0 + 2 * s * t * each.cx + t * t * each.x1;
      const y = s * s * each.y0 + 2 * s * t * each.cy + t * t * each.y1;
      context.fillStyle = each.far ? far : near;
      if (each.far) context.fillRect(x - 4, y - 4, 8, 8);
      else {
        context.beginPath();
        context.arc(x, y, 4, 0, 2 * Math.PI);
        context.fill();
      }
    }
  }

  rankAt(x, y) {
    for (const [rank, place] of this.plan.places) {
      if (Math.hypot(place.x - x, place.y - y) <= this.plan.radius + 5) return rank;
    }
    return null;
  }
}

function curve(from, to, radius) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const bend = 0.14;
  const cx = (from.x + to.x) / 2 - dy * bend, cy = (from.y + to.y) / 2 + dx * bend;
  const trim = (x, y) => {
    const away = Math.hypot(cx - x, cy - y) || 1;
    return [x + ((cx - x) / away) * Math.min(radius + 1, length / 2), y + ((cy - y) / away) * Math.min(radius + 1, length / 2)];
  };
  const [x0, y0] = trim(from.x, from.y), [x1, y1] = trim(to.x, to.y);
  return { x0, y0, x1, y1, cx, cy };
}

function arrowHead(context, { cx, cy, x1, y1 }) {
  const angle = Math.atan2(y1 - cy, x1 - cx);
  context.setLineDash([]);
  context.beginPath();
  for (const turn of [-0.45, 0.45]) {
    context.moveTo(x1, y1);
    context.lineTo(x1 - 7 * Math.cos(angle + turn), y1 - 7 * Math.sin(angle + turn));
  }
  context.stroke();
}

// --- the attention matrix

class MatrixFigure {
  constructor(canvas) {
    this.canvas = canvas;
  }

  draw(view, step) {
    const side = Math.min(Math.max(this.canvas.clientWidth, 200), 440);
    const { context } = sized(this.canvas, side);
    const edge = 18, size = side - edge, { recording } = view, { matrix, cells } = recording, unit = size / cells;
    const ratio = this.canvas.width / this.canvas.clientWidth || 1, snap = (at) => Math.round(at * ratio) / ratio; // no seams
    Object.assign(this, { cells, unit, edge });
    const now = view.blocksOfStep(step);
    context.fillStyle = cssColour("--panel");
    context.fillRect(edge, edge, size, size);
    for (let q = 0; q < cells; q++) {
      for (let k = 0; k < cells; k++) {
        if (!matrix.rows[q][k]) continue;
        const block = recording.blockId(matrix.rows[q][k], matrix.columns[q][k]), owner = view.ownerOf(block);
        const [x, right] = [k, k + 1].map((at) => snap(edge + at * unit)), [y, bottom] = [q, q + 1].map((at) => snap(edge + at * unit));
        context.fillStyle = owner === undefined ? cssColour("--line") : shardColour(recording.colour[owner], recording.colours);
        context.globalAlpha = recording.pairs.has(`${q} ${k}`) ? 0.45 : 1;
        context.fillRect(x, y, right - x, bottom - y);
        context.globalAlpha = 1;
        if (now.has(block)) {
          context.fillStyle = cssColour("--text");
          const dot = Math.max(1, Math.min(4, unit * 0.16)), middle = unit >= 20 ? 0.72 : 0.5; // beside the number
          context.fillRect(x + unit * middle - dot, y + unit * middle - dot, 2 * dot, 2 * dot);
        }
        if (unit >= 20 && owner !== undefined) {
          context.fillStyle = cssColour("--text");
          context.font = "10px system-ui, sans-serif";
          context.textAlign = "left";
          context.fillText(`${recording.sparse ? owner : recording.colour[owner]}`, x + 3, y + 11);
        }
      }
    }
    context.strokeStyle = cssColour("--line");
    context.lineWidth = 1;
    context.strokeRect(edge, edge, size, size);
    if (view.cell) {
      const [q, k] = view.cell;
      context.strokeStyle = cssColour("--accent");
      context.lineWidth = 3;
      context.strokeRect(edge + k * unit, edge + q * unit, Math.max(unit, 3), Math.max(unit, 3));
    }
    context.fillStyle = cssColour("--quiet");
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "left";
    context.fillText("keys →", edge, 13);
    context.save();
    context.translate(4, edge);
    context.rotate(Math.PI / 2);
    context.fillText("queries →", 0, 0);
    context.restore();
  }

  cellAt(x, y) {
    const k = Math.floor((x - this.edge) / this.unit), q = Math.floor((y - this.edge) / this.unit);
    if (k < 0 || q < 0 || k >= this.cells || q >= this.cells) return null;
    return [q, k];
  }
}

// --- the timeline

class TimelineFigure {
  constructor(canvas) {
    this.canvas = canvas;
    this.still = document.createElement("canvas");
  }

  prepare(view, longest) {
    const { recording, pass } = view, ranks = recording.timed(pass), all = ranks.length <= 16;
    const main = ranks.length > 32 ? 7 : ranks.length > 16 ? 11 : 14, thin = 9, lanes = recording.levels.length;
    const tracks = []; // {rank, lane or null, y, height}
    let y = 4;
    for (const rank of ranks) {
      tracks.push({ rank, lane: null, y, height: main });
      y += main + 1;
      if (all || rank === view.rank) {
        for (let lane = 0; lane < lanes; lane++) {
          tracks.push({ rank, lane, y, height: thin });
          y += thin + 1;
        }
      }
      y += ranks.length > 32 ? 0 : 2;
    }
    const { context, width, height } = sized(this.canvas, y + 22);
    const left = 62, right = 8, scale = (width - left - right) / longest;
    Object.assign(this, { context, tracks, left, scale, width, height, bottom: y });
    const idle = hatch(context, cssColour("--quiet"));
    const x = (seconds) => left + seconds * scale;
    context.textAlign = "right";
    for (const track of tracks) {
      context.fillStyle = cssColour("--quiet");
      context.font = "10px system-ui, sans-serif";
      if (track.lane !== null) context.fillText(`level ${track.lane}`, left - 5, track.y + 8);
      else if (main > 7 || track.rank % 8 === 0 || track.rank === view.rank) {
        context.fillStyle = cssColour(track.rank === view.rank ? "--accent" : "--text");
        context.fillText(`rank ${track.rank}`, left - 5, track.y + main - 2);
      }
      if (track.lane !== null) {
        context.fillStyle = cssColour("--panel");
        context.fillRect(left, track.y, longest * scale, track.height);
        continue;
      }
      for (const event of recording.program(pass, track.rank).spans) {
        if (event.work > event.start) {
          context.fillStyle = idle;
          context.fillRect(x(event.start), track.y, (event.work - event.start) * scale, main);
        }
        if (event.end === event.work) continue;
        context.fillStyle = event.type === COMPUTE ? view.colour(event) : cssColour(event.type === COMBINE ? "--merge" : "--other");
        context.fillRect(x(event.work), track.y, Math.max((event.end - event.work) * scale, 0.3), main);
      }
    }
    const lane = new Map(tracks.filter((track) => track.lane !== null).map((track) => [`${track.rank} ${track.lane}`, track]));
    for (const { to, message } of recording.transfers(pass)) {
      const track = lane.get(`${to} ${message.level}`);
      if (!track) continue;
      const far = view.isFar(message.peer, to);
      context.fillStyle = cssColour(far ? "--far" : "--near");
      context.fillRect(x(message.start), track.y + (far ? 1 : 2.5), Math.max((message.end - message.start) * scale, 0.5), far ? 7 : 4);
    }
    context.fillStyle = cssColour("--quiet");
    context.font = "11px system-ui, sans-serif";
    const ticks = width < 420 ? 2 : 4;
    for (let tick = 0; tick <= ticks; tick++) {
      const seconds = (longest * tick) / ticks;
      context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
      context.fillText(secondsText(seconds), x(seconds), y + 14);
    }
    this.still.width = this.canvas.width;
    this.still.height = this.canvas.height;
    this.still.getContext("2d").drawImage(this.canvas, 0, 0);
  }

  cursor(seconds) {
    const context = this.context, ratio = this.canvas.width / this.width;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.still, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.strokeStyle = cssColour("--accent");
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(this.left + seconds * this.scale, 0);
    context.lineTo(this.left + seconds * this.scale, this.bottom);
    context.stroke();
  }

  at(x, y) {
    const track = this.tracks.find((each) => y >= each.y && y <= each.y + each.height + 1);
    return { rank: track ? track.rank : null, seconds: Math.max(0, (x - this.left) / this.scale) };
  }
}

function secondsText(seconds) {
  if (!seconds) return "0";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  return `${(seconds * 1e6).toFixed(1)} µs`;
}

function bytesText(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toPrecision(3)} ${name}`;
  }
  return `${Math.round(bytes)} B`;
}

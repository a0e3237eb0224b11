"use strict";
// The page: settings in, pictures out. The URL fragment holds every setting, so a link restores the view.

const STEP_SECONDS = 0.9; // of playing
const SIMULATED_AGAIN = 8; // plans that auto compares with all ranks

class App {
  constructor(data) {
    this.data = data;
    this.form = document.getElementById("settings");
    this.schedules = new Map();
    this.views = [];
    this.step = 0;
    this.playing = false;
    this.frames = []; // milliseconds between frames while playing
    this.simulations = new Map();
    this.runs = new Map();
    this.fill("nodes", [...new Set(data.machines.map(([nodes]) => nodes))].sort((a, b) => a - b));
    this.fill("cluster", Object.keys(data.clusters));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", (event) => this.edited(event.target.name));
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("back", () => this.change({ step: this.step - 1 }));
    on("ahead", () => this.change({ step: this.step + 1 }));
    on("play", () => this.play(!this.playing));
    on("copy-link", () => this.copy(this.link(), "link"));
    on("copy-command", () => this.copy(this.command(), "command"));
    on("copy-python", () => this.copy(this.python(), "Python"));
    document.getElementById("scrub").addEventListener("input", (event) => this.change({ step: +event.target.value }));
    document.addEventListener("keydown", (event) => {
      if (event.key === " " && !["INPUT", "SELECT", "BUTTON"].includes(event.target.tagName)) {
        event.preventDefault();
        this.play(!this.playing);
      }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    addEventListener("hashchange", () => this.restore()); // replaceState does not cause one
    let resizing = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(resizing);
      resizing = requestAnimationFrame(() => this.draw());
    });
    this.restore();
  }

  // --- settings

  field(name) {
    return this.form.elements[name];
  }

  fill(name, values, labels = {}) {
    const field = this.field(name), before = field.value;
    field.replaceChildren(...values.map((value) => element("option", { value }, labels[value] || `${value}`)));
    if (values.map(String).includes(before)) field.value = before;
  }

  // Read the fragment; what it leaves out has the value that the page was made with.
  restore() {
    const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    this.state = { ...this.data.start, ...wanted };
    this.notes = Object.keys(wanted).filter((name) => !(name in this.data.start)).map((name) => `The link has an unknown setting ${name}.`);
    this.apply();
  }

  edited(name) {
    const state = { ...this.state };
    for (const field of this.form.elements) if (field.name) state[field.name] = field.value;
    if (name === "cluster") {
      state.outer = "";
      state.inner = "";
    }
    if (state.mask === "documents" && !state.documents.trim()) state.documents = this.sample(+this.call?.length || 0);
    this.notes = [];
    this.state = state;
    this.apply();
  }

  change(parts) {
    if (parts.step !== undefined) {
      this.step = Math.max(0, Math.min(this.most, Math.round(parts.step)));
      parts.step = `${this.step}`;
    }
    for (const [name, value] of Object.entries(parts)) this.state[name] = `${value}`;
    for (const view of this.views) view.choose(+this.state.rank, this.cell());
    this.write();
    if (parts.rank !== undefined) for (const view of this.views) view.fillTable();
    this.draw();
    if (!this.playing) document.getElementById("live").textContent = this.views.map((view) => view.now.textContent).join(" ");
  }

  cell() {
    return /^\d+-\d+$/.test(this.state.cell) ? this.state.cell.split("-").map(Number) : null;
  }

  write() {
    const parts = new URLSearchParams();
    for (const [name, value] of Object.entries(this.state)) if (value !== "") parts.set(name, value);
    this.written = `#${parts.toString().replaceAll("%2F", "/").replaceAll("%2C", ",")}`;
    clearTimeout(this.writing); // browsers allow only so many changes per second
    this.writing = setTimeout(() => history.replaceState(null, "", this.written), 200);
  }

  link() {
    return location.href.split("#")[0] + this.written;
  }

  whole(name, least = 1) {
    const text = `${this.state[name]}`.trim().toLowerCase(), match = /^(\d+(?:\.\d+)?)(k|m)?$/.exec(text);
    const value = match ? +match[1] * ({ k: 1024, m: 1048576 }[match[2]] || 1) : NaN;
    if (!Number.isInteger(value) || value < least) throw new Error(`${name} = ${this.state[name] || "(empty)"} is not a whole number of at least ${least}.`);
    return value;
  }

  // Work out everything from the settings, or explain on the page what does not fit and what would.
  apply() {
    const problem = document.getElementById("problem");
    const problems = [...this.notes];
    try {
      this.update(problems);
    } catch (error) {
      problems.push(error.message);
      this.views = [];
      document.getElementById("views").replaceChildren();
      document.getElementById("comparison").textContent = "";
      this.most = 0;
    }
    problem.replaceChildren(...problems.map((line) => element("p", {}, line)));
    this.show();
  }

  update(problems) {
    const { data, state } = this;
    let nodes = +state.nodes, ranks = +state.ranks;
    const sizes = data.machines.filter((machine) => machine[0] === nodes).map((machine) => machine[1]);
    if (!sizes.length) {
      const all = [...new Set(data.machines.map((machine) => machine[0]))].sort((a, b) => a - b);
      problems.push(`${state.nodes} nodes are not on this page; it has ${all.join(", ")}.`);
      [nodes, ranks] = data.machines[0];
    } else if (!sizes.includes(ranks)) {
      const nearest = sizes.reduce((a, b) => (Math.abs(b - ranks) < Math.abs(a - ranks) ? b : a));
      problems.push(`${nodes} nodes of ${state.ranks} ranks are not on this page; with ${nodes} nodes it has ${sizes.join(", ")} ranks per node. Shown: ${nearest}.`);
      ranks = nearest;
    }
    state.nodes = `${nodes}`;
    state.ranks = `${ranks}`;
    this.fill("ranks", data.machines.filter((machine) => machine[0] === nodes).map((machine) => machine[1]));
    if (!data.clusters[state.cluster]) {
      problems.push(`Cluster ${state.cluster} is not on this page; it has ${Object.keys(data.clusters).join(", ")}.`);
      state.cluster = Object.keys(data.clusters)[0];
    }
    const cluster = (this.cluster = this.clusterOf(nodes, ranks));
    const call = {
      heads: this.whole("heads"), kvHeads: this.whole("kv"), headDim: this.whole("dim"),
      length: this.whole("length", 2 * nodes * ranks), itemsize: data.clusters[state.cluster].itemsize,
    };
    if (call.heads % call.kvHeads) throw new Error(`${call.heads} query heads are not a multiple of ${call.kvHeads} KV heads; ${this.divisors(call.heads)} would fit.`);
    if (!["causal", "full", "window", "documents"].includes(state.mask)) {
      problems.push(`Mask ${state.mask} is not one of causal, full, window, documents.`);
      state.mask = "causal";
    }
    if (!["forward", "backward"].includes(state.pass)) {
      problems.push(`Pass ${state.pass} is not forward or backward.`);
      state.pass = "forward";
    }
    const documents = state.mask === "documents" ? this.documents(call.length) : null;
    const window = state.mask === "window" ? this.whole("window") : null;
    this.call = call;
    this.mask = new PageMask(state.mask, call.length, window, documents);
    this.simulations.clear();
    this.runs.clear();
    const offered = data.offers[`${nodes}x${ranks}`];
    const fits = offered.filter((plan) => call.heads % this.schedule(plan, nodes * ranks).numHeads === 0 && this.fitsGroups(plan, nodes * ranks));
    const roles = data.roles[`${nodes}x${ranks}`];
    const labels = Object.fromEntries(fits.map((plan) => [plan, roles[plan] ? `${plan} (${roles[plan]})` : plan]));
    this.fits = fits;
    for (const name of ["plan", "versus"]) {
      const plan = state[name];
      if (plan && plan !== "auto" && !fits.includes(plan)) {
        const schedule = offered.includes(plan) ? this.schedule(plan, nodes * ranks) : null;
        const reason = schedule ? `needs query heads that ${schedule.numHeads * schedule.groups} divides, and there are ${call.heads}` : `is not one of the plans for ${nodes} nodes of ${ranks} ranks on this page`;
        problems.push(`Plan ${plan} ${reason}. These fit: ${fits.join(", ")}.`);
        state[name] = name === "plan" ? "auto" : "";
      }
    }
    this.fill("plan", ["auto", ...fits], { auto: "auto (the fastest of these)", ...labels });
    this.fill("versus", ["", ...fits], { "": "nothing", ...labels });
    const best = state.plan === "auto" ? this.fastest(fits) : state.plan;
    const plans = [best, ...(state.versus && state.versus !== best ? [state.versus] : [])];
    while (this.views.length < plans.length) this.views.push(new PlanView(this));
    this.views.length = plans.length;
    plans.forEach((plan, at) => this.views[at].set(this.schedule(plan, nodes * ranks), cluster, call, this.mask, state.pass));
    this.most = Math.max(...this.views.map((view) => view.steps)) - 1;
    const wantedStep = +state.step, wantedRank = +state.rank;
    if (!(wantedStep >= 0 && wantedStep <= this.most)) state.step = `${Math.max(0, Math.min(this.most, wantedStep || 0))}`;
    if (!(wantedRank >= 0 && wantedRank < nodes * ranks)) {
      problems.push(`Rank ${state.rank} is not one of 0 to ${nodes * ranks - 1}.`);
      state.rank = "0";
    }
    this.step = Math.round(+state.step);
    for (const view of this.views) {
      view.choose(+state.rank, this.cell());
      view.describe();
    }
    const root = document.getElementById("views");
    root.className = plans.length > 1 ? "two" : "";
    root.replaceChildren(...this.views.map((view) => view.root));
    document.getElementById("comparison").textContent = this.comparison(best);
  }

  schedule(plan, world) {
    const key = `${plan} ${world}`;
    if (!this.schedules.has(key)) this.schedules.set(key, new Schedule(this.data.plans[world][plan]));
    return this.schedules.get(key);
  }

  fitsGroups(plan, world) {
    try {
      const schedule = this.schedule(plan, world);
      sizesOf(schedule, this.call, new PageLayout(schedule, this.call.length));
      return true;
    } catch {
      return false;
    }
  }

  // What a plan runs under the chosen mask.
  running(schedule) {
    const key = schedule.plan;
    if (!this.runs.has(key)) {
      const { cluster, call, mask } = this, batch = mask.isSparse && schedule.world <= MOST_SIMULATED;
      const scheduleOf = (plan, world) => this.schedule(plan, world);
      this.runs.set(key, batch ? new Batch(cluster, schedule, call, mask, scheduleOf) : new DenseRun(cluster, schedule, call, mask));
    }
    return this.runs.get(key);
  }

  simulated(schedule, pass) {
    const key = `${schedule.plan} ${pass}`;
    if (!this.simulations.has(key)) this.simulations.set(key, simulate(this.cluster, schedule, this.running(schedule), pass));
    return this.simulations.get(key);
  }

  // The fastest plan: those that look fastest if one rank stands for all, without window and documents, and the well-known
  // ones are simulated as they run (planner/sparse/advice.py does the same).
  fastest(plans) {
    const { cluster, call } = this, dense = this.mask.isSparse ? new PageMask("causal", call.length) : this.mask;
    const ofBoth = (seconds) => seconds("forward") + seconds("backward");
    const ranked = (some, seconds) => some.map((plan) => {
      const schedule = this.schedule(plan, cluster.world);
      return [seconds(schedule), plan];
    }).sort((a, b) => a[0] - b[0]).map(([, plan]) => plan);
    const estimate = (schedule) => {
      const running = new DenseRun(cluster, schedule, call, dense);
      return ofBoth((pass) => simulate(cluster, schedule, running, pass, true).seconds);
    };
    const known = this.data.roles[`${this.state.nodes}x${this.state.ranks}`];
    const first = ranked(plans, estimate).slice(0, SIMULATED_AGAIN), best = plans.filter((plan) => first.includes(plan) || known[plan]);
    return ranked(best, (schedule) => ofBoth((pass) => this.simulated(schedule, pass).seconds))[0];
  }

  clusterOf(nodes, ranks) {
    const base = this.data.clusters[this.state.cluster];
    const levels = base.levels.map((level) => ({ ...level }));
    if (levels.length === 1 && nodes > 1) throw new Error(`Cluster ${this.state.cluster} is one node; choose 1 node or another cluster.`);
    if (levels.length > 2) throw new Error(`Cluster ${this.state.cluster} has ${levels.length} levels; this page draws one or two.`);
    levels[levels.length - 1].size = ranks;
    if (levels.length === 2) levels[0].size = nodes;
    for (const [name, at] of [["outer", 0], ["inner", levels.length - 1]]) {
      const text = this.state[name];
      if (text === "") this.state[name] = `${+(levels[at].bandwidth / 1e9).toPrecision(4)}`;
      const speed = +this.state[name];
      if (!(speed > 0 && speed < 1e6)) throw new Error(`A link of ${text} GB/s does not work: give a number above 0.`);
      if (text !== "" && !(levels.length === 1 && name === "outer")) levels[at].bandwidth = speed * 1e9;
    }
    return { ...base, levels, world: nodes * ranks };
  }

  // Documents to begin with: each half as long as what is left.
  sample(length) {
    const lengths = [];
    for (let left = length; left > 0; left -= lengths[lengths.length - 1]) lengths.push(lengths.length < 7 ? Math.ceil(left / 2) : left);
    return lengths.join(",");
  }

  documents(length) {
    const texts = `${this.state.documents}`.split(/[\s,]+/).filter(Boolean);
    const lengths = texts.map((text) => (/^\d+$/.test(text) ? +text : NaN));
    const sum = lengths.reduce((a, b) => a + b, 0);
    if (!lengths.length || lengths.some((each) => !(each > 0))) throw new Error("Document lengths are whole numbers separated by commas, such as 3000, 1000, 96.");
    if (sum !== length) throw new Error(`The document lengths sum to ${sum}, but the sequence has ${length} tokens: ${sum < length ? `add one of ${length - sum}` : `remove ${sum - length}`}, or set the length to ${sum}.`);
    return lengths;
  }

  divisors(number) {
    return Array.from({ length: number }, (_, at) => at + 1).filter((each) => number % each === 0).join(", ");
  }

  comparison(best) {
    const [one, two] = this.views;
    const chosen = this.state.plan === "auto" ? `auto chose ${best}, the fastest of ${this.fits.length} plans on this page (startrail plan searches more plans and checks the memory). ` : "";
    if (!two) return chosen;
    const [fast, slow] = one.seconds <= two.seconds ? [one, two] : [two, one];
    const reasons = [];
    const many = fast.cluster.levels.length > 1 && +this.state.nodes > 1;
    const outer = many ? 0 : fast.cluster.levels.length - 1, where = many ? "between nodes" : "within the node";
    if (fast.sent[outer] < 0.98 * slow.sent[outer]) reasons.push(`it sends ${bytesText(fast.sent[outer])} per rank ${where} instead of ${bytesText(slow.sent[outer])}`);
    if (fast.waits < slow.waits - 0.01) reasons.push(`its ranks wait ${(100 * fast.waits).toFixed(0)} % of the time instead of ${(100 * slow.waits).toFixed(0)} %`);
    const text = reasons.length ? reasons.join(", and ") : "it has fewer or larger messages and blocks";
    return `${chosen}${fast.schedule.plan} takes ${secondsText(fast.seconds)}, ${slow.schedule.plan} ${secondsText(slow.seconds)} (${(slow.seconds / fast.seconds).toFixed(2)}x): ${text}.`;
  }

  // --- showing

  show() {
    for (const field of this.form.elements) {
      if (field.name && document.activeElement !== field) field.value = this.state[field.name];
    }
    for (const name of ["window", "documents"]) this.field(name).closest("label").hidden = this.state.mask !== name;
    this.write();
    this.draw();
  }

  draw() {
    const scrub = document.getElementById("scrub");
    scrub.max = this.most;
    scrub.value = this.step;
    scrub.setAttribute("aria-valuetext", `step ${this.step} of ${this.most}`);
    document.getElementById("where").textContent = `step ${this.step} of ${this.most}`;
    if (!this.views.length) return;
    const longest = Math.max(...this.views.map((view) => view.result.seconds));
    for (const view of this.views) view.draw(this.step, longest);
  }

  play(on) {
    this.playing = on && this.views.length > 0;
    const button = document.getElementById("play");
    button.textContent = this.playing ? "Pause" : "Play";
    button.setAttribute("aria-pressed", `${this.playing}`);
    if (!this.playing) return;
    let position = this.step >= this.most ? 0 : this.step, before = 0;
    this.frames = [];
    if (position !== this.step) this.change({ step: position });
    const tick = (now) => {
      if (!this.playing) return;
      if (before) {
        this.frames.push(now - before);
        position += Math.min(now - before, 100) / 1000 / STEP_SECONDS;
      }
      before = now;
      if (Math.floor(position) > this.most) {
        this.play(false);
        return;
      }
      if (Math.floor(position) !== this.step) {
        this.step = Math.floor(position);
        this.state.step = `${this.step}`;
        this.advance();
      }
      for (const view of this.views) view.frame(position);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  // The next step while playing: what does not change is not drawn again.
  advance() {
    document.getElementById("scrub").value = this.step;
    document.getElementById("where").textContent = `step ${this.step} of ${this.most}`;
    for (const view of this.views) {
      const step = Math.min(this.step, view.steps - 1);
      view.machine.prepare(view, step);
      view.redrawStep(step);
    }
    this.write();
  }

  // --- copying

  command() {
    const { state, views } = this, parts = ["startrail show", views[0] ? views[0].schedule.plan : state.plan];
    parts.push(`--nodes ${state.nodes} --ranks ${+state.nodes * +state.ranks} --heads ${state.heads} --kv-heads ${state.kv}`);
    parts.push(`--head-dim ${state.dim} --length ${this.call ? this.call.length : state.length} --cluster ${state.cluster}`);
    if (state.mask === "full") parts.push("--full");
    if (state.mask === "window") parts.push(`--window ${this.mask.window}`);
    if (state.mask === "documents") parts.push(`--documents ${this.mask.ends.slice(1).map((end, at) => end - this.mask.ends[at]).join(",")}`);
    if (state.pass !== "forward") parts.push(`--direction ${state.pass}`);
    return `${parts.join(" ")} --html page.html`;
  }

  python() {
    const { state } = this, plan = this.views[0] ? this.views[0].schedule.plan : state.plan;
    const causal = state.mask === "full" ? "" : ", causal=True";
    const documents = state.mask === "documents" ? `, documents=[${this.mask.ends.join(", ")}]` : "";
    const window = state.mask === "window" ? `, window=${this.mask.window}` : "";
    return [
      "import startrail", "",
      `sp = startrail.SequenceParallel("${plan}")  # on ${+state.nodes * +state.ranks} ranks`,
      `seq = sp.sequence(${this.call ? this.call.length : state.length}${documents})`,
      `out = seq.attention(q, k, v${causal}${window})  # q: (batch, ${state.heads}, local tokens, ${state.dim}); k, v: ${state.kv} heads`,
    ].join("\n");
  }

  async copy(text, what) {
    const said = document.getElementById("copied");
    this.copied = text;
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = `Copied the ${what}.`;
    } catch {
      said.textContent = `Copy this ${what}: ${text}`;
    }
  }
}

unpack(document.getElementById("data").textContent).then((data) => {
  window.startrail = new App(data);
  window.startrail.opened = performance.now();
});

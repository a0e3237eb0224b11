"use strict";
// The page: settings in, recordings out. Python makes the recordings: those of a page from disk are in it, and
// `startrail serve` makes one for every question. The URL fragment holds every setting, so a link restores the view.

const STEP_SECONDS = 0.9; // of playing
const CHOICES = ["plan", "versus", "pass", "step", "rank", "cell"]; // what needs no new recording

class App {
  constructor({ scenes, clusters, live, ticks }) {
    Object.assign(this, { scenes, live, ticks, views: [], step: 0, most: 0, playing: false, busy: false, asked: 0 });
    this.form = document.getElementById("settings");
    this.frames = []; // milliseconds between frames while playing
    this.recordings = new WeakMap(); // by the scene's plan
    this.notes = [];
    document.getElementById("question").disabled = !live;
    document.getElementById("call").open = live || innerWidth > 820;
    document.getElementById("offline").hidden = live;
    this.fill("example", scenes.map((_, at) => at), scenes.map(({ title }) => title));
    this.field("example").closest("label").hidden = scenes.length < 2;
    this.fill("cluster", live ? clusters : [...new Set(scenes.map(({ settings }) => settings.cluster))]);
    this.listen();
    this.restore();
  }

  listen() {
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
  }

  // --- settings

  field(name) {
    return this.form.elements.namedItem(name); // one is called length
  }

  fill(name, values, labels = []) {
    const field = this.field(name), before = field.value;
    field.replaceChildren(...values.map((value, at) => element("option", { value }, `${labels[at] ?? value}`)));
    if (values.map(String).includes(before)) field.value = before;
  }

  // Read the fragment; what it leaves out has the value that the scene was made with.
  restore() {
    const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const { example, ...settings } = wanted;
    this.scene = this.scenes[+example] || this.scenes[0];
    const known = this.scene.settings;
    this.notes = Object.keys(settings).filter((name) => !(name in known)).map((name) => `The link has an unknown setting ${name}.`);
    for (const name of Object.keys(settings)) if (!(name in known)) delete settings[name];
    this.state = { ...known, ...settings };
    this.answer();
  }

  edited(name) {
    const state = { ...this.state };
    this.notes = [];
    if (name === "example") {
      this.scene = this.scenes[+this.field(name).value];
      Object.assign(state, this.scene.settings, { pass: state.pass, step: "0" });
    } else if (name === "other") {
      state.plan = this.field(name).value.trim() || state.plan;
    } else {
      state[name] = this.field(name).value;
      if (["cluster", "nodes", "ranks"].includes(name)) Object.assign(state, { outer: "", inner: "" });
      if (["nodes", "ranks"].includes(name)) this.refit(state);
    }
    this.state = state;
    this.answer();
  }

  // Plans of another number of ranks do not fit: begin with the planner's choice next to the ring.
  refit(state) {
    const world = +state.nodes * +state.ranks, ring = `1x${world}`;
    if (world === this.scene.world) return;
    Object.assign(state, { plan: world > 64 ? ring : "auto", versus: world > 64 ? "" : ring, rank: "0", cell: "", step: "0" });
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
    if (this.scenes.length > 1) parts.set("example", this.scenes.indexOf(this.scene));
    for (const [name, value] of Object.entries(this.state)) if (value !== "" && (this.live || CHOICES.includes(name))) parts.set(name, value);
    this.written = `#${parts.toString().replaceAll("%2F", "/").replaceAll("%2C", ",")}`;
    clearTimeout(this.writing); // browsers allow only so many changes per second
    this.writing = setTimeout(() => history.replaceState(null, "", this.written), 200);
  }

  link() {
    return location.href.split("#")[0] + this.written;
  }

  // --- recordings

  // Show what the settings ask for: from this page's recordings, or with Python's answer.
  async answer() {
    const { state, scene } = this, ticket = ++this.asked;
    const other = Object.keys(scene.settings).filter((name) => !CHOICES.includes(name) && state[name] !== scene.settings[name]);
    const missing = ["plan", "versus"].filter((name) => state[name] && !scene.plans[this.named(state[name])]);
    let problems = [...this.notes];
    if (this.live && (other.length || missing.length)) {
      this.wait(true);
      const problem = await this.ask(other.length ? [] : Object.keys(scene.plans), ticket);
      if (ticket !== this.asked) return; // there is a newer question
      this.wait(false);
      if (problem) {
        this.say([...problems, problem], true);
        return;
      }
    } else if (!this.live) {
      problems = problems.concat(this.withoutPython(other, missing));
    }
    await this.set(problems, ticket);
  }

  named(plan) {
    return plan === "auto" ? this.scene.auto : plan;
  }

  withoutPython(other, missing) {
    const { state, scene } = this, has = `it has ${Object.keys(scene.plans).join(", ")}`;
    const problems = other.map((name) => `${name} = ${state[name]} is not in this page, which has ${scene.settings[name] || "none"}.`);
    problems.push(...missing.map((name) => `Plan ${state[name]} is not in this page; ${has}.`));
    for (const name of other) state[name] = scene.settings[name];
    for (const name of missing) state[name] = name === "versus" ? "" : Object.keys(scene.plans)[0];
    return problems.length ? [...problems, "startrail serve makes a page that answers such questions."] : [];
  }

  // Ask Python. Returns the reason if there is no answer.
  async ask(have, ticket) {
    const settings = { ...this.state };
    try {
      const body = JSON.stringify({ settings, have });
      const response = await fetch("record", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      const found = await response.json();
      if (ticket !== this.asked || found.problem) return found.problem;
      if (have.length) found.plans = { ...this.scene.plans, ...found.plans };
      if (!found.auto) Object.assign(found, { auto: have.length ? this.scene.auto : "", reason: this.scene.reason });
      this.scene = this.scenes[0] = found;
      this.state = { ...found.settings, ...Object.fromEntries(["step", "rank", "cell", "pass"].map((name) => [name, settings[name]])) };
      return "";
    } catch {
      return "startrail serve does not answer any more: start it again, then repeat the change.";
    }
  }

  async recording(plan) {
    const found = this.scene.plans[this.named(plan)];
    if (!this.recordings.has(found)) this.recordings.set(found, new Recording(await unpack(found.data), this.ticks));
    return this.recordings.get(found);
  }

  wait(on) {
    this.busy = on;
    this.play(this.playing && !on);
    document.getElementById("views").classList.toggle("stale", on);
    if (on) document.getElementById("problem").replaceChildren(element("p", { class: "quiet" }, "Python is playing this call ..."));
  }

  say(problems, stale) {
    this.shown = this.asked;
    this.opened = this.opened || performance.now();
    document.getElementById("problem").replaceChildren(...problems.map((line) => element("p", {}, line)));
    document.getElementById("views").classList.toggle("stale", stale);
    if (!stale) return;
    this.offer();
    this.showForm();
  }

  // Draw a scene that has all that the settings ask for.
  async set(problems, ticket) {
    const { state, scene } = this;
    if (!["forward", "backward"].includes(state.pass)) {
      problems.push(`Pass ${state.pass} is not forward or backward.`);
      state.pass = "forward";
    }
    const plans = [state.plan, ...(state.versus && this.named(state.versus) !== this.named(state.plan) ? [state.versus] : [])];
    const recordings = await Promise.all(plans.map((plan) => this.recording(plan)));
    if (ticket !== this.asked) return;
    while (this.views.length < plans.length) this.views.push(new PlanView(this));
    this.views.length = plans.length;
    recordings.forEach((recording, at) => this.views[at].set(scene, recording, state.pass));
    this.most = Math.max(...this.views.map((view) => view.steps)) - 1;
    const wantedStep = +state.step, wantedRank = +state.rank;
    if (!(wantedStep >= 0 && wantedStep <= this.most)) state.step = `${Math.max(0, Math.min(this.most, wantedStep || 0))}`;
    if (!(wantedRank >= 0 && wantedRank < scene.world)) {
      problems.push(`Rank ${state.rank} is not one of 0 to ${scene.world - 1}.`);
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
    document.getElementById("comparison").textContent = [...scene.notes, this.comparison()].join(" ");
    this.offer();
    this.showForm();
    this.write();
    this.draw();
    this.say(problems, false);
  }

  // The plans to choose from: those that are recorded and, where Python answers, all that fit.
  offer() {
    const { scene } = this, offered = new Map(this.live ? scene.offered : []);
    for (const [plan, { role }] of Object.entries(scene.plans)) offered.set(plan, role);
    const label = ([plan, role]) => {
      const known = scene.plans[plan];
      return `${plan}${role ? ` (${role})` : ""}${known ? `, ${secondsText(known.seconds)}` : ""}`;
    };
    const auto = this.live || scene.auto ? [["auto", `auto (the planner's choice${scene.auto ? `: ${scene.auto}` : ""})`]] : [];
    const entries = [...auto, ...[...offered].map((entry) => [entry[0], label(entry)])];
    this.fill("plan", entries.map(([plan]) => plan), entries.map(([, text]) => text));
    this.fill("versus", ["", ...entries.map(([plan]) => plan)], ["nothing", ...entries.map(([, text]) => text)]);
  }

  comparison() {
    const [one, two] = this.views, { state, scene } = this, chosen = [state.plan, state.versus].includes("auto") ? `${scene.reason}. ` : "";
    if (!two) return chosen;
    const [fast, slow] = one.seconds <= two.seconds ? [one, two] : [two, one];
    if (slow.seconds < 1.005 * fast.seconds) return `${chosen}${fast.recording.plan} and ${slow.recording.plan} take the same time, ${secondsText(fast.seconds)}.`;
    const reasons = [], many = scene.levels.length > 1 && +state.nodes > 1;
    const outer = many ? 0 : scene.levels.length - 1, where = many ? "between nodes" : "within the node";
    if (fast.sent[outer] < 0.98 * slow.sent[outer]) reasons.push(`it sends ${bytesText(fast.sent[outer])} per rank ${where} instead of ${bytesText(slow.sent[outer])}`);
    if (fast.waits < slow.waits - 0.01) reasons.push(`its ranks wait ${(100 * fast.waits).toFixed(0)} % of the time instead of ${(100 * slow.waits).toFixed(0)} %`);
    const text = reasons.length ? reasons.join(", and ") : "it has fewer or larger messages and blocks";
    return `${chosen}${fast.recording.plan} takes ${secondsText(fast.seconds)}, ${slow.recording.plan} ${secondsText(slow.seconds)} (${(slow.seconds / fast.seconds).toFixed(2)}x): ${text}.`;
  }

  // --- showing

  showForm() {
    for (const field of this.form.elements) {
      if (field.name in this.state && document.activeElement !== field) field.value = this.state[field.name];
    }
    document.querySelector("#call summary").textContent = this.scene.title;
    this.field("example").value = this.scenes.indexOf(this.scene);
    this.field("other").value = "";
    for (const name of ["window", "documents"]) this.field(name).closest("label").hidden = this.state.mask !== name;
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
    const { state, scene, views } = this, parts = ["startrail show", views[0] ? views[0].recording.plan : state.plan];
    parts.push(`--nodes ${state.nodes} --ranks ${scene.world} --heads ${state.heads} --kv-heads ${state.kv}`);
    parts.push(`--head-dim ${state.dim} --length ${state.length} --cluster ${state.cluster}`);
    if (state.mask === "full") parts.push("--full");
    if (state.mask === "window") parts.push(`--window ${state.window}`);
    if (state.mask === "documents") parts.push(`--documents ${state.documents}`);
    if (state.pass !== "forward") parts.push(`--direction ${state.pass}`);
    return `${parts.join(" ")} --html page.html`;
  }

  python() {
    const { state, scene } = this, plan = this.views[0] ? this.views[0].recording.plan : state.plan;
    const ends = [0];
    for (const length of state.documents.split(",")) ends.push(ends[ends.length - 1] + +length);
    const causal = state.mask === "full" ? "" : ", causal=True";
    const documents = state.mask === "documents" ? `, documents=[${ends.join(", ")}]` : "";
    const window = state.mask === "window" ? `, window=${state.window}` : "";
    return [
      "import startrail", "",
      `sp = startrail.SequenceParallel("${plan}")  # on ${scene.world} ranks`,
      `seq = sp.sequence(${state.length}${documents})`,
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
});

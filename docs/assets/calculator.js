// The inequalities of "What limits a plan", with the reader's numbers in them.
const formulas = {
  ring: ({ tokens, tflops, groups, gbit, mask }) => {
    const compute = (mask * tokens * tokens * groups) / (tflops * 1e12); // per KV head and head element
    const transfer = (4 * tokens) / ((gbit / 8) * 1e9);
    const needed = Math.ceil((4 * tflops * 1e12) / (mask * groups * (gbit / 8) * 1e9));
    const verdict = compute >= transfer ? "hidden" : `exposed: ${(100 * (1 - compute / transfer)).toFixed(0)} % of every hop`;
    return `compute ${(compute * 1e6).toFixed(2)} µs, transfer ${(transfer * 1e6).toFixed(2)} µs per head element: ${verdict}\n` +
      `hidden from ${needed.toLocaleString("en")} tokens per rank`;
  },
  nodes: ({ nodes, tokens, width, gbit }) => {
    const shard = (tokens / nodes) * width * 2;
    const plans = { "Ring Attention": 6 * nodes, "USP": 6 * (nodes - 1), "teams of nodes": 11 * (Math.sqrt(nodes) - 1),
      "heads over nodes": (8 * (nodes - 1)) / nodes };
    return Object.entries(plans).map(([name, shards]) => {
      const bytes = shards * shard;
      return `${name}: ${shards.toFixed(1)} node-shards, ${(bytes / 1e9).toFixed(1)} GB, ${(bytes / ((gbit / 8) * 1e9)).toFixed(2)} s per layer`;
    }).join("\n");
  },
  zones: ({ tokens, ranks, document }) => document <= tokens ? "stays on one rank: sends nothing"
    : document <= tokens * ranks ? `stays in one node: ${Math.ceil(document / tokens)} or more of its ${ranks} ranks share it`
      : "is split over all ranks: uses the whole plan",
};

function start() {
  for (const box of document.querySelectorAll("[data-calculator]")) {
    const update = () => {
      const values = Object.fromEntries([...box.querySelectorAll("input, select")].map((field) =>
        [field.name, Number(field.value.replaceAll(",", ""))]));
      const bad = Object.entries(values).find(([, value]) => !(value > 0));
      box.querySelector("output").textContent = bad ? `${bad[0]} must be a number greater than 0` : formulas[box.dataset.calculator](values);
    };
    box.addEventListener("input", update);
    update();
  }
}
document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();

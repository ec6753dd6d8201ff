"use strict";
// What each warp role does around a step: one lane for each, time being the order of events.
const lanes = (() => {
  const NAMES = ["producer", "loader", "consumer 0", "consumer 1", "storer"];
  const LABELS = { producer: "producer", loader: "loader", "consumer 0": "consumer 0", "consumer 1": "consumer 1", storer: "storer" };
  const BAR = 11, LABEL = 84;
  const KEY = [["k", "copy by TMA"], ["s", "S = Q Kᵀ"], ["v", "P V"], ["o", "softmax"], ["wait", "waits"], ["soft", "arrives at a barrier"]];

  // Bars of a recording: (lane, track, from, to, colour), from and to being numbers of steps.
  function bars(found) {
    const made = [], open = new Map();
    const begin = (key, bar) => open.set(key, bar);
    const end = (key, to) => { const bar = open.get(key); if (bar) { made.push({ ...bar, to }); open.delete(key); } };
    found.steps.forEach((step, i) => {
      const lane = step.lane, about = `${lane} ${step.of} ${step.slot} ${step.block}`;
      if (step.what == "wait") begin(`${lane} wait`, { lane, track: 0, from: i, fill: "wait", name: step.barrier });
      else if (step.what == "resume") end(`${lane} wait`, i);
      else if (step.what == "copy") begin(about, { lane, track: 1 + step.slot % 2 + (step.of == "V" ? 2 : 0), from: i, fill: "k", name: step.of + (step.of == "Q" ? "" : step.block) });
      else if (step.what == "landed") end(about, i);
      else if (step.what == "product") begin(about, { lane, track: step.of == "S" ? 1 : 2, from: i, fill: step.of == "S" ? "s" : "v", name: step.of + step.block });
      else if (step.what == "done") end(about, i);
      else made.push({ lane, track: 0, from: i, to: i + 1, fill: { softmax: "o", rescale: "o", store: "k" }[step.what] || "soft", thin: step.what == "arrive" || step.what == "pass" });
    });
    return made;
  }

  function paint(canvas, found, made, index) {
    const names = NAMES.filter(name => found.steps.some(step => step.lane == name));
    const tracks = name => (/consumer/.test(name) ? 3 : name == "storer" ? 1 : 5);
    const tops = [];
    let height = 4;
    for (const name of names) { tops.push(height); height += tracks(name) * (BAR + 2) + 9; }
    const [ctx, width] = draw.context(canvas, height + 2);
    const unit = width < 600 ? 9 : 13, shown = (width - LABEL) / unit;
    const first = Math.max(0, Math.min(index - shown * 0.6, found.steps.length - shown + 1));
    const x = step => LABEL + (step - first) * unit;
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const past = made.map(bar => ({ ...bar, to: Math.min(bar.to, index + 1) })).filter(bar => bar.from <= index);
    names.forEach((name, i) => {
      const h = tracks(name) * (BAR + 2);
      ctx.fillStyle = draw.colour(found.steps[index].lane == name ? "mark" : "card");
      ctx.fillRect(0, tops[i], width, h + 4);
      ctx.fillStyle = draw.colour("ink");
      ctx.textAlign = "left";
      ctx.fillText(LABELS[name], 6, tops[i] + h / 2 + 2);
    });
    ctx.save();
    ctx.beginPath();
    ctx.rect(LABEL, 0, width - LABEL, height);
    ctx.clip();
    const running = made.filter(bar => bar.from <= index && bar.to > index + 1);
    for (const bar of past) {
      const y = tops[names.indexOf(bar.lane)] + 2 + bar.track * (BAR + 2), w = (bar.to - bar.from) * unit;
      ctx.fillStyle = draw.colour(bar.fill);
      ctx.fillRect(x(bar.from) + (bar.thin ? unit / 2 - 1.5 : 0.5), y, bar.thin ? 3 : Math.max(w - 1, 2), BAR);
      if (bar.name && w > 8 * bar.name.length) {
        ctx.fillStyle = bar.fill == "k" || bar.fill == "v" ? "#111" : "#fff";
        ctx.textAlign = "left";
        ctx.fillText(bar.name, x(bar.from) + 4, y + BAR / 2 + 0.5);
      }
    }
    ctx.strokeStyle = draw.colour("ink");
    ctx.lineWidth = 2;
    ctx.strokeRect(x(index) + 0.5, 1, unit, height - 2);
    ctx.restore();
    return running.length;
  }

  return { bars, paint, KEY };
})();

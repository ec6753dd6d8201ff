"use strict";
// One kernel on the page: its text, its picture, what is on the chip, and the bytes that it moved.
const makePanel = (() => {
  const make = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const NAMES = {
    q: "Q tile", k: "K tile", v: "V tile", s: "S = Q Kᵀ", p: "P", m: "m", l: "l", alpha: "alpha", acc: "acc: output",
  };
  const SPANS = { q: 2, k: 2, v: 2, s: 3, p: 3, acc: 3 }, HOPPER_SPANS = { s: 2, p: 2, acc: 6 };
  const SIGNED = new Set(["q", "k", "v", "acc"]);
  const WORD = /\b(def|for|in|if|else|while|return|import|from|as)\b/g;
  const SLOTS = { copy: "copying", landed: "holds", free: "free" };
  const bytes = x => x.toLocaleString("en-US");

  function marked(line) {
    const [code, ...comment] = line.split("#");
    const span = make("span", { className: "row" });
    let end = 0;
    for (const found of code.matchAll(WORD)) {
      span.append(code.slice(end, found.index), make("b", {}, found[0]));
      end = found.index + found[0].length;
    }
    span.append(code.slice(end));
    if (comment.length) span.append(make("i", {}, `#${comment.join("#")}`));
    if (!line) span.append(" ");
    return span;
  }

  // Bytes of attention that writes S and P to memory and reads them back, in 16-bit numbers.
  function plainBytes({ queries, keys, head_dim }) {
    return 2 * (2 * queries * head_dim + 2 * keys * head_dim + 4 * queries * keys);
  }

  return (recording, name) => {
    const { states, progress } = stateOf(recording), { hopper, steps, call } = recording;
    const said = make("p", { className: "said" }), where = make("p", { className: "where" });
    const line = make("code", { className: "line" }), slots = make("ul", { className: "slots" });
    said.setAttribute("aria-live", "polite");
    const rows = recording.source.map(marked), pre = make("pre", { tabIndex: 0 }, make("code", {}, ...rows));
    const picture = make("canvas"), chip = make("div", { className: "chip" }), lane = make("canvas");
    const figures = [];
    const owners = hopper ? ["consumer 0", "consumer 1"] : ["program"];
    const shown = hopper ? ["s", "p", "m", "l", "acc"] : ["q", "k", "v", "s", "p", "m", "l", "alpha", "acc"];
    const values = Object.fromEntries(shown.map(x => [x, draw.limits(steps.map(step => (step.set && step.set[x]) || []), SIGNED.has(x))]));
    const outputs = draw.limits(steps.map(step => (step.set && step.set.o) || []), true);
    if (hopper) chip.append(make("h3", {}, "shared memory"), slots);
    for (const owner of owners) {
      if (hopper) chip.append(make("h3", {}, `registers of ${owner}`));
      for (const x of shown) {
        const canvas = make("canvas"), caption = make("figcaption", {}, NAMES[x]);
        const figure = make("figure", { style: `grid-column: span ${(hopper ? HOPPER_SPANS : SPANS)[x] || 1}` }, caption, canvas);
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", NAMES[x]);
        figures.push({ owner, x, canvas, figure });
        chip.append(figure);
      }
    }
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", "the score matrix, with what is on the chip");
    lane.setAttribute("role", "img");
    lane.setAttribute("aria-label", "what each warp role does, in the order of events");
    const tracks = {}, list = make("dl");
    const most = Math.max(plainBytes(call), steps.at(-1).read + steps.at(-1).written);
    for (const [key, title] of [["here", "this kernel"], ["plain", "plain attention"]]) {
      tracks[key] = { bar: make("dd", { className: "track" }), number: make("dd", { className: "number" }) };
      list.append(make("dt", {}, title), tracks[key].bar, tracks[key].number);
    }
    const section = (className, title, ...children) => make("section", { className }, make("h3", {}, title), ...children);
    const element = make("article", { className: "panel" },
      make("h2", {}, recording.title), where, said, line,
      make("div", { className: "views" },
        section("code", "the kernel, as a plain call sees it", pre),
        section("picture", "Q, K, V, O are in HBM; only the outlined scores exist, on the chip", picture, section("bytes", "bytes through HBM so far", list)),
        section("state", hopper ? `on the chip (a cell is the mean of ${recording.cell} × ${recording.cell})` : "on the chip", chip)));
    let bars;
    if (hopper) {
      bars = lanes.bars(recording);
      const key = make("ul", { className: "key" }, ...lanes.KEY.map(([fill, text]) => make("li", {}, make("i", { style: `background: var(--${fill})` }), text)));
      element.querySelector(".views").before(section("lanes", "what each warp role does: the order of events is one that the barriers allow; widths are not times", lane, key));
    }
    element.dataset.version = name;

    function onChip(index, state) {
      const step = steps[index];
      if (!hopper) {
        const place = state.chips.program, last = state.tiles.at(-1), active = place.s !== undefined;
        const block = step.block === undefined ? [] : [step.block];
        return { q: place.q ? [step.tile] : [], k: place.k ? block : [], v: place.v && step.what != "load K" ? block : [], tiles: active ? [last] : [] };
      }
      const held = tile => Object.entries(state.slots).filter(([key, slot]) => key[0] == tile && slot.state == "landed").map(([, slot]) => slot.block);
      const tiles = owners.flatMap((owner, i) => (state.chips[owner] && state.chips[owner].s ? [state.tiles.filter(x => x.owner == i).at(-1)] : []));
      return { q: held("Q"), k: held("K"), v: held("V"), tiles };
    }

    function show(index) {
      const step = steps[index], state = states[index];
      element.dataset.step = index + 1;
      said.textContent = words.of(step, recording);
      where.textContent = hopper
        ? `${step.lane}, event ${index + 1} of ${steps.length}`
        : step.what == "combine" ? `second kernel, program ${step.program}: step ${index + 1} of ${steps.length}`
          : `program ${step.program}${call.kernel.endsWith("split") ? `, split ${step.split}` : ""}: step ${index + 1} of ${steps.length}`;
      for (const row of pre.querySelectorAll(".now")) row.classList.remove("now");
      const row = rows[step.line - 1];
      if (row) {
        row.classList.add("now");
        pre.scrollTop = row.offsetTop - pre.clientHeight / 2;
        pre.scrollLeft = 0;
        line.textContent = row.textContent.trim();
      }
      draw.matrix(picture, recording, state, values.s, outputs, onChip(index, state));
      const set = step.set || {};
      for (const { owner, x, canvas, figure } of figures) {
        const now = state.chips[owner] || {};
        const height = x == "m" || x == "l" || x == "alpha" ? 112 : SIGNED.has(x) && !hopper ? 84 : 112;
        draw.heat(canvas, now[x], values[x], SIGNED.has(x), hopper ? 64 : height);
        figure.classList.toggle("fresh", set[x] !== undefined && (!hopper || step.lane == owner));
      }
      const part = (className, value) => make("span", { className, style: `width: ${100 * value / most}%` });
      tracks.here.bar.replaceChildren(part("read", step.read), part("written", step.written));
      tracks.here.number.textContent = bytes(step.read + step.written);
      tracks.plain.bar.replaceChildren(part("plain", plainBytes(call)));
      tracks.plain.number.textContent = `${bytes(plainBytes(call))} in all`;
      slots.replaceChildren(...Object.entries(hopper ? state.slots : {}).sort().map(([key, slot]) =>
        make("li", { className: slot.state }, `${key}: ${SLOTS[slot.state]}${key[0] == "Q" || slot.state == "free" ? "" : ` ${slot.block}`}`)));
      if (hopper) lanes.paint(lane, recording, bars, index);
    }

    return { element, show, count: steps.length, progress };
  };
})();

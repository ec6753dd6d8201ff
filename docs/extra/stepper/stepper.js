"use strict";
// The page: which kernels are shown, at which step, and what keys, buttons and links do.
const stepper = (() => {
  const VERSIONS = { fa1: "FA1", fa2: "FA2", "fa2-split": "FA2 split", "fa3-hopper": "FA3 Hopper", "fa4-hopper": "FA4 Hopper" };
  const PAUSE = 700; // milliseconds between steps that play
  const byId = id => document.getElementById(id);
  const recordings = {}, waiting = {};
  let panels = [], version = "fa1", beside = "", step = 0, timer = null, request = 0;

  function add(name, recording) {
    recordings[name] = recording;
  }

  function load(name) {
    if (!/^[a-zA-Z0-9-]+$/.test(name)) return Promise.reject(new Error(name));
    waiting[name] ||= recordings[name] ? Promise.resolve() : new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `recordings/${name}.js`;
      script.onload = done;
      script.onerror = () => failed(new Error(name));
      document.head.append(script);
    });
    return waiting[name];
  }

  // What the address names: #version=fa2&step=7&beside=fa1.
  function follow() {
    const found = new URLSearchParams(location.hash.slice(1));
    return show(found.get("version") || "fa1", found.get("beside") || "", (parseInt(found.get("step"), 10) || 1) - 1);
  }

  async function show(name, other, at) {
    const mine = ++request, names = other && other != name ? [name, other] : [name];
    try {
      await Promise.all(names.map(load));
    } catch (error) {
      pause();
      panels = [];
      byId("panels").innerHTML = "";
      const said = Object.assign(document.createElement("p"), { className: "error" });
      said.textContent = `There is no recording "${error.message}". Choose one of the kernels above.`;
      byId("panels").append(said);
      return;
    }
    if (mine != request) return; // another choice came meanwhile
    [version, beside] = [name, names[1] || ""];
    panels = names.map(x => makePanel(recordings[x], x));
    byId("panels").replaceChildren(...panels.map(panel => panel.element));
    byId("panels").classList.toggle("two", panels.length > 1);
    for (const button of byId("versions").children) button.setAttribute("aria-pressed", button.value == version);
    byId("beside").value = beside;
    go(at);
  }

  // The step of a second kernel at which as much of its work is done.
  function matching(progress) {
    const [first, second] = panels;
    if (progress >= first.progress.at(-1)) return second.count - 1;
    let at = 0;
    while (at + 1 < second.count && second.progress[at + 1] <= progress + 1e-9) at++;
    return at;
  }

  function go(to) {
    if (!panels.length) return;
    step = Math.max(0, Math.min(to, panels[0].count - 1));
    panels[0].show(step);
    if (panels[1]) panels[1].show(matching(panels[0].progress[step]));
    byId("count").textContent = `step ${step + 1} of ${panels[0].count}`;
    const bar = byId("bar");
    bar.setAttribute("aria-valuemin", 1);
    bar.setAttribute("aria-valuemax", panels[0].count);
    bar.setAttribute("aria-valuenow", step + 1);
    paintBar();
    const hash = `#version=${version}&step=${step + 1}${beside ? `&beside=${beside}` : ""}`;
    history.replaceState(null, "", hash);
    byId("open").href = `index.html${hash}`;
  }

  // The bar: one line for each step, in the colour of what it does.
  function paintBar() {
    const [ctx, width] = draw.context(byId("bar"), 28);
    const { steps } = recordings[version], unit = width / steps.length;
    const fills = { "load Q": "q", "load K": "k", "load V": "v", copy: "k", landed: "k", "store O": "o", store: "o", combine: "o", "store partial": "o", scores: "s", accumulate: "s", product: "s", done: "s", wait: "wait" };
    steps.forEach((one, i) => {
      ctx.globalAlpha = i <= step ? 1 : 0.3;
      ctx.fillStyle = draw.colour(fills[one.what] || "hatch");
      ctx.fillRect(i * unit, 8, Math.max(unit - 0.4, 0.6), 12);
    });
    ctx.globalAlpha = 1;
    ctx.fillStyle = draw.colour("ink");
    ctx.fillRect(Math.min((step + 0.5) * unit - 2, width - 4), 1, 4, 26);
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    byId("play").innerHTML = "▶&#xFE0E; play";
    byId("play").setAttribute("aria-label", "play");
  }

  function play() {
    if (timer) return pause();
    if (step == panels[0].count - 1) go(0);
    timer = setInterval(() => {
      if (step >= panels[0].count - 1) pause();
      else go(step + 1);
    }, panels[0].count > 200 ? PAUSE / 2 : PAUSE);
    byId("play").innerHTML = "❚❚ pause";
    byId("play").setAttribute("aria-label", "pause");
  }

  const moves = {
    ArrowRight: () => go(step + 1), ArrowLeft: () => go(step - 1), Home: () => go(0), End: () => go(Infinity),
  };

  function key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName == "SELECT") return;
    if (event.key == " " && event.target.tagName != "BUTTON") play();
    else if (moves[event.key]) { pause(); moves[event.key](); }
    else return;
    event.preventDefault();
  }

  function swipe() {
    let start = null;
    byId("panels").addEventListener("touchstart", event => {
      start = event.target.closest("pre") ? null : event.touches[0];
    }, { passive: true });
    byId("panels").addEventListener("touchend", event => {
      if (!start) return;
      const end = event.changedTouches[0], dx = end.clientX - start.clientX, dy = end.clientY - start.clientY;
      if (Math.abs(dx) > 40 && Math.abs(dy) < 40) { pause(); go(step + (dx < 0 ? 1 : -1)); }
    });
  }

  function drag() {
    const bar = byId("bar");
    const to = event => { pause(); go(Math.floor(event.offsetX / bar.clientWidth * panels[0].count)); };
    bar.addEventListener("pointerdown", event => { bar.setPointerCapture(event.pointerId); to(event); });
    bar.addEventListener("pointermove", event => event.buttons && to(event));
  }

  // The site's own choice of light or dark, if a reader has made one.
  function theme() {
    let chosen = "auto";
    try { chosen = localStorage.getItem("theme") || "auto"; } catch { /* no storage here */ }
    const dark = chosen == "dark" || (chosen != "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    go(step);
  }

  // A page that embeds this one makes its frame as high as it needs.
  function tellHeight() {
    const height = Math.ceil(document.body.getBoundingClientRect().height) + 8;
    if (parent != window) parent.postMessage({ stepperHeight: height }, "*");
  }

  function start() {
    for (const [name, title] of Object.entries(VERSIONS)) {
      const button = Object.assign(document.createElement("button"), { value: name, textContent: title });
      button.addEventListener("click", () => { pause(); show(name, beside, 0); });
      byId("versions").append(button);
    }
    for (const [name, title] of [["", "nothing"], ...Object.entries(VERSIONS)])
      byId("beside").append(Object.assign(document.createElement("option"), { value: name, textContent: title }));
    byId("beside").addEventListener("change", event => show(version, event.target.value, step));
    for (const [id, name] of [["first", "Home"], ["back", "ArrowLeft"], ["forward", "ArrowRight"], ["last", "End"]])
      byId(id).addEventListener("click", () => { pause(); moves[name](); });
    byId("play").addEventListener("click", play);
    document.documentElement.classList.toggle("embedded", location.search == "?embedded");
    addEventListener("keydown", key);
    addEventListener("hashchange", follow);
    addEventListener("resize", () => go(step));
    new ResizeObserver(tellHeight).observe(document.body);
    addEventListener("storage", theme);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
    theme();
    drag();
    swipe();
    follow();
  }

  addEventListener("DOMContentLoaded", start);
  return { add };
})();

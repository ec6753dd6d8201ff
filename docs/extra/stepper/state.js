"use strict";
// What a recording shows at each of its steps; null in an array is minus infinity.
const stateOf = (() => {
  function portable(found) {
    const { block_q, block_kv } = found.call, states = [];
    let chip = {}, tiles = [], rows = [];
    for (const step of found.steps) {
      const set = step.set || {};
      if (step.what == "load Q" || step.what == "combine") chip = {};
      if (step.what == "load K") chip = { q: chip.q, m: chip.m, l: chip.l, acc: chip.acc };
      if (!set.o) chip = { ...chip, ...set };
      if (set.s) {
        const tile = { row: step.tile * block_q, column: step.block * block_kv, values: set.s, owner: 0 };
        const same = other => other.row == tile.row && other.column == tile.column;
        tiles = [...tiles.filter(x => !same(x)), tile];
      }
      if (set.o) rows = [...rows, { row: step.what == "combine" ? step.tile : step.tile * block_q, values: set.o }];
      states.push({ chips: { program: chip }, tiles, rows });
    }
    return states;
  }

  function hopper(found) {
    const states = [], { block_kv } = found.call;
    let chips = {}, tiles = [], rows = [], slots = {};
    for (const step of found.steps) {
      const set = step.set || {};
      if (step.what == "wait" || step.what == "pass" || step.what == "resume")
        if (/^Q full/.test(step.barrier)) chips = { ...chips, [step.lane]: {} };
      if (step.set && !set.o) chips = { ...chips, [step.lane]: { ...chips[step.lane], ...set } };
      if (set.s) {
        const tile = { row: step.query / found.cell, column: step.block * block_kv / found.cell, values: set.s, owner: +step.lane.slice(-1) };
        const same = other => other.row == tile.row && other.column == tile.column;
        tiles = [...tiles.filter(x => !same(x)), tile];
      }
      if (set.o) rows = [...rows, { row: step.query / found.cell, values: set.o }];
      if (step.what == "copy" || step.what == "landed")
        slots = { ...slots, [`${step.of} ${step.slot}`]: { state: step.what, block: step.of == "Q" ? step.query / 64 : step.block } };
      if (step.what == "arrive" && / empty /.test(step.barrier)) {
        const name = step.barrier.replace(" empty", ""), slot = slots[name];
        const read = slot ? (slot.read || 0) + 1 : 0;
        const all = name[0] == "Q" ? 1 : 2;
        if (slot) slots = { ...slots, [name]: { ...slot, read, state: read >= all ? "free" : slot.state } };
      }
      states.push({ chips, tiles, rows, slots });
    }
    return states;
  }

  // The share of the work that is done at each step: tiles of S, and steps between two of them.
  function progress(found) {
    const isUnit = step => step.what == "scores" || (step.what == "done" && step.of == "S");
    const marks = found.steps.flatMap((step, i) => (isUnit(step) ? [i] : []));
    const ends = [0, ...marks.slice(1), found.steps.length];
    return found.steps.map((_, i) => {
      let unit = 0;
      while (ends[unit + 1] <= i) unit++;
      return (unit + (i - ends[unit]) / (ends[unit + 1] - ends[unit])) / marks.length;
    });
  }

  return found => ({ states: (found.hopper ? hopper : portable)(found), progress: progress(found) });
})();

"use strict";
// What happens in a step, in words. Each function is given the step and its recording.
const words = (() => {
  const range = (first, size, end) => `${first} to ${Math.min(first + size, end) - 1}`;
  const keys = (step, found) =>
    range(step.block * found.call.block_kv, found.call.block_kv, found.call.keys);
  const lane = step => step.lane[0].toUpperCase() + step.lane.slice(1);
  const fa1 = found => found.call.kernel == "fa1";
  const FULL = /^(.) (full|empty) (\d)$/;

  function meaning(name) {
    const parts = FULL.exec(name);
    if (!parts) return `its turn at the tensor cores`;
    const [, tile, side, slot] = parts;
    return side == "full" ? `${tile} in slot ${slot}` : `slot ${slot} of ${tile} to be empty`;
  }
  function arrival(name) {
    const parts = FULL.exec(name);
    if (!parts) return `lets ${name.replace("turn of ", "")} use the tensor cores`;
    const [, tile, side, slot] = parts;
    return side == "full" ? `says that ${tile} in slot ${slot} is complete` : `has read slot ${slot} of ${tile} and gives it back`;
  }

  const portable = {
    "load Q": (step, found) => `Load queries ${range(step.tile * found.call.block_q, found.call.block_q, found.call.queries)} from HBM. They stay on the chip while the program goes through the keys.`,
    begin: step => step.set.acc ? "Begin with no output: acc = 0." : step.set.m ? "No score has been seen: the maximum m of each row is −∞." : "No exponential has been added: the sum l of each row is 0.",
    "load K": (step, found) => `Load keys ${keys(step, found)} from HBM.`,
    scores: () => "Multiply Q by the transposed K: one tile of scores S. It exists on the chip only.",
    mask: () => "A query must not see later keys: their scores become −∞ (hatched).",
    maximum: () => "Raise the maximum m of each row, if this tile has a larger score.",
    exponentials: (step, found) => `P is the exponential of S minus the row's new maximum, so no number exceeds 1.${fa1(found) ? "" : " FA2 uses powers of 2, which the GPU computes directly."}`,
    correction: () => "alpha = exp(old m − new m) corrects what was added with the old maximum.",
    sum: () => "l = alpha · l + the row sums of P.",
    "load V": (step, found) => `Load values ${keys(step, found)} from HBM.`,
    accumulate: (step, found) => fa1(found)
      ? "Add P V to the output. FA1 divides by l after every block, so o is always normalised."
      : "acc = alpha · acc + P V. FA2 divides by l only once, after the last block.",
    "store O": () => "Write the finished rows of O to HBM. The scores are never written.",
    "store partial": () => "This program saw only a part of the keys. Write what it found for these to HBM in fp32.",
    "store LSE": () => "Write the logarithm of each row's sum of exponentials (LSE), which the backward needs.",
    combine: step => `A second kernel combines the parts of query ${step.tile}: their mean, each weighted by its sum of exponentials.`,
  };
  const hopper = {
    wait: step => `${lane(step)} waits for ${meaning(step.barrier)}.`,
    resume: step => `${lane(step)} goes on: it has ${FULL.test(step.barrier) ? meaning(step.barrier).replace(" to be empty", ", now empty") : "its turn at the tensor cores"}.`,
    pass: step => `${lane(step)} needs ${FULL.test(step.barrier) ? meaning(step.barrier) : "its turn at the tensor cores"}, and does not have to wait.`,
    arrive: step => `${lane(step)} ${arrival(step.barrier)}.`,
    copy: (step, found) => step.of == "Q"
      ? `TMA begins to copy queries ${range(step.query, 64, found.call.queries)} into slot ${step.slot} of Q. The ${step.lane} does not wait for it.`
      : `TMA begins to copy block ${step.block} of ${step.of} into slot ${step.slot}. The ${step.lane} does not wait for it.`,
    landed: step => `${step.of == "Q" ? "Q" : `Block ${step.block} of ${step.of}`} is in slot ${step.slot}. Its barrier says full.`,
    product: step => step.of == "S"
      ? `${lane(step)} issues S = Q Kᵀ for block ${step.block}. The tensor cores work while the warps go on.`
      : `${lane(step)} issues acc + P V for block ${step.block}.`,
    done: step => step.of == "S"
      ? `The scores of block ${step.block} are in the registers of ${step.lane}.`
      : `acc of ${step.lane} now includes block ${step.block}.`,
    softmax: step => `${lane(step)} computes the softmax of block ${step.block}: mask, m, P and l. Products of the other consumer can run meanwhile.`,
    rescale: (step, found) => found.call.kernel.startsWith("fa4")
      ? `${lane(step)}: ${step.rows} of 64 rows raise their reference m. FA4 rescales a row of acc only if its maximum has grown by more than 8, which is a factor of 2⁸ in P.`
      : `${lane(step)} multiplies acc by alpha. alpha differs from 1 in ${step.rows} of 64 rows, and all are multiplied.`,
    store: step => `TMA copies O of consumer ${step.consumer} from shared memory to HBM.`,
  };
  return {
    of: (step, found) => (found.hopper ? hopper : portable)[step.what]({ set: {}, ...step }, found),
    keys,
  };
})();

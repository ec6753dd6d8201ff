// Sphinx asks `score` for the weight of every result of a search. A version's page comes before
// pages that only mention the version, and the log of experiments comes last.
const asked = (new URLSearchParams(window.location.search).get("q") || "")
  .toLowerCase()
  .replace(/flash[\s-]?attention[\s-]*(?=\d)/g, "fa"); // "FlashAttention 2" is the page fa2
const words = asked.split(/[^a-z0-9]+/);

var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const [page, folder] = docname.split("/").reverse();
    if (folder === "versions" && words.includes(page)) return score + 1000;
    if (folder === "versions" && page !== "index") return score + 10;
    return docname === "understand/log" ? score - 10 : score;
  },
  // Sphinx's own weights, which a scorer of one's own has to name.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

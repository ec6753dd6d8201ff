"""Tables of this package beside others: every head dim, the deterministic backward, the host."""

import statistics
from collections.abc import Callable
from functools import partial

from docs.report.tables import grouped, markdown, where_and_when
from flash_versions.bench.results import Document, Row

PEERS = ("cudnn", "flash-attn-4")


def head_dims(document: Document) -> str:
    """Forwards of every head dim: TFLOP/s, and over all lengths the ratio to the better peer."""
    found = {
        (row["version"], *shape_of(row)): row["tflops"]
        for row in document["rows"]
        if row["suite"] == "head dims" and "tflops" in row and row["name"] in ("", "default")
    }
    about = where_and_when(document, "head dims", ["flash-attn-4"])
    table = by_head_dim(found, (*PEERS, "fa3", "fa4"), ("fa3", "fa4"))
    ratio = f"the better of fa3 and fa4 to the better peer, {over(found)}"
    return f"{table}\n\nTFLOP/s; ratio: {ratio}. {about}.\n"


def backward_of_head_dims(document: Document) -> str:
    """Likewise of backwards, with those that are padded to a power of two."""
    found = {}
    for row in document["rows"]:
        if row["suite"] == "head dims, backward" and "tflops" in row:
            if row["name"] in ("", "padded"):
                found[row["name"] or row["version"], *shape_of(row)] = row["tflops"]
            if row.get("default"):
                found["fa3", *shape_of(row)] = row["tflops"]
    about = where_and_when(document, "head dims, backward", ["flash-attn-4"])
    table = by_head_dim(found, (*PEERS, "padded", "fa3"), ("fa3",))
    return f"{table}\n\nTFLOP/s; ratio: fa3 to the better peer, {over(found)}. {about}.\n"


def over(found: dict[tuple, float]) -> str:
    """Over which lengths a mean is; found: as in `by_head_dim`."""
    lengths = sorted({key[-1] for key in found})
    return f"geometric mean over {', '.join(map(str, lengths))} tokens"


def shape_of(row: Row) -> tuple[int, int, bool, int]:
    """Head dims of q and v, whether causal, and tokens."""
    return *row["dims"], row["causal"], row["length"]


def by_head_dim(found: dict[tuple, float], names: tuple[str, ...], own: tuple[str, ...]) -> str:
    """A table of the rates of these contestants; found: by name and `shape_of`."""
    lengths = sorted({key[-1] for key in found})
    shown = [n for n in (2048, 8192) if n in lengths] or lengths[:1]
    body = []
    for kind in sorted({key[1:4] for key in found}):
        name = f"{kind[0]}" if kind[0] == kind[1] else f"{kind[0]}, {kind[1]} of v"
        cells = [f"{name}, {'causal' if kind[2] else 'full'}"]
        for n in shown:
            rates = [found.get((name, *kind, n)) for name in names]
            cells += [f"{rate:.0f}" if rate else "-" for rate in rates]
        ratios = []
        for n in lengths:
            ours, theirs = ([found.get((x, *kind, n), 0) for x in group] for group in (own, PEERS))
            if any(ours) and any(theirs):
                ratios.append(max(ours) / max(theirs))
        body.append([*cells, f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"])
    columns = [f"{name}, {n // 1024}k" for n in shown for name in names]
    return markdown(["head_dim", *columns, "ratio"], body)


def divided_groups(suite: str, document: Document) -> str:
    """Backwards whose groups of query heads are divided over so many programs, and the default."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == suite and "ms_p50" in row:
            lengths, batch = row["lengths"], row["batch"]
            what = {"in turns": "causal, in turns"}.get(row["kind"], row["kind"])
            if row["kind"] == "prompt":
                size = f"{batch} x ({lengths[0]} + {len(lengths) - 1} x {lengths[1]})"
            elif row["kind"] == "packed":
                size = f"{len(lengths)} sequences of {sum(lengths) // len(lengths)}"
            else:
                size = f"{batch} x {lengths[0]}"
            name = f"{what}, {size}, {row['kv_heads']} key heads, D={row['head_dim']}"
            rows = found.setdefault((name,), {})
            rows[row["name"]] = row
            if row["default"]:
                rows["default"] = row
    body = []
    for (name,), rows in found.items():
        one, chosen = rows["1"]["ms_p50"], rows["default"]
        cells = [name, *(f"{rows[parts]['ms_p50']:.3f}" for parts in ("1", "2", "4"))]
        cells += [f"{chosen['ms_p50']:.3f}", f"{chosen['parts']}"]
        cells.append(f"{one / chosen['ms_p50']:.2f} x")
        copies = rows.get("copies")
        body.append([*cells, f"{copies['ms_p50'] / chosen['ms_p50']:.1f} x" if copies else "-"])
    header = ["milliseconds", "1 part", "2 parts", "4 parts", "default", "parts of the default"]
    header += ["times as fast as 1 part", "times as fast as rows with copies"]
    if all(line[-1] == "-" for line in body):
        header, body = header[:-1], [line[:-1] for line in body]
    about = where_and_when(document, suite)
    return f"{markdown(header, body)}\n\n4 query heads to a key head, bf16. {about}.\n"


def in_turns(document: Document) -> str:
    """The deterministic backward: its rate, its share of the rate in any order, and its ratio to a
    peer's.
    """
    suite, peer = "deterministic backward", "flash-attn-4"
    groups = grouped(document, suite, "head_dim", "causal", "group", "S", by="version")
    lengths = sorted({key[-1] for key in groups})
    lines: dict[tuple, dict[int, str]] = {}
    for (*kind, length), group in sorted(groups.items()):
        rates = {name: row["tflops"] for name, row in group.items() if "tflops" in row}
        rate = rates["fa3 deterministic"]
        theirs = rates.get(f"{peer} deterministic")
        ratio = f"; {rate / theirs:.2f} x" if theirs else ""
        cell = f"{rate:.0f} ({rate / rates['fa3']:.2f}{ratio})"
        lines.setdefault(tuple(kind), {})[length] = cell
    body = [
        [
            f"D={head_dim}, {'causal' if causal else 'full'}, {heads} to a key head",
            *(cells.get(n, "-") for n in lengths),
        ]
        for (head_dim, causal, heads), cells in lines.items()
    ]
    header = f"TFLOP/s (share of the rate in any order; ratio to {peer}'s deterministic call)"
    about = where_and_when(document, suite, [peer])
    return f"{markdown([header, *(f'S={n}' for n in lengths)], body)}\n\n{about}.\n"


def on_the_host(document: Document) -> str:
    """The host's time for a call beside others', and a layer's."""
    found = [row for row in document["rows"] if row["suite"] == "host" and "us" in row]
    names = list(dict.fromkeys(row["contestant"] for row in found))
    lines: dict[str, dict[str, float]] = {}
    for row in found:
        shape = ", ".join(map(str, row["shape"]))
        packed = ", packed" if row["packed"] else ""
        line = f"{row['what']}{packed}, ({shape}), {row['measured']}"
        lines.setdefault(line, {})[row["contestant"]] = row["us"]
    body = [
        [line, *(f"{times[name]:.0f}" if name in times else "-" for name in names)]
        for line, times in lines.items()
    ]
    about = where_and_when(document, "host")
    return f"{markdown(['microseconds', *names], body)}\n\n{about}.\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "head dims": head_dims,
    "head dims backward": backward_of_head_dims,
    "divided groups": partial(divided_groups, "divided groups"),
    "divided groups of 192 dims": partial(divided_groups, "divided groups, 192"),
    "wide divided groups": partial(divided_groups, "divided groups, wide"),
    "deterministic backward": in_turns,
    "host": on_the_host,
}

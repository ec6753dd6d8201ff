"""A document as `flash_versions.bench` writes it, of invented numbers: every suite, every peer."""

from typing import Any

from flash_versions.suites import BACKWARD_FLOPS, SUITES, Competitor, Shape

SPEED = {"fa1": 300.0, "fa2": 450.0, "fa3": 620.0, "fa4": 660.0}
SPEED |= {"torch fa2": 340.0, "cudnn": 600.0, "flash-attn-4": 650.0, "plain": 60.0}
VARIANTS = {"one stage": 0.6, "without overlap": 0.9, "plain grid": 1.02}
MACHINE = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "cudnn": "9", "flash-attn-4": "4.0"}


def everyone(suite: str) -> list[Competitor]:
    """Who takes part: name, and in an ablation of what it is a variant."""

    def one(name: str, **of: Any) -> Competitor:
        return Competitor(name, lambda q, k, v: q, **of)

    if suite == "ablation":
        variants = [one(f"fa3 {name}", of="fa3", variant=name) for name in VARIANTS]
        return [one("fa3", of="fa3"), *variants, one("cudnn")]
    if suite.startswith("packed"):
        return [one("fa2"), one("fa2 packed"), one("fa3"), one("fa3 packed"), one("cudnn")]
    if suite == "decode":
        return [one("fa1"), one("fa2 unsplit"), *map(one, list(SPEED)[1:])]
    return [one(name) for name in SPEED]


def tflops(one: Competitor, shape: Shape) -> float:
    """An invented rate: rises with the length, less with a mask."""
    speed = SPEED[one.of or one.name.split(" packed")[0].split(" unsplit")[0]]
    speed *= VARIANTS.get(one.variant, 1.0) * (0.9 if one.name.endswith("packed") else 1.0)
    return speed * shape.N / (shape.N + 600) * (0.85 if shape.causal else 1.0) * shape.D / 128


def rows_of(suite: str, shape: Shape) -> list[dict[str, Any]]:
    """The rows of one shape."""
    rows = []
    for one in everyone(suite):
        row = one.row(suite, shape)
        flops = shape.flops() * (BACKWARD_FLOPS if row["pass"] == "backward" else 1)
        ms = flops / tflops(one, shape) / 1e9
        row |= {"ms_p20": ms * 0.99, "ms_p50": ms, "ms_p80": ms * 1.01, "rounds": 30}
        if suite == "decode":
            ms = shape.kv_bytes / (SPEED.get(one.name, 40) / 200) / 1e9
            row |= {"ms_p50": ms, "tb_per_s": shape.kv_bytes / ms / 1e9}
        else:
            row |= {"flops": flops, "tflops": flops / ms / 1e9}
        if row["pass"] == "forward":
            scores = shape.B * shape.H * shape.M * shape.N * 4 if one.name == "plain" else 0
            row["peak_mib"] = (shape.B * shape.H * shape.M * shape.D * 2 + scores) / 2**20
        rows.append(row)
    return rows


def document() -> dict[str, Any]:
    """All suites."""
    rows = [
        row for suite, shapes in SUITES.items() for shape in shapes for row in rows_of(suite, shape)
    ]
    calls = ("forward", "backward")
    rows += [
        {"suite": "launch", "version": name, "call": call, "host_us": 60.0}
        for name in ("fa1", "fa2", "fa3")
        for call in calls
    ]
    protocol = {"rounds": 30}
    return {
        "schema": 1,
        "date": "2026-01-01",
        "commit": "abc",
        "machine": MACHINE,
        "protocol": protocol,
        "copy_tb_per_s": 4.2,
        "rows": rows,
    }

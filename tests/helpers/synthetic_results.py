"""A document as the benchmark writes it, of invented numbers: every suite, every peer."""

import re
from collections.abc import Iterable
from typing import Any

from flash_versions.bench.suites import BACKWARD_FLOPS, SUITES, Competitor, Shape

SPEED = {"fa1": 300.0, "fa2": 450.0, "fa3": 620.0, "fa4": 660.0}
SPEED |= {"torch fa2": 340.0, "cudnn": 600.0, "flash-attn-4": 650.0, "plain": 60.0}
VARIANTS = {"one stage": 0.6, "without overlap": 0.9, "plain grid": 1.02}
FP8_SPEED = {"cudnn fp8": 880.0}
FP8_VARIANTS = {"fp8 head": 1.4, "fp8 block": 1.35}  # in FP8, times the speed in bf16
QUANTIZE_SPEED = {"block": 3.4, "block hadamard": 3.0, "head": 2.0, "tensor": 1.9, "copy": 4.2}
SCHEMES = {"bf16": 0.002, "tensor": 0.2, "head": 0.18, "block": 0.15, "block+hadamard": 0.08}
LAYER = {"fa2": 4.0, "fa3": 1.6, "fa4": 2.0, "cudnn": 2.4, "torch fa2": 3.2}  # milliseconds
CURVES = {"sdpa": 0.0, "fa3": 0.01, "fa4": -0.01}  # what is added to the loss of every step
GPUS = {"1 GPU": (1, 600.0), "ring": (2, 1140.0), "all_to_all": (2, 1020.0)}
MACHINE = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "cudnn": "9", "flash-attn-4": "4.0"}
MACHINE |= {"cudnn-frontend": "1.18"}


def everyone(suite: str) -> list[Competitor]:
    """Who takes part: name, and in an ablation of what it is a variant."""

    def one(name: str, **of: Any) -> Competitor:
        return Competitor(name, lambda q, k, v: q, **of)

    def version(name: str, variants: Iterable[str], **of: Any) -> list[Competitor]:
        changed = [one(f"{name} {what}", of=name, variant=what, **of) for what in variants]
        return [one(name, of=name, **of), *changed]

    if suite.startswith("ablation"):
        fp8 = {"precision": "fp8"} if suite.endswith("fp8") else {}
        fa3, fa4 = (version(name, VARIANTS, **fp8) for name in ("fa3", "fa4"))
        return [*fa3, *fa4, one("cudnn fp8", **fp8) if fp8 else one("cudnn")]
    if suite == "fp8":
        fa3, fa4 = (version(name, FP8_VARIANTS) for name in ("fa3", "fa4"))
        peers = one("cudnn"), one("cudnn fp8", precision="fp8")
        return [*fa3, *fa4, *peers]
    if suite == "quantize":
        return [one(name, precision="fp8") for name in QUANTIZE_SPEED]
    if suite.startswith("packed"):
        return [one("fa2"), one("fa2 packed"), one("fa3"), one("fa3 packed"), one("cudnn")]
    if suite == "decode":
        return [one("fa1"), one("fa2 unsplit"), *map(one, list(SPEED)[1:])]
    if suite == "backward":
        first, last = list(SPEED)[:3], list(SPEED)[3:]
        return [*map(one, first), one("fa3 deterministic"), *map(one, last)]
    return [one(name) for name in SPEED]


def tflops(one: Competitor, shape: Shape) -> float:
    """An invented rate: rises with the length, less with a mask."""
    plain = one.of or re.sub(" (packed|unsplit|deterministic)$", "", one.name)
    speed = (SPEED | FP8_SPEED)[plain]
    speed *= (VARIANTS | FP8_VARIANTS).get(one.variant, 1.0)
    speed *= 0.9 if one.name != plain and not one.of else 1.0
    return speed * shape.N / (shape.N + 600) * (0.85 if shape.causal else 1.0) * shape.D / 128


def rows_of(suite: str, shape: Shape) -> list[dict[str, Any]]:
    """The rows of one shape."""
    rows = []
    for one in everyone(suite):
        row = one.row(suite, shape)
        if suite == "quantize":
            moved = 3 * 3 * shape.B * shape.H * shape.M * shape.D
            ms = moved / QUANTIZE_SPEED[one.name] / 1e9
            row |= {"ms_p20": ms, "ms_p50": ms, "ms_p80": ms, "rounds": 30}
            rows.append(row | {"bytes": moved, "tb_per_s": moved / ms / 1e9})
            continue
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


def backward_peer() -> dict[str, Any]:
    """One more run of the suite "backward", as it is committed."""
    rows = [row for row in document()["rows"] if row["suite"] == "backward"]
    return document() | {"rows": [row | {"suite": "backward peer"} for row in rows]}


def accuracy() -> dict[str, Any]:
    """Errors of FP8 as `flash_versions.bench.accuracy` writes them."""
    rows = [
        {
            "distribution": distribution,
            "D": head_dim,
            "scheme": scheme,
            "rmse": error * factor,
            "mean": error * factor / 2,
            "row": error * factor / 4,
        }
        for distribution, factor in (("gaussian", 1), ("outliers", 3))
        for head_dim in (64, 128)
        for scheme, error in SCHEMES.items()
    ]
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    return about | {"rows": rows}


def several_gpus() -> dict[str, Any]:
    """One long sequence on two GPUs as tests/benchmarks/context_parallel_gpu.py writes it."""
    rows = []
    for suite, factor in (("context parallel", 1.0), ("context parallel backward", 3.5)):
        for heads, kv_heads in ((16, 16), (32, 8)):
            for causal in (True, False):
                shape = Shape(1, heads, kv_heads, 131072, 131072, 128, causal)
                fields = {name: getattr(shape, name) for name in ("B", "H", "Hkv", "M", "N", "D")}
                for name, (gpus, rate) in GPUS.items():
                    ms = factor * shape.flops() / rate / 1e9
                    row = {"suite": suite, **fields, "causal": causal, "version": name}
                    row |= {"kernels": "fa3", "gpus": gpus, "ms_p50": ms, "ms_all": [ms] * 3}
                    row["tflops"] = factor * shape.flops() / ms / 1e9
                    if gpus > 1:
                        row["ratio"] = rate / GPUS["1 GPU"][1]
                    rows.append(row)
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE, "gpus": 2}
    return about | {"rows": rows}


def processes() -> dict[str, Any]:
    """Training on several GPUs as tests/benchmarks/parallel_gpu.py writes it."""
    rows: list[dict[str, Any]] = []
    for what, phases in (("GRPO", ("step", "rollout", "learn")), ("supervised", ("step",))):
        for gpus in (1, 2):
            rates = {x: 1000.0 * (1 + number) for number, x in enumerate(phases)}
            row = {"suite": "processes", "what": what, "gpus": gpus}
            for phase, rate in rates.items():
                row[f"{phase}_tokens_per_second"] = rate * (1.9 if gpus == 2 else 1.0)
                row[f"{phase}_seconds"] = [1.0, 1.0, 1.0]
                if gpus == 2:
                    row[f"{phase}_ratio"] = 1.9
            rows.append(row)
        check = {"suite": "processes checks", "what": what, "processes": "2", "weights": 1e-6}
        rows.append(check | {"metrics": {"loss": 1e-7}, "gap": 1e-6})
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE, "gpus": 2}
    return about | {"rows": rows}


def matrix_products() -> dict[str, Any]:
    """The transformer's own products as tests/benchmarks/kernels_speed.py writes them."""
    rows: list[dict[str, Any]] = []
    others = {"gemm": "cuBLAS", "gemm swiglu": "torch", "norm gemm": "cuBLAS alone"}
    others["norm gemm swiglu"] = "cuBLAS alone"
    for suite, other in others.items():
        for size in (2048, 4096):
            shape = {"suite": suite, "shape": f"square {size}", "M": size, "K": size, "N": size}
            for version, rate in (("ours", 720.0), (other, 750.0)):
                rows.append(shape | {"version": version, "tflops": rate, "ms_p50": 1.0})
    for path in ("ours and fp64", "torch's and fp64"):
        errors = {"rms": 0.125, "largest": 1.5, "mean": 0.0, "from_1": 1234}
        rows.append({"suite": "norm gemm numerics", "path": path} | errors)
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    return about | {"protocol": {"rounds": 30}, "rows": rows}


def generation() -> dict[str, Any]:
    """Generation as tests/benchmarks/generate_speed.py writes it."""
    rows: list[dict[str, Any]] = []
    for case in ("shipped", "llama-3.2-1b"):
        for batch, prompt, step in ((1, 512, 0.8), (64, 512, 2.0), (1, 4096, 0.9)):
            place = {"suite": "generate", "case": case, "batch": batch, "prompt": prompt}
            ours = {"ms_per_step": step, "share": 0.75, "seconds": 0.1, "attention": "fa4"}
            rows.append(place | {"contestant": "ours"} | ours)
            theirs = {"ms_per_step": 4 * step, "share": 0.19, "seconds": 0.5}
            rows.append(place | {"contestant": "transformers"} | theirs)
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    return about | {"protocol": {"copy_bytes_per_second": 4.2e12}, "rows": rows}


def profile() -> dict[str, Any]:
    """Counters of the backward as flash_versions/bench/profile_backward.py writes them."""
    row = {"suite": "backward profile", "version": "fa3", "B": 2, "H": 16, "N": 8192, "D": 128}
    row |= {"causal": False, "eighths": 0, "microseconds": 4000.0, "registers": 128.0}
    row |= {"tensor_pct": 75.0, "shared_pct": 78.0, "stalls": {"barrier": 5.6, "wait": 1.5}}
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    return about | {"rows": [row]}


def grpo_step() -> dict[str, Any]:
    """Steps of GRPO as tests/benchmarks/trl_speed_gpu.py writes them."""
    rows: list[dict[str, Any]] = []
    speed = {"ours": 1.2, "TRL": 4.0, "ours again": 1.0, "TRL-bf16": 3.0}
    for name, seconds in speed.items():
        row = {"suite": "grpo step", "case": "sums", "contestant": name, "seconds_best": seconds}
        phases = {"rollout_seconds_best": seconds / 2, "learn_seconds_best": seconds / 4}
        rows.append(row | phases)
    machine = MACHINE | {"trl": "1.16.0", "transformers": "5.17.0"}
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": machine}
    return about | {"rows": rows}


def training() -> dict[str, Any]:
    """One layer and curves of losses as tests/benchmarks/training_gpu.py writes them."""
    shape = {"B": 8, "S": 2048, "H": 16, "D": 128, "causal": True}
    rows: list[dict[str, Any]] = []
    for name, ms in LAYER.items():
        times = [ms / 1000 * factor for factor in (0.75, 1.0, 1.25)]
        rows.append(
            {"suite": "layer", "version": name, **shape, "seconds": ms / 1000, "times": times}
        )
    for seed in (0, 1, 2):
        for name, more in CURVES.items():
            losses = [5 / (1 + step / 20) + 0.1 * seed + more for step in range(60)]
            rows.append(
                {"suite": "training curve", "version": name, "seed": seed, "losses": losses}
            )
    about = {"schema": 1, "date": "2026-01-01", "commit": "abc", "machine": MACHINE}
    return about | {"protocol": {"rounds": 3, "steps": 20}, "rows": rows}


def trace(tiles: int = 4, steps: int = 6, clock: float | None = 1000.0) -> dict[str, Any]:
    """The roles of a program with so many tiles: a loader that is ahead, two consumers in turns,
    and what stores; 100 cycles for each step.
    """
    roles: dict[str, list[list[Any]]] = {}
    for tile in range(tiles):
        for step in range(steps):
            at = 5000 + (tile * steps + step) * 100
            for role, shift in (("loader", 0), ("consumer 0", 40), ("consumer 1", 90)):
                states = ("await room", "copy") if role == "loader" else ("multiply", "softmax")
                half, end = at + shift + 50, at + shift + 100
                roles.setdefault(role, []).append([states[0], at + shift, half])
                roles[role].append([states[1], half, end])
        end = 5000 + (tile + 1) * steps * 100
        roles.setdefault("storer", []).append(["await o", end - 200, end])
        roles["storer"].append(["store", end, end + 80])
    return {
        "schema": 1,
        "commit": "abc",
        "source": "def",
        "machine": MACHINE,
        "what": {"version": "fa4", "D": 128, "S": 1024},
        "clock_mhz": clock,
        "programs": [{"program": 7, "roles": roles}],
    }


def all_results() -> list[dict[str, Any]]:
    """Every kind of document that docs/results may hold."""
    scripts = [several_gpus(), processes(), grpo_step(), training()]
    scripts += [matrix_products(), generation(), profile()]
    return [document(), backward_peer(), accuracy(), *scripts, trace()]

"""Every name of the rest of the package that the diff knows, and what a plain call fixes."""

from flash_versions.diff.files import VERSIONS
from flash_versions.diff.fold import Known

ROWS = f"{VERSIONS}.tiles.rows"
EXP2 = f"{VERSIONS}.fa4.exp2"
# A plain kernel takes these functions from the package as they are, ...
SHARED = {f"{ROWS}.{x}_rows" for x in ("load", "store")}
SHARED |= {f"{ROWS}.{x}_row_values" for x in ("load", "store")} | {f"{EXP2}.mixed_exp2"}
# ... has these of its own, specialised to the call, and the statements of all others in place.
KEPT = {"load_rows", "softmax_step", "raise_reference", "fold_block", "heavy_first"}
KEPT |= {"probabilities", "fold_queries", "fold_keys"}
WHOLE = {"Rows": ROWS}  # named tuples that it keeps; others are taken apart
RECORDS = {"Rows", "Queries"}  # named tuples that kernels construct
GIVEN = {  # and those that they are given, by parameter
    "sequences": "Sequences",
    "window": "Window",
    "mods": "ScoreMods",
    "rule": "Rule",
    "queries": "QueryViews",
}

# What is left of a parameter is called as its last field, or so.
RENAMED = {("kv_heads",): "heads", ("queries", "dq"): "dq_out"}
# What a plain call fixes, by parameter or field: it has no options, is not packed, has as many key
# heads as query heads, and does not split the keys.
FIXED = {
    **dict.fromkeys(("plan", "partials", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths")),
    **dict.fromkeys(("kv_starts", "block_table", "block_table_stride", "page_size")),
    **dict.fromkeys(("cap_scale", "slopes", "slopes_head_stride", "sink", "dropout_seed")),
    **dict.fromkeys(("dropout_threshold", "dropout_rescale", "counts")),
    "share": None,
    "slopes_batch_stride": 0,
    "GROUP": 1,
    "num_splits": 1,
    "SPLIT": False,
    "HAS_DLSE": False,
    # FA4's choice on a GPU where both of its tricks pay, in bf16.
    "THRESHOLD": 8.0,
    "EIGHTHS": 2,
    "DEGREE": 3,
}
FUNCTIONS = {"EXP2": "exp2"}  # parameters that are a function of the kernel's module
# What such a call does, as its launch shows: one split, and a program for each tile.
LAUNCHED = {"tl.program_id(1)": Known(0)}
ONE_TILE = "tl.num_programs(0)", "total"

# What a plain call switches off and on in the kernels for Hopper, by parameter, field or function.
SWITCHES = {
    **dict.fromkeys(("FP8", "is_fp8", "CAP", "LEFT", "LATE_WAIT"), False),
    **dict.fromkeys(("OVERLAP", "PING_PONG", "EPILOGUE_BUFFER"), True),
    "CONSUMERS": 2,
    "THRESHOLD": 8.0,
}
IDLE = {"trace.enter"}  # calls that then do nothing
RETURNED = {"problem.capped"}  # and that return their argument

"""Cells that compile a kernel: where triton is not installed, they say so and do nothing else."""

from IPython.core.getipython import get_ipython

from flash_versions.dispatch.extras import triton_missing

MARK = "%%needs_triton"


def leave_out(lines: list[str]) -> list[str]:
    """The lines of a cell that run: of one that begins with the mark, those behind it, or, without
    triton, a sentence.
    """
    if not lines or lines[0].strip() != MARK:
        return lines
    sentence = triton_missing()
    return [f"print({sentence[0].upper() + sentence[1:]!r})\n"] if sentence else lines[1:]


def register() -> None:
    """Let the running IPython know the mark."""
    shell = get_ipython()
    if shell is not None and leave_out not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(leave_out)

"""Inspecting: what is read from listings and logs, real kernels, the command."""

import json

import pytest
import triton

from flash_versions.inspect import command as inspect
from flash_versions.inspect import sass
from flash_versions.inspect.compiled import Assembly

# A dispatch by a table, a loop inside a loop, and a retry that lies behind the end.
LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   BRX R4 -0x1d0       (*"BRANCH_TARGETS .L_x_0,.L_x_9"*);
.L_x_0:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R4, gdesc[UR36], RZ, !UPT ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x30138], R6 ;
        /*0040*/              @!P1 BRA `(.L_x_7) ;
.L_x_2:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], RZ, !UPT ;
        /*0060*/                   R2UR UR4, R0 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24, gsb0 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR4], R88 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00a0*/                   MUFU.EX2 R5, R24 ;
        /*00b0*/                   FADD R6, R5, R6 ;
        /*00c0*/                   MUFU.EX2 R7, R25 ;
        /*00d0*/               @P2 STL [R1], R7 ;
        /*00e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00f0*/              @!P0 BRA `(.L_x_1) ;
        /*0100*/               @P3 BRA `(.L_x_0) ;
        /*0110*/                   EXIT ;
.L_x_9:
        /*0120*/                   UTMALDG.4D [UR8], [UR40] ;
        /*0130*/                   BRA.U UP0, `(.L_x_9) ;
        /*0140*/                   EXIT ;
.L_x_7:
        /*0150*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x30138], R6 ;
        /*0160*/              @!P1 BRA `(.L_x_7) ;
        /*0170*/                   BRA `(.L_x_2) ;
.L_x_8:
        /*0180*/                   BRA `(.L_x_8);
"""


def test_hot_loop_of_a_listing():
    [loop] = sass.find_hot_loops(LISTING)
    assert [str(event) for event in loop.events] == [
        "mbarrier wait",
        "HGMMA smem x2",
        "HGMMA regs",
        "wait 1",
        "MUFU.EX2 x2",
        "STL",
        "wait 0",
    ]
    assert len(loop.instructions) == 13
    assert loop.opcodes["HGMMA"] == 3
    assert loop.local_memory == 1
    assert loop.instructions[-1] == ("@!P0", "BRA", "`(.L_x_1)")


LOG = """ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async is serialized
ptxas info    : (C7517) warpgroup.wait is injected in around line 251
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'forward_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_kernel
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for helper
    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 10 barriers
"""


def test_log_of_the_assembler():
    found = Assembly.of_log(LOG)
    assert (found.registers, found.stack) == (168, 16)
    assert (found.spill_stores, found.spill_loads) == (16, 20)
    assert found.serialised == ["(C7511) Potential Performance Loss: wgmma.mma_async is serialized"]
    assert found.injected == ["(C7517) warpgroup.wait is injected in around line 251"]
    quiet = Assembly.of_log(LOG.split("\n", 2)[2])
    assert quiet.serialised == quiet.injected == []
    with pytest.raises(RuntimeError, match="does not tell what the kernel spills"):
        Assembly.of_log("ptxas fatal")


SMALL = ["--length", "256", "--heads", "2", "--head-dim", "64"]


@pytest.mark.slow
def test_summary(capfd):
    assert inspect.main(["fa2", "--causal", "--backward", *SMALL]) == 0
    out = capfd.readouterr().out
    title, blank, header, *rows = out.splitlines()
    assert title == (
        f"fa2 for sm_90, Triton {triton.__version__}: batch 1, 256 queries, 256 keys, 2 heads, "
        "head_dim 64, bfloat16, causal"
    )
    assert header.split() == ["forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"]
    assert rows[0].split() == ["from", "fa2.forward", *["fa2.backward"] * 3]
    labels = {row.split("  ")[0] for row in rows}
    assert labels >= {"registers per thread", "spill stores, bytes", "wgmma", "ex2.approx"}
    assert "mma.sync" not in labels and "\nforward_kernel\n  hot loop of " in out
    assert out.index("HGMMA smem x") < out.index("wait 0 |") < out.index("HGMMA regs x")


@pytest.mark.slow
def test_a_kernel_of_roles_as_json(capfd):
    assert inspect.main(["fa3", "--json", *SMALL]) == 0
    [kernel] = json.loads(capfd.readouterr().out)["kernels"]
    roles = [(role["function"], role["warps"], role["registers"]) for role in kernel["roles"]]
    assert roles == [("consume", 4, 240), ("consume", 4, 240), ("produce", 1, 24)]
    assert all(kernel["counts"][name] for name in ("tma_loads", "wgmma", "mbarriers", "ex2"))
    assert kernel["counts"]["mma_sync"] == kernel["counts"]["tcgen05"] == kernel["stack"] == 0
    assert kernel["instructions"] == sum(kernel["opcodes"].values())
    assert all(loop["opcodes"]["HGMMA"] for loop in kernel["hot_loops"])
    assert kernel["serialised"] == kernel["injected"] == []


@pytest.mark.slow
def test_code_to_a_file(tmp_path, capfd):
    file = tmp_path / "kernel.ptx"
    command = ["fa1", "--arch", "sm_80", "--show", "ptx", "--out", str(file), *SMALL]
    assert inspect.main(command) == 0
    text = file.read_text()
    assert text.startswith("// forward_kernel; fa1 for sm_80, ")
    assert ".target sm_80" in text and "mma.sync.aligned" in text
    assert f"wrote {file}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["fa9"], "version='fa9' is unknown; there are fa1, fa2"),
        (["fa2", "--arch", "sm_75"], "arch='sm_75' is unknown; there are sm_80, sm_86"),
        (["fa2", "--variant", "x"], "variant='x' of 'fa2' is unknown; there are: "),
        (["fa4", "--precision", "fp9"], "precision='fp9' is unknown; write 'fp8'"),
        (["fa4", "--precision", "fp8", "--backward"], "precision='fp8:block:e4m3' is forward only"),
        (["fa2", "--kv-heads", "3"], "q has 16 heads, which must be a multiple of k's 3."),
        (["/nowhere/mine.py"], "/nowhere/mine.py is not there; python -m flash_versions.mine new"),
        (["fa2", *SMALL, "--out", "/nowhere/x"], "/nowhere/x: No such file or directory"),
    ],
)
def test_one_sentence(arguments, sentence, capfd):
    assert inspect.main(arguments) == 2
    out, err = capfd.readouterr()
    assert f"error: {sentence}" in err
    assert not out and "Traceback" not in err

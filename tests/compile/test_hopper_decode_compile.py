"""What the compiler makes of FA3's decoding kernel for Hopper."""

from tests.compile import apart

SHARED_MEMORY = 228 * 1024  # of a multiprocessor


def test_what_the_compiler_makes_of_it():
    """A load for each panel of each box of K and V, products that run one after the other without
    being waited for, nothing spilled; two programs fit on a multiprocessor up to head_dim 128.
    """
    kernels = [
        row
        for row in apart.compiled("kernels.decode", "hopper")
        if row["kernel"] == "decode_kernel"
    ]
    assert [row["tma_loads"] for row in kernels] == [2, 16, 4, 8]
    assert [row["wgmma"] for row in kernels] == [8, 16, 16, 32]
    for row in kernels:
        assert not (row["spills"] or row["serialised"] or row["unused_barriers"]), row
        assert not any(row["loops"]) and not row["dependency"], row
        assert list(row["roles"]) == ["consume", "produce"], row
        programs = 1 if row["call"].startswith("256") else 2
        assert programs * (row["shared"] + 1024) <= SHARED_MEMORY, row

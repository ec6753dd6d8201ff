"""Which kernels serve what comes through each door, on what passes for an H200."""

import pytest
import torch

from flash_versions.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_versions.integrations.hf import attend
from tests.helpers.kernels.launches import noted_launches

EXPLICIT = ["forward of fa4", "prepare", "backward", "finish"]
OF_A_SINK = ["delta", "sink"]  # before `prepare`, for its gradient
CU_SEQLENS = torch.tensor([0, 100, 256], dtype=torch.int32)


@pytest.fixture
def launches(monkeypatch):
    with noted_launches(monkeypatch) as found:
        yield found


def tensors(*shape):
    return [torch.randn(shape).bfloat16().requires_grad_() for _ in range(3)]


def packed_documents():
    return flash_attn_varlen_func(
        *tensors(256, 4, 128), CU_SEQLENS, CU_SEQLENS, 156, 156, causal=True
    )


def a_sink_and_slopes():
    options = {"s_aux": torch.ones(4), "alibi_slopes": torch.ones(4)}
    return flash_attn_func(*tensors(2, 256, 4, 128), causal=True, **options)


def documents_of_transformers():
    q, k, v = tensors(1, 4, 256, 128)
    bounds = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS}
    return attend(torch.nn.Module(), q, k, v, None, **bounds)[0]


CALLS = [packed_documents, a_sink_and_slopes, documents_of_transformers]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.replace("_", " "))
def test_ragged_training_takes_the_kernels_for_hopper(call, launches):
    o = call()
    assert [name for name, *_ in launches] == EXPLICIT[:1]
    o.sum().backward()
    beside = OF_A_SINK if call is a_sink_and_slopes else []
    assert [name for name, *_ in launches] == [*EXPLICIT[:1], *beside, *EXPLICIT[1:]]

"""Weights in MXFP4 against transformers, and in a checkpoint as gpt-oss is released."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.family_checkpoints import attention, make_checkpoint
from transformer.model.families.mxfp4 import dequantise
from transformer.model.weights import load_model, save_model

WEIGHTS = "model.safetensors"
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}


def packed(experts, out, groups, seed=0):
    """Every nibble there is, and exponents that leave the weights of use."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, out, groups, 16), generator=generator)
    scales = torch.randint(119, 126, (experts, out, groups), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


@pytest.mark.parametrize("exponents", [0, 100], ids=["usual", "large"])
def test_numbers_are_those_of_transformers(exponents):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed(3, 8, 2)
    scales += exponents
    found = dequantise(blocks, scales)
    assert found.dtype == torch.bfloat16 and found.shape == (3, 8, 64)
    assert torch.equal(found.mT, mxfp4.convert_moe_packed_tensors(blocks, scales))
    assert len(found.unique()) > 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model twice: experts in MXFP4, and in bf16."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    made, plain, first = map(tmp_path_factory.mktemp, ("mxfp4", "bf16", "fp32"))
    make_checkpoint("gpt-oss", first)
    config = json.loads((first / "config.json").read_text())
    save_model(load_model(first, attention), plain, config=config)
    tensors = load_file(plain / WEIGHTS)
    quantized = {}
    for number, (name, tensor) in enumerate(list(tensors.items())):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks, scales = packed(experts, outputs, inputs // 32, seed=number)
            quantized[f"{name}_blocks"], quantized[f"{name}_scales"] = blocks, scales
            tensors[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
        else:
            quantized[name] = tensor
    (made / "config.json").write_text(json.dumps({**config, **QUANTIZED}))
    save_file(tensors, plain / WEIGHTS)
    save_file(quantized, made / WEIGHTS)
    return made, plain


def test_a_checkpoint_is_what_it_stands_for(folders):
    """In any dtype."""
    made, plain = folders
    for dtype in (None, torch.float32):
        found, expected = (load_model(x, attention, dtype=dtype).state_dict() for x in folders)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_it_is_saved_in_bf16(folders, tmp_path):
    """Also under its own config.json, which says MXFP4."""
    made, plain = folders
    config = json.loads((made / "config.json").read_text())
    save_model(load_model(made, attention), tmp_path, config=config)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again, expected = (load_file(x / WEIGHTS) for x in (tmp_path, plain))
    torch.testing.assert_close(again, expected, rtol=0, atol=0)

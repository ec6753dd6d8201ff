"""The kernel for the Kernels Hub: written, loaded by `kernels` and used by transformers from it.

Children that load it refuse `import flash_versions`; this process judges what they computed.
"""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from flash_versions import VERSIONS, compare
from flash_versions.integrations.hub.__main__ import main
from flash_versions.integrations.hub.export import BUILD, write_kernel

SET_UP = """
import sys
from pathlib import Path
import flash_versions.simulator.launch  # simulates launches of any kernel, as there is no GPU
for name in list(sys.modules):
    if name.startswith("flash_versions") and not name.startswith("flash_versions.simulator"):
        del sys.modules[name]
sys.modules["flash_versions"] = None  # importing it fails
import torch
"""
USES = """
from kernels import (
    LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub,
    use_kernel_mapping,
)

kernel = get_local_kernel(Path(sys.argv[1]))
q, k, v, do = torch.load("inputs.pt")
found = {}
for version in kernel.VERSIONS:
    o = kernel.attention(q, k, v, causal=True, version=version)
    found[version] = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
found["flash_attn_func"] = [kernel.flash_attn_func(q, k, v, causal=True).detach()]
bounds = torch.tensor([0, q.shape[1]], dtype=torch.int32)
packed = [x[0] for x in (q, k, v)]
o = kernel.flash_attn_varlen_func(*packed, bounds, bounds, q.shape[1], q.shape[1], causal=True)
found["flash_attn_varlen_func"] = [o[None].detach()]
with torch.no_grad():
    cache = [torch.zeros_like(k), torch.zeros_like(v)]
    found["flash_attn_with_kvcache"] = [
        kernel.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=0, causal=True)
    ]

class Attention(torch.nn.Module):
    def forward(self, query, key, value, causal, scale):
        raise AssertionError("the layer was not replaced")

class PackedAttention(torch.nn.Module):
    def forward(self, query, key, value, cu_seqlens, causal, scale):
        raise AssertionError("the layer was not replaced")

layers, mapping = torch.nn.ModuleList(), {}
for layer, name in ((Attention, "FlashAttention"), (PackedAttention, "PackedFlashAttention")):
    layers.append(use_kernel_forward_from_hub(name)(layer)())
    repository = LocalLayerRepository(Path(sys.argv[1]), layer_name=name)
    mapping[name] = {device: {Mode.TRAINING: repository} for device in ("cpu", "cuda")}
with use_kernel_mapping(mapping):
    kernelize(layers, mode=Mode.TRAINING, device="cpu")
results = {"batch": layers[0](q, k, v, True, None)}
results["packed"] = layers[1](q[0], k[0], v[0], bounds, True, None)[None]
for name, o in results.items():
    found[name] = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
torch.save(found, "found.pt")
"""
TRANSFORMERS = """
from kernels import get_kernel
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "someone/flash-versions"
kernel = get_kernel(NAME, version=1, trust_remote_code=True)
calls, version = [], kernel.VERSIONS["fa4"]
forward = version.forward
object.__setattr__(version, "forward", lambda *given: calls.append(1) or forward(*given))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
tokens, mask = torch.randint(64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
mask[0, :7] = 0  # padded on the left

def run():
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        made = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return logits, made

logits, made = run()
assert not calls
model.set_attn_implementation(NAME, allow_all_kernels=True)
ours, made_by_ours = run()
assert len(calls) >= 2 * 5, calls  # layers x (a forward, a prefill and three steps)
torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
assert torch.equal(made, made_by_ours)
"""

needs_kernels = pytest.mark.skipif(
    find_spec("kernels") is None, reason="kernels is not installed: pip install kernels"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the repository, as the command writes it."""
    folder = tmp_path_factory.mktemp("hub") / "flash-versions"
    assert main([str(folder)]) == 0
    return folder


@pytest.fixture
def run_child(written, tmp_path):
    """Runs a script outside the checkout with the folder of the kernel as its argument."""

    def run_child(script: str) -> None:
        environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environment["LOCAL_KERNELS"] = f"someone/flash-versions={written}"
        done = subprocess.run(
            [sys.executable, "-c", SET_UP + script, str(written)],
            env=environment, cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    return run_child


@pytest.fixture
def inputs(tmp_path):
    """q, k, v and do, where a child finds them."""
    q, k, v, do = torch.randn(4, 1, 40, 4, 16).unbind()
    inputs = [q, k[:, :, :2], v[:, :, :2]]
    inputs = [x.contiguous().requires_grad_() for x in inputs]
    torch.save([*inputs, do], tmp_path / "inputs.pt")
    return [*inputs, do]


def judge(found, inputs) -> None:
    """Results and gradients are within the error budget of causal attention."""
    *qkv, do = inputs
    for name, (o, *gradients) in found.items():
        more = {"do": do, **dict(zip(("dq", "dk", "dv"), gradients))} if gradients else {}
        accuracies = compare(o, *qkv, causal=True, **more)
        assert len(accuracies) == 1 + len(gradients), name
        assert all(accuracy.ok for accuracy in accuracies.values()), (name, accuracies)


def test_nothing_is_imported_by_an_absolute_name(written):
    build = written / BUILD
    files = list(build.rglob("*.py"))
    assert len(files) > 50
    assert {"autograd", "replay"} <= {file.parent.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not {x.split(".")[0] for x in names} & {"flash_versions", "transformer"}, file
    assert not list(build.rglob("bench*")) and not list(build.rglob("inspect*"))


def test_metadata(written, tmp_path):
    """The name under which it is loaded is another as soon as a module is another."""
    about = json.loads((written / BUILD / "metadata.json").read_text())
    assert (about["name"], about["version"], about["license"]) == ("flash-versions", 1, "MIT")
    assert about["id"].isidentifier() and about["id"].startswith("flash_versions_")
    operators = (written / BUILD / "dispatch/autograd/operators.py").read_text()
    assert f'"{about["id"]}::forward"' in operators
    assert f'"{about["id"]}_plans"' in (written / BUILD / "dispatch/request/request.py").read_text()
    write_kernel(tmp_path / "again")
    again = json.loads((tmp_path / "again" / BUILD / "metadata.json").read_text())
    assert again == about
    assert (written / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")


def test_it_replaces_its_own_folder_only(written, tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(written)
    assert main([str(link)]) == 0 and link.is_symlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert main([str(tmp_path / "mine")]) == 2
    assert "holds no kernel; name a new folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert main([str(tmp_path / "new"), "--name", "Flash/Versions"]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@needs_kernels
def test_kernels_loads_it(run_child, inputs, tmp_path):
    """Its functions, and the layers of a model that it replaces."""
    run_child(USES)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == len(VERSIONS) + 5
    judge(found, inputs)


@pytest.mark.slow
@needs_kernels
def test_transformers_uses_it(run_child):
    transformers_utils = pytest.importorskip("transformers.utils")
    if not transformers_utils.is_kernels_available():
        pytest.skip("this version of transformers asks for another version of kernels")
    run_child(TRANSFORMERS)

"""A small GPT learns to write like this repository's documents, character by character.

    python docs/use/examples/char_gpt.py --attention sdpa auto --out runs/char_gpt

trains with torch's attention and with ours, from the same weights on the same batches, and draws
both loss curves into runs/char_gpt/loss.png. Without a GPU it takes a minute.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from flash_versions import attention


class Block(nn.Module):
    """One layer: attention over the characters before, then a feed-forward network."""

    def __init__(self, width, heads, version):
        super().__init__()
        self.heads, self.version = heads, version
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        """(batch, length, width) to the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.version == "sdpa":  # torch's takes (batch, heads, length, head_dim)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:  # the one line that puts ours in its place
            o = attention(q, k, v, causal=True, version=self.version)
        x = x + self.project(o.flatten(2))
        return x + self.mlp(self.norms[1](x))


def train(text, symbols, args, version):
    """Train a model; draw its loss in each step."""
    torch.manual_seed(0)
    layers = [Block(args.width, args.heads, version) for _ in range(args.layers)]
    characters, places = nn.Embedding(symbols, args.width), nn.Embedding(args.length, args.width)
    body = nn.Sequential(*layers, nn.LayerNorm(args.width), nn.Linear(args.width, symbols))
    model = nn.ModuleList([characters, places, body]).to(args.device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.length, (args.batch, 1))
        rows = text[starts + torch.arange(args.length + 1)].to(args.device)
        logits = body(characters(rows[:, :-1]) + places.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{version}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps")
    plt.plot(losses, label=version, alpha=0.7)


parser = argparse.ArgumentParser(description="A character-level GPT.")
parser.add_argument("--attention", nargs="+", default=["sdpa", "auto"], help="sdpa auto fa1 ...")
parser.add_argument("--out", type=Path, default=Path("runs/char_gpt"))
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
sizes = {"steps": 100, "batch": 4, "length": 64, "width": 64, "heads": 4, "layers": 2}
for name, value in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()
pages = sorted(Path(__file__).parents[2].glob("[a-z]*/*.md"))
document = "".join(page.read_text(encoding="utf-8") for page in pages)
alphabet, text = torch.tensor([ord(x) for x in document]).unique(return_inverse=True)
for version in args.attention:
    train(text, len(alphabet), args, version)
plt.gca().set(xlabel="step", ylabel="loss, nats per character")
plt.legend()
args.out.mkdir(parents=True, exist_ok=True)
plt.savefig(args.out / "loss.png")

"""A small GPT learns to write like this repository's documents, character by character.

    python docs/examples/char_gpt.py --attention sdpa auto --out runs/char_gpt

trains one model with torch's attention and one with ours, from the same weights on the same
batches, and draws both loss curves into runs/char_gpt/loss.png. `--attention fa1` trains one model
only. Without a GPU the command takes a minute.
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from flash_versions import attention

DOCS = Path(__file__).parents[1]


def sdpa(q, k, v, causal):
    """torch's attention, with our order of dimensions: (batch, length, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class Block(nn.Module):
    """One layer: attention over the characters before, then a feed-forward network."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """(batch, length, width) to the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norms[1](x))


def make_gpt(symbols, args, attend):
    """A model from (batch, length) characters and positions to logits over the symbols."""
    torch.manual_seed(args.seed)
    layers = [Block(args.width, args.heads, attend) for _ in range(args.layers)]
    characters, places = nn.Embedding(symbols, args.width), nn.Embedding(args.length, args.width)
    body = nn.Sequential(*layers, nn.LayerNorm(args.width), nn.Linear(args.width, symbols))
    model = nn.ModuleDict({"characters": characters, "places": places, "body": body})
    return model.to(args.device), lambda x: body(characters(x) + places.weight[: x.shape[1]])


def train(text, symbols, args, attend):
    """The loss of each step, in nats per character."""
    model, forward = make_gpt(symbols, args, attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator, losses = torch.Generator().manual_seed(args.seed), []
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=generator)
        rows = text[starts + torch.arange(args.length + 1)].to(args.device)
        loss = F.cross_entropy(forward(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Train with each attention asked for; draw the losses."""
    parser = argparse.ArgumentParser(description="A character-level GPT.")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "auto"], help="sdpa auto fa1 ..")
    parser.add_argument("--out", type=Path, default=Path("runs/char_gpt"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-2)
    numbers = {"steps": 100, "batch": 4, "length": 64, "width": 64, "heads": 4, "layers": 2}
    for name, value in {**numbers, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()

    document = "".join(file.read_text(encoding="utf-8") for file in sorted(DOCS.glob("*.md")))
    alphabet = {character: i for i, character in enumerate(sorted(set(document)))}
    text = torch.tensor([alphabet[character] for character in document])
    for name in args.attention:
        attend = sdpa if name == "sdpa" else partial(attention, version=name)
        losses = train(text, len(alphabet), args, attend)
        print(f"{name}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps")
        plt.plot(losses, "--" if name == "sdpa" else "-", label=name, alpha=0.7)
    plt.xlabel("step")
    plt.ylabel("loss, nats per character")
    plt.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    plt.savefig(args.out / "loss.part.png")
    (args.out / "loss.part.png").replace(args.out / "loss.png")


if __name__ == "__main__":
    main()

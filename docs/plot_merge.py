"""Draws docs/merge.png: why one +inf breaks a merge. Run: python docs/plot_merge.py

Needs matplotlib. The numbers are computed, not drawn by hand: two shards hold the keys of one row;
the key count of shard 2 falls to zero, and the merged output is plotted for both conventions.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import neginf

KEYS = [8, 4, 2, 1, 0]  # keys that shard 2 holds


def shard_state(num_keys, value):
    """q = 0, so every key weighs the same: out = value, lse = ln(num_keys)."""
    q = torch.zeros(1, 1, 1, 64)
    k = torch.zeros(1, num_keys, 1, 64)
    v = torch.full((1, num_keys, 1, 64), value)
    return neginf.flash_attn_func(q, k, v, return_lse=True)


def naive_merge(a, b):
    (out_a, lse_a), (out_b, lse_b) = a, b
    total = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - total), torch.exp(lse_b - total)
    out = weight_a.item() * out_a + weight_b.item() * out_b
    return weight_a.item(), weight_b.item(), out.mean().item()


def main():
    good, bad = [], []
    shard_1 = shard_state(8, 1.0)
    for num_keys in KEYS:
        out, lse = shard_state(num_keys, 3.0)
        merged, total = neginf.merge_states([shard_1[0], out], [shard_1[1], lse])
        good.append(
            (
                torch.exp(shard_1[1] - total).item(),
                torch.exp(lse - total).item(),
                merged.mean().item(),
            )
        )
        marked = torch.where(torch.isneginf(lse), torch.inf, lse)
        bad.append(naive_merge(shard_1, (out, marked)))

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    titles = ["empty row: lse = -inf (neginf)", "empty row: lse = +inf (textbook merge)"]
    for axis, title, rows in zip(axes, titles, [good, bad], strict=True):
        positions = range(len(KEYS))
        bottoms = [row[0] if row[0] == row[0] else 0.0 for row in rows]
        tops = [row[1] if row[1] == row[1] else 0.0 for row in rows]
        axis.bar(positions, bottoms, 0.6, color="#2a6f97", label="weight of shard 1 (8 keys)")
        axis.bar(positions, tops, 0.6, bottom=bottoms, color="#e9a23b", label="weight of shard 2")
        for x, (weight_1, weight_2, out) in zip(positions, rows, strict=True):
            broken = out != out
            text = (
                f"out {out:.2f}" if not broken else f"out nan\nweights [{weight_1:.0f}, {weight_2}]"
            )
            axis.text(
                x,
                1.04 if not broken else 0.45,
                text,
                ha="center",
                color="#b00020" if broken else "black",
            )
        axis.set_xticks(list(positions), [str(n) for n in KEYS])
        axis.set_xlabel("keys in shard 2")
        axis.set_title(title)
        axis.set_ylim(0, 1.35)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("weight in the merge")
    axes[0].legend(loc="upper center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(
        "One row over two shards; shard 2 runs out of keys. v = 1 in shard 1, v = 3 in shard 2"
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("merge.png"), dpi=120)


if __name__ == "__main__":
    main()

"""Trains a small GPT on left-padded batches of a text, with neginf or with torch's SDPA.

Run: python examples/make_text.py build/text.txt
     python examples/train_gpt.py build/text.txt --compare        (needs rich)

Padding rows of neginf's attention see no key: out 0, lse -inf, in every layer of every step. All
that padding owns, in q, k, v and the gradient of out, is filled with NaN, and after every step the
loss and all gradients must be finite and the gradients of padding exactly 0.

--compare trains from the same weights on the same batches with torch's SDPA, with neginf, and with
neginf on packed sequences, in bfloat16 on a GPU and float32 on the CPU. It fails when a curve of
neginf leaves SDPA's further than noise. Noise is how far SDPA leaves itself when each initial
weight is moved by half a unit in the last place of the attention's dtype: the rounding in which two
right kernels differ is of that size.
"""

import argparse
import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from small_gpt import GPT, LeftPadded, attend_packed, attend_padded, attend_sdpa

ATTENTIONS = {"sdpa": attend_sdpa, "neginf": attend_padded, "neginf-packed": attend_packed}
PADDING = 0  # a byte that no text has
IGNORED = -100
NAN = float("nan")

SMOOTHING = 10  # steps; what is compared is the mean loss over so many
TWINS = 3
# Another kernel rounds otherwise at every step, a twin differs once; and the largest of three draws
# may be small by chance.
NOISE_MARGIN = 3

# What is not given on the command line.
DEFAULTS = {
    "cuda": {
        "layers": 4, "width": 256, "heads": 4, "batch": 16, "seqlen": 512, "learning_rate": 1e-3,
    },
    "cpu": {
        "layers": 2, "width": 32, "heads": 2, "batch": 8, "seqlen": 64, "learning_rate": 3e-3,
    },
}  # fmt: skip


@dataclass
class Batch:
    tokens: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor


def make_batches(text, steps, batch, seqlen, seed, device):
    """Random pieces of the text, of random lengths. The first row of a batch is full, its last row
    is nothing but padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        lengths = torch.randint(seqlen + 1, (batch,), generator=generator, dtype=torch.int32)
        lengths[-1], lengths[0] = 0, seqlen
        tokens = torch.full((batch, seqlen), PADDING)
        targets = torch.full((batch, seqlen), IGNORED)
        starts = torch.randint(len(text) - seqlen, (batch,), generator=generator)
        for row, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
            tokens[row, seqlen - length :] = text[start : start + length]
            targets[row, seqlen - length :] = text[start + 1 : start + length + 1]
        batches.append(Batch(tokens.to(device), targets.to(device), lengths.to(device)))
    return batches


class WithNanInPadding:
    """Attention where all that padding owns is NaN. Counts what reaches padding all the same."""

    def __init__(self, attend):
        self.attend = attend
        self.violations = 0  # values of padding that are not exactly 0, in out, dq, dk and dv

    def __call__(self, q, k, v, rows):
        padding = rows.padding[..., None, None]

        def count(tensor):
            self.violations += tensor.detach().masked_fill(~padding, 0).count_nonzero()

        q, k, v = (tensor.masked_fill(padding, NAN) for tensor in (q, k, v))
        for tensor in (q, k, v):
            tensor.register_hook(count)  # before masked_fill's own backward zeroes them
        out = self.attend(q, k, v, rows)
        count(out)
        out.register_hook(lambda gradient: gradient.masked_fill(padding, NAN))
        return out


def train(name, model, batches, learning_rate):
    """The loss of every step. Stops the program at the first thing that is not as it should be."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), fused=True)
    losses = []
    for step, batch in enumerate(batches):
        attend = ATTENTIONS[name]
        if name != "sdpa":  # where NaN in padding would be NaN everywhere
            attend = WithNanInPadding(attend)
        device, seqlen = batch.tokens.device.type, batch.tokens.shape[1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch.tokens, LeftPadded(batch.lengths, seqlen), attend)
        # In float64, or the rounding of the loss itself would be most of what is compared.
        loss = F.cross_entropy(
            logits.double().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        check(f"{name}, step {step}", model, loss, attend)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(where, model, loss, attend):
    """Clips the gradients too, since their norm is what tells whether all of them are finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not math.isfinite(loss.item()):
        raise SystemExit(f"{where}: the loss is {loss.item()}")
    if not math.isfinite(norm.item()):
        raise SystemExit(f"{where}: the norm of all gradients is {norm.item()}")
    violations = int(getattr(attend, "violations", 0))
    if violations:
        raise SystemExit(f"{where}: {violations} values of padding in out, dq, dk, dv are not 0")
    if model.tokens.weight.grad[PADDING].any():
        raise SystemExit(f"{where}: the embedding of padding has a gradient")


def smoothed(losses):
    width = min(SMOOTHING, len(losses))
    return torch.tensor(losses, dtype=torch.float64).unfold(0, width, 1).mean(1)


def twin_of(model, seed, dtype):
    """The model with every weight moved by about half a unit in the last place of dtype."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            nudge = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight.mul_(1 + torch.finfo(dtype).eps / 2 * nudge)
    return twin


def compare(model, batches, learning_rate):
    """Trains with each attention and prints the curves; whether those of neginf are SDPA's."""
    from rich.console import Console
    from rich.table import Table

    dtype = torch.bfloat16 if batches[0].tokens.is_cuda else torch.float32
    twins = [f"sdpa, twin {seed}" for seed in range(1, TWINS + 1)]
    models = {name: copy.deepcopy(model) for name in ATTENTIONS}
    models.update((name, twin_of(model, seed, dtype)) for seed, name in enumerate(twins, 1))
    curves, seconds = {}, {}
    for name, own_model in models.items():
        start = time.perf_counter()
        losses = train(name.split(",")[0], own_model, batches, learning_rate)
        seconds[name] = time.perf_counter() - start
        curves[name] = smoothed(losses)

    console = Console()
    table = Table("step", *ATTENTIONS, title=f"loss, mean over {SMOOTHING} steps")
    length = len(curves["sdpa"])
    for step in sorted({round(i * (length - 1) / 10) for i in range(11)}):
        table.add_row(str(step), *(f"{curves[name][step]:.6f}" for name in ATTENTIONS))
    console.print(table)

    largest = {name: (curve - curves["sdpa"]).abs().max() for name, curve in curves.items()}
    final = {name: curve[-1] - curves["sdpa"][-1] for name, curve in curves.items()}
    limit = NOISE_MARGIN * max(largest[name] for name in twins)
    table = Table("", "largest", "final", "s", title="difference from sdpa")
    for name in (*ATTENTIONS, *twins):
        table.add_row(name, f"{largest[name]:.1e}", f"{final[name]:+.1e}", f"{seconds[name]:.1f}")
    console.print(table)

    # Not "too far", so that a NaN would be one of them.
    outside = [name for name in ATTENTIONS if not largest[name] <= limit]
    verdict = f"outside it: {', '.join(outside)}" if outside else "all are within"
    console.print(f"noise: {NOISE_MARGIN} times the largest of the twins, {limit:.1e}; {verdict}")
    return not outside


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--attention", choices=ATTENTIONS, default="neginf")
    parser.add_argument("--compare", action="store_true", help="train with every attention")
    parser.add_argument(
        "--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    for name, default in DEFAULTS["cuda"].items():
        help_text = f"{default} on a GPU, {DEFAULTS['cpu'][name]} on the CPU"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), help=help_text)
    options = parser.parse_args(arguments)
    for name, default in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def main(arguments=None):
    options = parse(arguments)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    if (text == PADDING).any():
        raise SystemExit(f"{options.text}: has a byte {PADDING}, which stands for padding")
    if len(text) <= options.seqlen:
        raise SystemExit(f"{options.text}: is not longer than a sequence, {options.seqlen} bytes")
    batches = make_batches(
        text, options.steps, options.batch, options.seqlen, options.seed, options.device
    )
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.seqlen)
    model = model.to(options.device)
    if options.compare:
        return 0 if compare(model, batches, options.learning_rate) else 1
    losses = train(options.attention, model, batches, options.learning_rate)
    for step in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"step {step:5}  loss {losses[step]:.4f}")
    print(f"step {len(losses) - 1:5}  loss {losses[-1]:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A causal batch with empty rows, its keys split in three, merged back, forward and backward.

Run: python examples/quickstart.py (or `make demo`, which installs everything first)

Eight queries look at five keys. The causal mask is aligned to the bottom-right corner, so the first
three rows see nothing. The keys are then spread over three shards, as a serving engine spreads its
cache: shards 2 and 3 have even more rows without a key. Each shard returns (out, lse), and the
merge has to give back what one call over all the keys gives.

The last column does the same merge with the convention of other libraries, which mark a row
without keys by lse = +inf.
"""

import torch

import neginf

SEQLEN_Q, HEADS, HEAD_DIM = 8, 2, 64
SHARDS = [(0, 2), (2, 4), (4, 5)]  # keys [begin, end) of each shard
SEQLEN_K = SHARDS[-1][1]


def pick_device():
    """A GPU when this build has forward and backward kernels for it, else the CPU."""
    if torch.cuda.is_available():
        for name, backend in neginf.backends().items():
            if name != "cpu" and backend.usable and "backward" in backend.operations:
                return "cuda", torch.bfloat16
    return "cpu", torch.float32


def attend_shard(q, k, v, begin, end):
    """What one shard computes. In the whole, row i sees the keys up to i + SEQLEN_K - SEQLEN_Q;
    counted from the shard's own last key, its diagonal lies SEQLEN_K - end keys further right."""
    return neginf.flash_attn_func(
        q, k[:, begin:end], v[:, begin:end], window_size=(-1, SEQLEN_K - end), return_lse=True
    )


def merge_by_formula(outs, lses):
    """The textbook merge, as found in serving code: weights exp(L_s - logsumexp(L))."""
    outs, lses = torch.stack(outs), torch.stack(lses)
    total = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - total).transpose(-1, -2).unsqueeze(-1)
    return (weights * outs).sum(0), total


def loss_of(out, lse):
    """Uses out and lse; a row without keys contributes exp(-inf) = 0 through its lse."""
    return (out.float() ** 2).sum() + torch.exp(lse).sum()


def gradients_of(merge, q, k, v, empty_lse):
    states = [attend_shard(q, k, v, begin, end) for begin, end in SHARDS]
    outs = [out for out, _ in states]
    lses = [lse if empty_lse is None else _mark_empty(lse, empty_lse) for _, lse in states]
    out, lse = merge(outs, lses)
    return out, lse, torch.autograd.grad(loss_of(out, lse), (q, k, v))


def _mark_empty(lse, mark):
    return torch.where(torch.isneginf(lse), mark, lse)


def describe(lse):
    return f"{lse.item():8.4f}"


def main():
    device, dtype = pick_device()
    torch.manual_seed(0)
    q = torch.randn(1, SEQLEN_Q, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, SEQLEN_K, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )

    whole_out, whole_lse = neginf.flash_attn_func(q, k, v, causal=True, return_lse=True)
    whole_grads = torch.autograd.grad(loss_of(whole_out, whole_lse), (q, k, v))
    shard_lses = [attend_shard(q, k, v, begin, end)[1] for begin, end in SHARDS]
    out, lse, grads = gradients_of(neginf.merge_states, q, k, v, None)
    bad_out, bad_lse, bad_grads = gradients_of(merge_by_formula, q, k, v, float("inf"))

    print(f"neginf {neginf.__version__} on {device}, {dtype}: log-sum-exp of head 0\n")
    print(
        "row  keys |  shard 1   shard 2   shard 3 |  merged    whole    |  with +inf for empty rows"
    )
    print("-" * 88)
    for row in range(SEQLEN_Q):
        keys = max(0, row + 1 + SEQLEN_K - SEQLEN_Q)
        shards = "  ".join(describe(shard[0, 0, row]) for shard in shard_lses)
        bad = f"lse {describe(bad_lse[0, 0, row])}  out {bad_out[0, row, 0, 0].item():7.4f}"
        print(
            f"{row:3}  {keys:4} | {shards} | {describe(lse[0, 0, row])}  "
            f"{describe(whole_lse[0, 0, row])} |  {bad}"
        )

    print("\nlargest difference from the whole |  merged       with +inf for empty rows")
    print("-" * 72)
    for name, good, bad, whole in [
        ("out", out, bad_out, whole_out),
        *((f"d{n}", *g) for n, *g in zip("qkv", grads, bad_grads, whole_grads, strict=True)),
    ]:
        good_error = (good - whole).abs().max().item()
        bad_error = (bad - whole).abs().max().item()
        print(f"{name:33} |  {good_error:8.1e}     {bad_error:8.1e}")
    print("\nRows 0 to 2 see no key: out is exactly 0, lse is -inf, and so are their gradients 0.")


if __name__ == "__main__":
    main()

"""A causal batch with empty rows, its keys split in three, merged back, forward and backward.

Run: python examples/quickstart.py (or `make demo`, which installs everything first)

Eight queries look at five keys. The causal mask is aligned to the bottom-right corner, so the first
three rows see nothing. The keys are then spread over three shards, as a serving engine spreads its
cache: in shards 2 and 3 even more rows see no key. Each shard returns (out, lse), and the merge has
to give back what one call over all the keys gives.

The right half merges the same states by the textbook formula, with the convention of libraries that
mark a row without keys by lse = +inf.
"""

import torch

import neginf

SEQLEN_Q, HEADS, HEAD_DIM = 8, 2, 64
SHARDS = [(0, 2), (2, 4), (4, 5)]  # keys [begin, end) of each shard
SEQLEN_K = SHARDS[-1][1]
EMPTY_ROWS = SEQLEN_Q - SEQLEN_K


def pick_device():
    """A GPU when this build has forward and backward kernels for it, else the CPU; and why."""
    if not torch.cuda.is_available():
        return "cpu", torch.float32, "torch sees no GPU"
    for name, backend in neginf.backends().items():
        if name != "cpu" and backend.usable and "backward" in backend.operations:
            return "cuda", torch.bfloat16, torch.cuda.get_device_name()
    return "cpu", torch.float32, "there is a GPU, but this build has no backward kernel for it"


def attend_shard(q, k, v, begin, end):
    """What one shard computes. In the whole, row i sees the keys up to i + SEQLEN_K - SEQLEN_Q;
    counted from the shard's own last key, its diagonal lies SEQLEN_K - end keys further right."""
    return neginf.flash_attn_func(
        q, k[:, begin:end], v[:, begin:end], window_size=(-1, SEQLEN_K - end), return_lse=True
    )


def merge_by_formula(outs, lses):
    """Weights exp(L_s - logsumexp(L)), after marking empty rows as other libraries do."""
    outs = torch.stack(outs)
    lses = torch.stack([torch.where(lse.isneginf(), torch.inf, lse) for lse in lses])
    total = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - total).transpose(-1, -2).unsqueeze(-1)
    return (weights * outs).sum(0), total


def loss_of(out, lse):
    """Uses both results; the lse only of rows that have one."""
    return (out.float() ** 2).sum() + lse[..., EMPTY_ROWS:].sum()


def run(merge, q, k, v):
    """out, lse and the gradients of q, k, v, by way of the shards."""
    states = [attend_shard(q, k, v, begin, end) for begin, end in SHARDS]
    out, lse = merge([out for out, _ in states], [lse for _, lse in states])
    return out, lse, torch.autograd.grad(loss_of(out, lse), (q, k, v))


def main():
    device, dtype, why = pick_device()
    torch.manual_seed(0)
    q = torch.randn(1, SEQLEN_Q, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, SEQLEN_K, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    whole_out, whole_lse = neginf.flash_attn_func(q, k, v, causal=True, return_lse=True)
    whole_grads = torch.autograd.grad(loss_of(whole_out, whole_lse), (q, k, v))
    out, lse, grads = run(neginf.merge_states, q, k, v)
    bad_out, bad_lse, bad_grads = run(merge_by_formula, q, k, v)

    print(f"neginf {neginf.__version__} on {device} ({why}), {dtype}; head 0\n")
    print("          | lse of the shards            | neginf.merge_states | +inf for empty rows")
    print("row  keys | shard 1   shard 2   shard 3  |      lse    out[0]  |      lse    out[0]")
    print("-" * 84)
    shard_lses = [attend_shard(q, k, v, begin, end)[1] for begin, end in SHARDS]
    for row in range(SEQLEN_Q):
        shards = "  ".join(f"{shard[0, 0, row].item():8.4f}" for shard in shard_lses)
        merged, bad = (
            f"{some_lse[0, 0, row].item():8.4f}  {some_out[0, row, 0, 0].item():8.4f}"
            for some_out, some_lse in ((out, lse), (bad_out, bad_lse))
        )
        print(f"{row:3}  {max(0, row + 1 - EMPTY_ROWS):4} | {shards} |  {merged} |  {bad}")

    print("\nlargest difference from one call  | neginf.merge_states | +inf for empty rows")
    print("-" * 77)
    for name, *tensors in [
        ("out", out, bad_out, whole_out),
        *zip(("dq", "dk", "dv"), grads, bad_grads, whole_grads, strict=True),
    ]:
        good, bad, whole = tensors
        differences = [(tensor - whole).abs().max().item() for tensor in (good, bad)]
        print(f"{name:33} | {differences[0]:19.1e} | {differences[1]:19.1e}")

    assert lse[..., :EMPTY_ROWS].isneginf().all()
    assert (out[:, :EMPTY_ROWS] == 0).all()
    assert (grads[0][:, :EMPTY_ROWS] == 0).all()
    print(
        "\nRows 0 to 2 see no key: out and dq are exactly 0, lse is -inf (checked).\n"
        "Rows 3 to 6 have keys, and lose them on the right because another shard had none."
    )


if __name__ == "__main__":
    main()

"""Ring attention: every rank keeps its rows, and blocks of keys and values go round.

    step       0              1              2            (forward; size 3, rank 1)
    compute    keys of 1      keys of 0      keys of 2
    transfer   1 -> 2, 0 -> 1 and so on, one step ahead of the computation

In the backward the gradients of a block's keys and values travel with it, one step behind, and
from the last rank that adds to them straight home. What no rank needs any more is not passed on.
"""

import contextlib
from typing import NamedTuple

import torch

from neginf.distributed import local, tokens
from neginf.distributed.communication import Transfer

# One that is used, one that arrives, and one whose reader may still be running: so a transfer waits
# for no computation but that of two steps ago.
BUFFERS = 3


def ring_attention(
    q,
    k,
    v,
    queries,
    keys=None,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    sink=None,
    return_lse=False,
):
    """Attention over sequences that are spread over ranks, whose keys and values go round.

    The same as :func:`neginf.flash_attn_func`, or :func:`neginf.flash_attn_varlen_func` of packed
    sequences, on the whole sequences: out, lse and gradients are this rank's rows of it, within
    rounding, and their zeros and infinities exactly. Each block's states and gradients are rounded
    to the dtype of q, and their sums once. No call waits for the device.

    Every rank of the group must call it, in the same order, and its backward too: also a rank
    without tokens, whose loss may be ``out.sum()``.

    Args:
        q: (batch, tokens, num_heads, head_dim), or (tokens, num_heads, head_dim) of packed
            sequences: this rank's tokens, as ``queries.shard`` returns them.
        k: (batch, tokens, num_heads_k, head_dim) or (tokens, num_heads_k, head_dim), dtype of q.
        v: as k, or of a smaller head_dim, the same on every rank.
        queries: the :class:`SequenceSharding` of q and out.
        keys: that of k and v; None is that of q. With other lengths masks are aligned to the
            bottom-right corner of each whole sequence.
        softmax_scale, causal, window_size, softcap, deterministic: as in
            :func:`neginf.flash_attn_func`.
        sink: (num_heads), as in :func:`neginf.flash_attn_func`. Its gradient is that of this rank's
            rows, to be summed over ranks like those of other parameters.
        return_lse: return ``(out, lse)``.

    Returns:
        out, shaped and typed as q, but of the head_dim of v; with ``return_lse`` also lse, (batch,
        num_heads, tokens) or (num_heads, tokens), natural logarithm, differentiable like out.

    Raises:
        ValueError: a shape or device that does not fit, to the shardings or to q.
        TypeError: a dtype, or an argument that is no tensor or sharding.

    Source: Liu et al., Ring Attention with Blockwise Transformers (2023); the merge of blocks and
    the backward with the lse of the whole are sections 5 and 2 of docs/contract.md.
    """
    return local.attention(
        _RingAttention.apply, q, k, v, queries, keys, causal=causal, window_size=window_size,
        sink=sink, return_lse=return_lse, softmax_scale=softmax_scale, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, problem):
        plan = _plan(problem)
        state = local.RunningState(q, v.shape[-1], plan.num_calls)
        for calls, block in _turns(plan, problem.keys, k, v):
            for call in calls:
                state.add(call, *problem.forward(call, q, *block))
        out, lse = state.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.problem = plan, problem
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @local.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        plan, problem = ctx.plan, ctx.problem
        last = len(plan.calls) - 1
        dq = local.RunningSum(q, local.sum_dtype(q.dtype, plan.num_calls))
        dkv_dtype = local.sum_dtype(k.dtype, plan.calls_of_a_block)
        passing = None
        for step, (calls, block) in enumerate(_turns(plan, problem.keys, k, v)):
            sums = [local.RunningSum(tensor, dkv_dtype) for tensor in block]
            local.add_gradients((dq, *sums), problem, calls, dout, dlse, q, *block, out, lse)
            dkv = [running.result() for running in sums]
            if passing is not None:
                for total, arrived in zip(dkv, passing.wait(), strict=True):
                    total += arrived
            if last > 0:
                distance = 1 if step < last else -last  # at last, home
                arriving = [torch.empty_like(total) for total in dkv]
                passing = Transfer(dkv, arriving, distance, problem.keys.group)
        if passing is not None:
            dkv = passing.wait()
        dkv = (tokens.unpadded(problem.keys, t, local.ROW_DIM).to(k.dtype) for t in dkv)
        return dq.result().to(q.dtype), *dkv, None


class Plan(NamedTuple):
    """What this rank does at each step, as many of them on every rank."""

    calls: list  # for each step
    num_calls: int
    calls_of_a_block: int  # the most on its way over all ranks; if above 2, some number above 2


def _plan(problem):
    queries, keys = problem.queries, problem.keys.placement
    key = "ring", keys, problem.window
    if key not in queries.kept:
        size = queries.size

        def calls(rank, step):
            return problem.calls(rank % size, keys, (rank - step) % size)

        # Up to the last step at which any rank has something to do. Zigzag placement without
        # windows always needs all of them, so that the first look ends this.
        steps = size
        while steps > 1 and not any(calls(rank, steps - 1) for rank in range(size)):
            steps -= 1
        mine = [calls(queries.rank, step) for step in range(steps)]
        of_blocks = (
            sum(len(calls(source + step, step)) for step in range(steps)) for source in range(size)
        )
        of_a_block = 0
        for count in of_blocks:
            of_a_block = max(of_a_block, count)
            if of_a_block > 2:
                break
        queries.kept[key] = Plan(mine, sum(map(len, mine)), of_a_block)
    return queries.kept[key]


def _turns(plan, keys, k, v):
    """The calls of each step, and the block (k, v) of keys and values that they are for."""
    own = [tokens.padded(keys, tensor, tensor.dim() + local.ROW_DIM) for tensor in (k, v)]
    return zip(plan.calls, _passed_on(own, keys.group, len(plan.calls)), strict=True)


def _passed_on(block, group, steps):
    """This rank's block, then those of the ranks before it, each under way while the last one is
    used: what the caller queues between two of them runs beside the transfer."""
    buffers = [[torch.empty_like(t) for t in block] for _ in range(min(steps - 1, BUFFERS))]
    starts = _Starts(block[0].device)
    used = []  # for each step, the end of what the caller queued
    for step in range(steps):
        transfer = None
        if step + 1 < steps:
            # The step that used this buffer, if it is not the first. It was sent on in that step,
            # too. That this has ended before the buffer is overwritten takes no event:
            # batch_isend_irecv runs in order, on one stream of NCCL for each group, and with gloo
            # wait() returns after it.
            reader = step + 1 - BUFFERS
            with starts.after(used[reader] if reader > 0 else None):
                transfer = Transfer(block, buffers[step % BUFFERS], 1, group)
        yield block
        used.append(starts.now())
        if transfer is not None:
            block = transfer.wait()


class _Starts:
    """Where transfers start on CUDA: on a stream of their own, which waits for what was queued when
    this was made, and then only for the events that it is given. What is queued on the current
    stream since does not hold them up."""

    def __init__(self, device):
        self.device, self.stream = device, None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def after(self, event):
        if self.stream is None:
            return contextlib.nullcontext()
        if event is not None:
            self.stream.wait_event(event)
        return torch.cuda.stream(self.stream)

    def now(self):
        """An event of the current stream."""
        return (
            None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
        )

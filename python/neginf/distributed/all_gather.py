"""All-gather attention: every rank keeps its rows, and has all keys and values for the time of a
call. In the backward their gradients are summed where they belong by a reduce-scatter."""

import torch

from neginf.distributed import local, tokens


def all_gather_attention(
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
    """Attention over sequences that are spread over ranks, whose keys and values are gathered.

    Arguments, results and errors are those of :func:`ring_attention`. It takes memory for all keys
    and values, where the ring takes up to four blocks; each of its rows meets all its keys in one
    or two calls, where the ring makes one or two for each rank. Keys and values are gathered again
    in the backward, rather than kept.

    Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2.
    """
    return local.attention(
        _AllGather.apply, q, k, v, queries, keys, causal=causal, window_size=window_size,
        sink=sink, return_lse=return_lse, softmax_scale=softmax_scale, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, problem):
        calls = _calls(problem)
        state = local.RunningState(q, v.shape[-1], len(calls))
        all_k, all_v = (_gather(problem.keys, tensor) for tensor in (k, v))
        for call in calls:
            state.add(call, *problem.forward(call, q, all_k, all_v))
        out, lse = state.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @local.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        calls, keys = _calls(ctx.problem), ctx.problem.keys
        all_k, all_v = (_gather(keys, tensor) for tensor in (k, v))
        dq = local.RunningSum(q, local.sum_dtype(q.dtype, len(calls)))
        dk, dv = (local.RunningSum(t, local.accumulate_dtype(k.dtype)) for t in (all_k, all_v))
        local.add_gradients((dq, dk, dv), ctx.problem, calls, dout, dlse, q, all_k, all_v, out, lse)
        dkv = (_scatter_sum(keys, running.result()).to(k.dtype) for running in (dk, dv))
        return dq.result().to(q.dtype), *dkv, None


def _calls(problem):
    return problem.calls(problem.queries.rank, problem.keys.placement.gathered, 0)


def _gather(keys, tensor):
    dim = tensor.dim() + local.ROW_DIM
    return tokens.gather(keys, tokens.padded(keys, tensor, dim), dim)


def _scatter_sum(keys, tensor):
    dim = tensor.dim() + local.ROW_DIM
    return tokens.unpadded(keys, tokens.scatter_sum(keys, tensor, dim), dim)

"""What one rank computes: attention between its rows and one block of keys, and sums of that."""

import functools
from typing import NamedTuple

import torch

from neginf import ops
from neginf._checks import check_tensors
from neginf.attention import window_sides
from neginf.distributed import tokens
from neginf.distributed.calls import calls
from neginf.distributed.placement import Placement
from neginf.distributed.sharding import SequenceSharding
from neginf.merge import NEG_INF, apply_sink, merge_state, merge_state_in_place

NAN = float("nan")
ROW_DIM = -3  # of q, k, v, out in both layouts; lse has its rows last


class Problem(NamedTuple):
    """What is attended to, but for the tensors."""

    queries: SequenceSharding
    keys: SequenceSharding
    window: tuple
    softmax_scale: float | None
    softcap: float
    deterministic: bool

    def calls(self, rank_q, keys: Placement, rank_k):
        """Made once for a batch, and used by every layer."""
        key = "calls", rank_q, keys, rank_k, self.window
        if key not in self.queries.kept:
            dense = not self.queries.is_packed
            self.queries.kept[key] = calls(
                self.queries.placement, rank_q, keys, rank_k, self.window, dense
            )
        return self.queries.kept[key]

    def options(self, call, device):
        """The arguments of the operators behind the tensors."""
        return (
            *call.varlen_arguments(device), self.softmax_scale, False, call.left, call.right,
            self.softcap, None, None, 0, self.deterministic,
        )  # fmt: skip

    def forward(self, call, q, k, v):
        rows, keys = _rows_of(call), _keys_of(call)
        return ops.forward(rows(q), keys(k), keys(v), *self.options(call, q.device))

    def backward(self, call, dout, dlse, q, k, v, out, lse):
        """out and lse of all keys: the gradients are this block's terms of the whole."""
        rows, keys, of_lse = _rows_of(call), _keys_of(call), _lse_of(call)
        dq, dk, dv, _ = ops.backward(
            None if dout is None else rows(dout), None if dlse is None else of_lse(dlse),
            rows(q), keys(k), keys(v), rows(out), of_lse(lse), *self.options(call, q.device),
        )  # fmt: skip
        return dq, dk, dv


def attention(
    function, q, k, v, queries, keys, *, causal, window_size, sink, return_lse, **options
):
    """`function` is the apply of an autograd function of q, k, v and a :class:`Problem`."""
    keys = queries if keys is None else keys
    _check(q, k, v, queries, keys)
    if sink is not None:
        check_tensors(sink=sink)
    left, right = window_sides(window_size)
    problem = Problem(queries, keys, (left, 0 if causal else right), **options)
    _check_as_the_kernels_do(q, k, v, problem, sink, causal, (left, right))
    out, lse = function(q, k, v, problem)
    if sink is not None:
        out, lse = merge_sink(out, lse, sink)
    return (out, lse) if return_lse else out


def merge_sink(out, lse, sink):
    """As the attention functions do it: a sink of +inf is a score of +inf, which makes its rows
    NaN, and its gradient too. :func:`apply_sink` refuses it on the CPU, as the +inf by which some
    libraries mark rows without keys; here that would be after all communication."""
    return apply_sink(out, lse, torch.nan_to_num(sink, NAN, posinf=NAN, neginf=NEG_INF))


def accumulate_dtype(dtype):
    return torch.promote_types(dtype, torch.float32)


def sum_dtype(dtype, parts):
    """What to sum in so that no sum in between is rounded: of two parts there is none."""
    return dtype if parts <= 2 else accumulate_dtype(dtype)


class RunningState:
    """The merged state of this rank's rows over the blocks so far."""

    def __init__(self, q, head_dim_v, num_calls):
        self.q, self.head_dim_v = q, head_dim_v
        self.dtype = sum_dtype(q.dtype, num_calls)
        self.out = self.lse = None

    def add(self, call, out, lse):
        out = out.to(self.dtype)
        is_whole = call.rows == self.q.shape[ROW_DIM]
        if self.out is None and is_whole:
            self.out, self.lse = out, lse
        elif is_whole:
            self.out, self.lse = merge_state(self.out, self.lse, out, lse)
        else:
            self._start()
            merge_state_in_place(_rows_of(call)(self.out), _lse_of(call)(self.lse), out, lse)

    def result(self):
        self._start()
        return self.out.to(self.q.dtype), self.lse

    def _start(self):
        if self.out is None:
            *batch, rows, heads, _ = self.q.shape
            self.out = self.q.new_zeros((*batch, rows, heads, self.head_dim_v), dtype=self.dtype)
            self.lse = self.q.new_full(
                (*batch, heads, rows), NEG_INF, dtype=accumulate_dtype(self.q.dtype)
            )


class RunningSum:
    """The sum of the gradients of parts of a tensor."""

    def __init__(self, like, dtype):
        self.like, self.dtype, self.total = like, dtype, None

    def add(self, start, length, gradient):
        if self.total is None and length == self.like.shape[ROW_DIM]:
            self.total = gradient.to(self.dtype)
        else:
            self.result().narrow(ROW_DIM, start, length).add_(gradient)

    def result(self):
        if self.total is None:
            self.total = self.like.new_zeros(self.like.shape, dtype=self.dtype)
        return self.total


def once_differentiable(backward):
    """For the backward of a function of q, k and v that saves them first. torch's decorator of this
    name leaves the gradients constant where dout is, though they depend on q, k and v as well: a
    penalty on them would be left out without an error."""

    @functools.wraps(backward)
    def once(ctx, dout, dlse):
        with torch.no_grad():
            *gradients, of_problem = backward(ctx, dout, dlse)
        if torch.is_grad_enabled():
            q, k, v, *_ = ctx.saved_tensors
            gradients = _NoSecondDerivative.apply(*gradients, dout, dlse, q, k, v)
        return *gradients, of_problem

    return once


class _NoSecondDerivative(torch.autograd.Function):
    """dq, dk and dv, as results of what they depend on."""

    @staticmethod
    def forward(ctx, dq, dk, dv, *depends_on):
        return tuple(gradient.view_as(gradient) for gradient in (dq, dk, dv))

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("second derivatives of attention over ranks are not implemented")


def add_gradients(sums, problem, calls, dout, dlse, q, k, v, out, lse):
    """sums: the :class:`RunningSum` of dq, dk and dv."""
    for call in calls:
        gradients = problem.backward(call, dout, dlse, q, k, v, out, lse)
        parts = ((call.row, call.rows), (call.key, call.keys), (call.key, call.keys))
        for running, part, gradient in zip(sums, parts, gradients, strict=True):
            running.add(*part, gradient)


def _rows_of(call):
    return lambda tensor: tensor.narrow(ROW_DIM, call.row, call.rows)


def _keys_of(call):
    return lambda tensor: tensor.narrow(ROW_DIM, call.key, call.keys)


def _lse_of(call):
    return lambda lse: lse.narrow(-1, call.row, call.rows)


def _check(q, k, v, queries, keys):
    """What the operator cannot see."""
    for name, sharding in (("queries", queries), ("keys", keys)):
        if not isinstance(sharding, SequenceSharding):
            raise TypeError(
                f"{name}: got {type(sharding).__name__}; accepted is a SequenceSharding"
            )
    if (keys.is_packed, keys.group) != (queries.is_packed, queries.group):
        raise ValueError("keys: got another group or layout; accepted are those of queries")
    if len(keys.lengths) != len(queries.lengths):
        raise ValueError(
            f"keys: got {len(keys.lengths)} sequences; accepted are as many as queries has, "
            f"{len(queries.lengths)}"
        )
    check_tensors(q=q, k=k, v=v)
    accepted = (
        "(tokens, heads, head_dim)" if queries.is_packed else "(batch, tokens, heads, head_dim)"
    )
    dims = len(accepted.split(","))
    for name, tensor, sharding in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        if tensor.dim() != dims:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions; accepted is {accepted}")
        tokens.check_count(name, tensor, dims + ROW_DIM, sharding.num_tokens)


def _check_as_the_kernels_do(q, k, v, problem, sink, causal, window):
    """On every rank alike, before any message: the operator checks all of its arguments, and
    without rows does nothing else. It is given causal and window as they came, for in problem
    causal has replaced the right side."""
    no_rows = [tensor.narrow(ROW_DIM, 0, 0) for tensor in (q, k, v)]
    if problem.queries.is_packed:
        no_rows = [tensor.unsqueeze(0) for tensor in no_rows]
    with torch.no_grad():
        ops.forward(
            *no_rows, *(None,) * 6, problem.softmax_scale, causal, *window,
            problem.softcap, None, sink, 0, problem.deterministic,
        )  # fmt: skip

"""flash_attn_with_kvcache: writing new keys and values into a cache, and rotating them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
import neginf
import oracle
from kvcache_problems import CacheInputs, CacheProblem
from neginf import ops
from problems import Guarded, cumulative, int32
from targets import HALF, runs_on

PROBLEMS = {
    "one_token": CacheProblem(lengths=(30, 0, 129), lengths_q=(1,) * 3),
    "pages_16": CacheProblem(lengths=(30, 16, 129), lengths_q=(3,) * 3, page_size=16, causal=True),
    "pages_1": CacheProblem(lengths=(3, 0), lengths_q=(2,) * 2, page_size=1, causal=True),
    "entries": CacheProblem(
        lengths=(20, 5), lengths_q=(4,) * 2, entries=(2, 0), leftpad=(3, 5), causal=True
    ),
    "narrow_values": CacheProblem(
        lengths=(20, 5), lengths_q=(2,) * 2, head_dim=59, head_dim_v=33, window_size=(9, 0)
    ),
}


def rotated(x, cos, sin, interleaved, positions):
    """x (rows, heads, head_dim) in float64; cos and sin (positions, rotary_dim / 2)."""
    x, (rotary_dim, half) = x.double(), (2 * cos.shape[1], cos.shape[1])
    cos, sin = (t.double()[positions][:, None] for t in (cos, sin))
    out = x.clone()
    one, two = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleaved
        else (slice(0, half), slice(half, rotary_dim))
    )
    out[..., one] = x[..., one] * cos - x[..., two] * sin
    out[..., two] = x[..., one] * sin + x[..., two] * cos
    return out


class Appended:
    """A cache, rows for it, and what it must hold afterwards."""

    def __init__(self, inputs, counts, packed=False):
        p, self.inputs, self.counts, self.packed = inputs.problem, inputs, counts, packed
        widths = {"k": p.head_dim, "v": inputs.head_dim_v}
        self.rows = {
            name: [inputs.normal((n, p.heads_k, width)) for n in counts]
            for name, width in widths.items()
        }
        stack = torch.cat if packed else torch.stack
        self.guarded = {
            name: Guarded(stack(rows), inputs.device) for name, rows in self.rows.items()
        }
        # Pages for what is written, where the problem's own table ends with its lengths.
        self.options = {}
        if p.page_size is not None:
            self.options["page_table"] = inputs.pages.to(inputs.device)
        if packed:
            self.options["cu_seqlens_k_new"] = int32(cumulative(counts), inputs.device)

    def expected(self, name, table=None):
        """The cache's buffer with the rows in it, those that have a slot."""
        inputs, guarded = self.inputs, self.inputs.guarded[f"{name}_cache"]
        buffer = guarded.before.clone()
        view = buffer[guarded.index]
        for b, rows in enumerate(self.rows[name]):
            for i, row in enumerate(rows):
                slot = inputs.problem.lengths[b] + i
                if slot < inputs.capacity and (b, slot // inputs.rows) not in (table or ()):
                    view[inputs.place(b, slot)] = row.to(inputs.device)
        return buffer

    def assert_written(self, table=None):
        for name in ("k", "v"):
            judge.assert_bits_equal(
                self.inputs.guarded[f"{name}_cache"].buffer, self.expected(name, table),
                f"{name}_cache and the memory around it",
            )  # fmt: skip
            self.guarded[name].assert_unchanged(name)


def after(inputs, counts):
    """The same cache with rows appended, as the reference sees it."""
    p = inputs.problem
    lengths = tuple(n + m for n, m in zip(p.lengths, counts, strict=True))
    room = inputs.capacity - max(lengths, default=0)
    longer = CacheInputs(p.with_(lengths=lengths, room=room), inputs.dtype)
    assert longer.capacity == inputs.capacity
    return longer


@runs_on("decode", "append", dtypes=("float64", "float32", *HALF))
@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_are_written_and_seen(target, name):
    problem = PROBLEMS[name]
    inputs = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, problem.lengths_q)
    out, lse = inputs.call(k=new.guarded["k"].view, v=new.guarded["v"].view, **new.options)
    new.assert_written()

    judged = after(inputs, new.counts)
    for b, (n, m) in enumerate(zip(problem.lengths, new.counts, strict=True)):
        for sequences, kind in ((judged.keys, "k"), (judged.values, "v")):
            old = inputs.keys[b] if kind == "k" else inputs.values[b]
            sequences[b] = torch.cat([old[:n], new.rows[kind][b], old[n + m :]])
    judged.guarded["q"] = inputs.guarded["q"]
    judged.judge(out, lse)


@runs_on("append", dtypes=("bfloat16",))
@pytest.mark.parametrize("page_size", [None, 16, 3])
def test_packed_rows(target, page_size):
    problem = CacheProblem(
        lengths=(30, 0, 129, 4), lengths_q=(1, 3, 0, 5), varlen=True, page_size=page_size
    )
    inputs = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, (2, 0, 7, 1), packed=True)
    inputs.call(k=new.guarded["k"].view, v=new.guarded["v"].view, **new.options)
    new.assert_written()


@runs_on("append", dtypes=("bfloat16",))
@pytest.mark.parametrize("page_size", [None, 16])
def test_rows_without_a_slot_are_dropped(target, page_size):
    problem = CacheProblem(lengths=(60, 33), lengths_q=(1,) * 2, page_size=page_size, room=4)
    inputs = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, (40, 40))
    q, k_cache, v_cache = (inputs.tensor(n) for n in ("q", "k_cache", "v_cache"))
    _, seqlens = ops.append(
        q, new.guarded["k"].view, new.guarded["v"].view, k_cache, v_cache,
        inputs.options["cache_seqlens"], new.options.get("page_table"),
        None, None, None, None, None, None, True, False,
    )  # fmt: skip
    new.assert_written()
    assert seqlens.tolist() == [inputs.capacity, min(73, inputs.capacity)]


@runs_on("append", dtypes=("bfloat16",))
def test_rows_for_pages_that_do_not_exist_are_dropped(target):
    problem = CacheProblem(lengths=(14, 20), lengths_q=(1,) * 2, page_size=16, room=30)
    inputs = CacheInputs(problem, target.dtype, target.device)
    table = inputs.pages.clone()
    table[0, 1], table[1, 2] = -1, 2**31 - 1
    new = Appended(inputs, (15, 15))
    inputs.call(
        k=new.guarded["k"].view, v=new.guarded["v"].view, page_table=table.to(target.device)
    )
    new.assert_written(table=((0, 1), (1, 2)))


@runs_on("append", dtypes=("bfloat16",))
def test_garbage_lengths_write_nothing_elsewhere(target):
    problem = CacheProblem(lengths=(20, 20, 20), lengths_q=(1,) * 3)
    inputs = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, (2,) * 3)
    before = inputs.guarded["k_cache"].before.clone()
    inputs.call(
        k=new.guarded["k"].view, v=new.guarded["v"].view,
        cache_seqlens=int32((2**31 - 1, 28, -3), target.device),
    )  # fmt: skip
    now = inputs.guarded["k_cache"].buffer
    view = before[inputs.guarded["k_cache"].index]
    view[1, 28] = new.rows["k"][1][0]
    view[2, :2] = new.rows["k"][2]
    judge.assert_bits_equal(now, before, "k_cache")


@runs_on("append", dtypes=("float32", *HALF))
@given(data=st.data())
def test_rotation(target, data):
    interleaved = data.draw(st.booleans(), "interleaved")
    head_dim = data.draw(st.sampled_from([2, 16, 59, 64]), "head_dim")
    half = data.draw(st.integers(1, head_dim // 2), "rotary_dim / 2")
    causal = data.draw(st.booleans(), "causal")
    own_positions = data.draw(st.booleans(), "rotary_seqlens")
    varlen = data.draw(st.booleans(), "varlen")
    lengths = tuple(data.draw(st.integers(0, 30)) for _ in range(3))
    counts = (2, 2, 2)
    problem = CacheProblem(
        lengths=lengths, lengths_q=counts, head_dim=head_dim, causal=causal, varlen=varlen,
        seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    inputs = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, counts)
    cos, sin = inputs.normal((40, half)), inputs.normal((40, half))
    starts = (5, 0, 37) if own_positions else lengths
    q = inputs.normal(inputs.tensor("q").shape)
    rotated_q, seqlens = ops.append(
        q.to(target.device), new.guarded["k"].view, new.guarded["v"].view,
        inputs.tensor("k_cache"), inputs.tensor("v_cache"), inputs.options["cache_seqlens"],
        None, None, inputs.options.get("cu_seqlens_q"), None, cos.to(target.device),
        sin.to(target.device), int32(starts, target.device) if own_positions else None,
        interleaved, causal,
    )  # fmt: skip
    assert seqlens.tolist() == [n + 2 for n in lengths]
    eps = torch.finfo(target.dtype).eps
    cache = inputs.tensor("k_cache").cpu().double()
    for b, (rows, start) in enumerate(zip(inputs.rows_of_q(), starts, strict=True)):
        positions = torch.arange(start, start + 2).clamp(max=39)
        expected = rotated(new.rows["k"][b], cos, sin, interleaved, positions)
        got = cache[b, lengths[b] : lengths[b] + 2]
        assert (got - expected).abs().max() <= eps * (1 + expected.abs().max())
        judge.assert_bits_equal(
            inputs.tensor("v_cache")[b, lengths[b] : lengths[b] + 2].cpu(), new.rows["v"][b], "v"
        )
        q_positions = positions if causal else positions[:1].expand(2)
        expected = rotated(q[rows], cos, sin, interleaved, q_positions)
        got = rotated_q[rows].cpu().double()
        assert (got - expected).abs().max() <= eps * (1 + expected.abs().max())


@runs_on("decode", "append", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("causal", [False, True])
def test_rotation_turns_what_attention_sees(target, causal):
    """Equal to rotating beforehand."""
    problem = PROBLEMS["pages_16"].with_(causal=causal)
    inputs = CacheInputs(problem, target.dtype, target.device)
    other = CacheInputs(problem, target.dtype, target.device)
    new = Appended(inputs, problem.lengths_q)
    angles = torch.rand(200, 16, generator=inputs.generator, dtype=torch.float64) * 6
    cos, sin = (t.to(target.dtype).to(target.device) for t in (angles.cos(), angles.sin()))
    k, v = new.guarded["k"].view, new.guarded["v"].view
    out, lse = inputs.call(
        k=k, v=v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, **new.options
    )

    rotated_q, _ = ops.append(
        other.tensor("q"), k, v, other.tensor("k_cache"), other.tensor("v_cache"),
        other.options["cache_seqlens"], other.pages.to(target.device), None, None, None, cos, sin,
        None, False, causal,
    )  # fmt: skip
    judge.assert_bits_equal(inputs.tensor("k_cache"), other.tensor("k_cache"), "k_cache")
    expected = neginf.flash_attn_with_kvcache(
        rotated_q, other.tensor("k_cache"), other.tensor("v_cache"),
        cache_seqlens=other.options["cache_seqlens"] + 3,
        page_table=other.pages.to(target.device), causal=causal, return_lse=True,
    )  # fmt: skip
    judge.assert_bits_equal(out, expected[0], "out")
    judge.assert_bits_equal(lse, expected[1], "lse")
    assert not torch.equal(rotated_q, other.tensor("q"))


@runs_on("decode", "append", dtypes=("bfloat16",))
def test_token_by_token_is_as_all_at_once(target):
    """What generation does: the cache grows, and every step equals causal attention of it all."""
    generator = torch.Generator().manual_seed(1)
    batch, steps, heads, heads_k, head_dim = 2, 40, 4, 2, 64
    q, k, v = (
        torch.randn(batch, steps, h, head_dim, generator=generator).to(target.dtype)
        for h in (heads, heads_k, heads_k)
    )
    exact_out, exact_lse = oracle.attention(q, k, v, causal=True)
    low_out, _ = oracle.attention(q, k, v, causal=True, compute=target.dtype)
    shape = (batch * 3, 16, heads_k, head_dim)
    k_cache, v_cache = (
        torch.full(shape, float("nan"), dtype=target.dtype, device=target.device) for _ in range(2)
    )
    table = int32([[5, 0, 3], [1, 4, 2]], target.device)
    outs, lses = [], []
    ends = [0, 17, *range(18, steps + 1)]  # a prompt, then one token after the other
    for begin, end in itertools.pairwise(ends):
        rows = [t[:, begin:end].to(target.device) for t in (q, k, v)]
        out, lse = neginf.flash_attn_with_kvcache(
            rows[0], k_cache, v_cache, rows[1], rows[2], cache_seqlens=begin, page_table=table,
            causal=True, return_lse=True,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    judge.assert_close(torch.cat(outs, 1), exact_out, low_out, "out", size=judge.largest(v))
    low_lse = oracle.attention(q, k, v, causal=True, compute=torch.float32)[1]
    judge.assert_close(torch.cat(lses, 2), exact_lse, low_lse, "lse", sum_size=10.0)

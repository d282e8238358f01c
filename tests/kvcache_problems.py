"""Caches of keys and values: written out or drawn by hypothesis, laid out in memory full of NaN."""

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import judge
import neginf
import oracle
from problems import SINKS, Guarded, cumulative, int32, judge_state, poisoned_allocations

GARBAGE_PAGES = (-1, -(2**31), 2**31 - 1, 10_000)


@dataclass(frozen=True)
class CacheProblem:
    """Sizes and switches. The values come from `seed`."""

    lengths: tuple = (7,)  # slots in use, per sequence
    lengths_q: tuple = (1,)
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    room: int = 9  # slots behind those in use
    page_size: int | None = None
    missing: tuple = ()  # (sequence, column): entries of the page table that are garbage
    leftpad: tuple | None = None
    entries: tuple | None = None  # cache_batch_idx
    varlen: bool = False
    extra_q: int = 0
    causal: bool = False
    window_size: tuple = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None
    sink: tuple | None = None
    num_splits: int = 0
    seqlen_k_per_split: int | None = None
    seed: int = 0

    @property
    def batch(self):
        return len(self.lengths)

    def with_(self, **changes):
        return dataclasses.replace(self, **changes)


class CacheInputs:
    """The tensors of a problem, in one dtype on one device; unused memory holds NaN."""

    def __init__(self, problem, dtype, device="cpu"):
        self.problem = p = problem
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(p.seed)
        self.references = {}  # by the dtype they are computed in
        self.head_dim_v = p.head_dim if p.head_dim_v is None else p.head_dim_v
        lse_dtype = torch.promote_types(dtype, torch.float32)
        capacity = max([*p.lengths, 0]) + p.room
        if p.page_size is None:
            self.num_entries = max([p.batch - 1, *(p.entries or ())]) + 2
            self.rows = self.capacity = capacity
            if p.entries is None:
                self.num_entries = p.batch
        else:
            self.columns = -(-capacity // p.page_size)
            self.rows, self.capacity = p.page_size, self.columns * p.page_size
            self.num_entries = p.batch * self.columns + 3
            order = torch.randperm(self.num_entries, generator=self.generator)
            self.pages = order[: p.batch * self.columns].view(p.batch, self.columns).to(torch.int32)

        # What each sequence has in its slots, NaN in those that hold no key.
        self.keys = [self.normal((self.capacity, p.heads_k, p.head_dim)) for _ in p.lengths]
        self.values = [self.normal((self.capacity, p.heads_k, self.head_dim_v)) for _ in p.lengths]
        self.exists = []
        for b in range(p.batch):
            exists = torch.zeros(self.capacity, dtype=torch.bool)
            exists[self.leftpad(b) : p.lengths[b]] = True
            for sequence, column in p.missing:
                if sequence == b:
                    exists[column * self.rows : (column + 1) * self.rows] = False
            self.exists.append(exists)

        self.options = {
            "causal": p.causal,
            "window_size": p.window_size,
            "softcap": p.softcap,
            "softmax_scale": p.softmax_scale,
            "num_splits": p.num_splits,
            "seqlen_k_per_split": p.seqlen_k_per_split,
            "cache_seqlens": int32(p.lengths, device),
        }
        if p.page_size is not None:
            self.options["page_table"] = self.page_table().to(device)
        if p.leftpad is not None:
            self.options["cache_leftpad"] = int32(p.leftpad, device)
        if p.entries is not None:
            self.options["cache_batch_idx"] = int32(p.entries, device)
        if p.varlen:
            self.options["cu_seqlens_q"] = int32(cumulative(p.lengths_q), device)
            q_shape = (sum(p.lengths_q) + p.extra_q, p.heads, p.head_dim)
        else:
            assert len(set(p.lengths_q)) <= 1
            q_shape = (p.batch, max(p.lengths_q, default=1), p.heads, p.head_dim)
        self.slopes = self.sink = None
        if p.alibi is not None:
            shape = (p.heads,) if p.alibi == "h" else (p.batch, p.heads)
            self.slopes = torch.rand(shape, generator=self.generator, dtype=torch.float64)
            self.slopes = self.slopes.to(lse_dtype)
            self.options["alibi_slopes"] = self.slopes.to(device)
        if p.sink is not None:
            self.sink = torch.tensor(p.sink, dtype=lse_dtype)
            self.options["sink"] = self.sink.to(device)

        q = self.normal(q_shape)
        for b, rows in enumerate(self.rows_of_q()):
            q[rows][~self.mask(b).any(1)] = float("nan")
        if p.varlen:
            q[sum(p.lengths_q) :] = float("nan")
        self.guarded = {
            "q": Guarded(q, device),
            "k_cache": Guarded(self.cache(self.keys, p.head_dim), device),
            "v_cache": Guarded(self.cache(self.values, self.head_dim_v), device),
        }

    def normal(self, shape):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.dtype)

    def leftpad(self, b):
        return 0 if self.problem.leftpad is None else self.problem.leftpad[b]

    def page_table(self):
        """Columns that nobody may read hold garbage, too."""
        table = self.pages.clone()
        for b, length in enumerate(self.problem.lengths):
            for column in range(-(-length // self.rows), self.columns):
                table[b, column] = GARBAGE_PAGES[(b + column) % len(GARBAGE_PAGES)]
        for b, column in self.problem.missing:
            table[b, column] = GARBAGE_PAGES[column % len(GARBAGE_PAGES)]
        return table

    def place(self, b, slot):
        """(entry, row) of a slot in the cache, or of several in a tensor."""
        if self.problem.page_size is None:
            return (b if self.problem.entries is None else self.problem.entries[b]), slot
        return self.pages[b, slot // self.rows], slot % self.rows

    def cache(self, of_sequences, width):
        shape = (self.num_entries, self.rows, self.problem.heads_k, width)
        cache = torch.full(shape, float("nan"), dtype=self.dtype)
        for b, rows in enumerate(of_sequences):
            # A key that no row sees may be NaN as well (P5).
            seen = torch.zeros(self.capacity, dtype=torch.bool)
            first, length = self.leftpad(b), self.problem.lengths[b]
            seen[first:length] = self.mask(b).any(0)
            slots = seen.nonzero().flatten()
            cache[self.place(b, slots)] = rows[slots]
        return cache

    def rows_of_q(self):
        """The index of each sequence's rows in q."""
        p = self.problem
        if not p.varlen:
            return [(b, slice(None)) for b in range(p.batch)]
        starts = cumulative(p.lengths_q)
        return [(slice(a, b),) for a, b in itertools.pairwise(starts)]

    def mask(self, b):
        """Which keys each row of sequence b sees."""
        p = self.problem
        first, length = self.leftpad(b), p.lengths[b]
        rows = p.lengths_q[b]
        mask = oracle.visible(rows, length - first, p.causal, p.window_size)
        return mask & self.exists[b][first:length]

    def tensor(self, name):
        return self.guarded[name].view

    def call(self, **overrides):
        """The library's function on these tensors: (out, lse)."""
        with poisoned_allocations():
            return neginf.flash_attn_with_kvcache(
                *(self.tensor(n) for n in ("q", "k_cache", "v_cache")),
                return_lse=True,
                **{**self.options, **overrides},
            )

    def reference(self, compute):
        if compute not in self.references:
            self.references[compute] = self.compute_reference(compute)
        return self.references[compute]

    def compute_reference(self, compute):
        p = self.problem
        softmax_dtype = torch.promote_types(compute, torch.float32)
        q = self.tensor("q").cpu().to(compute)
        out = q.new_zeros(*q.shape[:-1], self.head_dim_v)
        lse_shape = (p.heads, q.shape[0]) if p.varlen else (p.batch, p.heads, q.shape[1])
        lse = torch.full(lse_shape, oracle.NEG_INF, dtype=softmax_dtype)
        scale = p.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
        for b, rows in enumerate(self.rows_of_q()):
            slots = slice(self.leftpad(b), p.lengths[b])
            slopes = self.slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[b]
            o, state = oracle.sequence_state(
                q[rows], self.keys[b][slots].to(compute), self.values[b][slots].to(compute),
                self.mask(b), scale, p.softcap, slopes, self.sink, softmax_dtype,
            )  # fmt: skip
            out[rows] = o
            if p.varlen:
                lse[:, rows[0]] = state
            else:
                lse[b] = state
        return out, lse

    def score_size(self):
        p = self.problem
        q = self.tensor("q").cpu().double().nan_to_num(0)
        scale = p.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
        keys = [k.double().norm(dim=-1).max().item() for k in self.keys if k.numel()]
        size = scale * max(keys, default=0.0) * (q.norm(dim=-1).max().item() if q.numel() else 0.0)
        if self.slopes is not None:
            size += judge.largest(self.slopes) * max([*p.lengths, *p.lengths_q, 0])
        return 1.0 + size

    def check(self, **overrides):
        """Runs and judges; returns (out, lse)."""
        out, lse = self.call(**overrides)
        for name, guarded in self.guarded.items():
            guarded.assert_unchanged(name)
        self.judge(out, lse)
        return out, lse

    def judge(self, out, lse):
        value_size = max([judge.largest(v) for v in self.values], default=0.0)
        judge_state(out, lse, self.dtype, self.reference, value_size, self.score_size())


LENGTHS = st.one_of(
    st.integers(0, 20),
    st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 300, 511, 513, 1025]),
)


@st.composite
def cache_problems(draw, head_dims=(1, 8, 40, 59, 64, 96, 128)):
    batch = draw(st.integers(0, 4))
    varlen = draw(st.booleans())
    rows = st.one_of(st.integers(1, 5), st.sampled_from([0, 9, 17, 33, 70]))
    lengths_q = (
        tuple(draw(rows) for _ in range(batch)) if varlen else (draw(st.integers(1, 9)),) * batch
    )
    heads_k = draw(st.integers(1, 3))
    heads = heads_k * draw(st.sampled_from([1, 1, 2, 3, 4, 8, 20]))
    lengths = tuple(draw(LENGTHS) for _ in range(batch))
    page_size = draw(st.sampled_from([None, None, 1, 3, 8, 16, 32, 64, 256]))
    missing = ()
    if page_size is not None and draw(st.integers(0, 3)) == 0:
        missing = tuple(
            (b, draw(st.integers(0, -(-n // page_size) - 1))) for b, n in enumerate(lengths) if n
        )
    entries = None
    if page_size is None and draw(st.booleans()):
        entries = tuple(draw(st.permutations(range(batch + 2)))[:batch])
    leftpad = None
    if draw(st.integers(0, 2)) == 0:
        leftpad = tuple(draw(st.integers(0, n)) for n in lengths)
    side = st.one_of(st.just(-1), st.integers(0, 6), st.sampled_from([31, 64, 100, 2**31]))
    per_split = draw(st.sampled_from([None, None, None, 1, 64, 300]))
    head_dim = draw(st.sampled_from(head_dims))
    return CacheProblem(
        lengths=lengths,
        lengths_q=lengths_q,
        heads=heads,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.none(), st.integers(1, head_dim))),
        room=draw(st.sampled_from([0, 1, 40])),
        page_size=page_size,
        missing=missing,
        leftpad=leftpad,
        entries=entries,
        varlen=varlen,
        extra_q=draw(st.integers(0, 3)) if varlen else 0,
        causal=draw(st.booleans()),
        window_size=(draw(side), draw(side)),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 1.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 15.0])),
        alibi=draw(st.sampled_from([None, None, "h", "bh"])),
        sink=draw(st.one_of(st.none(), st.tuples(*[SINKS] * heads))),
        num_splits=0 if per_split is not None else draw(st.sampled_from([0, 0, 1, 2, 7, 200])),
        seqlen_k_per_split=per_split,
        seed=draw(st.integers(0, 2**16)),
    )

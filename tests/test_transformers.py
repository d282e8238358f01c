"""`attn_implementation="neginf"` in transformers: equal to its own attention wherever a token is.

Models are tiny and randomly initialised; nothing is downloaded.
"""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils  # noqa: E402

from neginf.integrations import transformers as integration  # noqa: E402

NEG_INF = float("-inf")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # the norms of the models compute in float32
SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 48, "vocab_size": 40, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LENGTHS = (9, 4, 1)
SEQLEN = 9


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()


def tiny(kind, implementation, **changes):
    """Every call with the same arguments gives the same weights."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    assert model.config._attn_implementation == implementation
    return model


MODELS = {
    "llama": ("Llama", "sdpa", {}),
    "llama, eager": ("Llama", "eager", {}),
    "sliding windows": ("Mistral", "sdpa", {"sliding_window": 3}),
    "softcap": (
        "Gemma2",
        "eager",
        {"sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "sinks": (
        "GptOss",
        "eager",
        {
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


def batch(padding, lengths=LENGTHS):
    """input_ids and attention_mask; `padding` is left, right or none."""
    if padding == "none":
        lengths = (SEQLEN,) * len(lengths)
    position = torch.arange(SEQLEN)
    mask = torch.stack(
        [position >= SEQLEN - n if padding == "left" else position < n for n in lengths]
    )
    ids = torch.randint(
        2, SIZES["vocab_size"], mask.shape, generator=torch.Generator().manual_seed(2)
    )
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name, padding):
    """Logits at every token, the loss and the gradient of every parameter."""
    kind, reference, changes = MODELS[name]
    inputs = batch(padding)
    real = inputs["attention_mask"].bool()
    # The first token of a sequence would be predicted from padding.
    predictable = real & real.roll(1, dims=1)
    predictable[:, 0] = False
    labels = torch.where(predictable, inputs["input_ids"], -100)
    results = []
    for implementation in ("neginf", reference):
        model = tiny(kind, implementation, **changes).train()
        output = model(**inputs, labels=labels)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        assert all(g is not None and g.isfinite().all() for g in gradients.values())
        results.append((output.loss, output.logits[real], gradients))
    for got, expected in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    for parameter, gradient in results[0][2].items():
        expected = results[1][2][parameter]
        torch.testing.assert_close(gradient, expected, msg=parameter, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "sinks"])
def test_autocast(name):
    """Mixed precision: rotated q and k are float32 there, v is not."""
    kind, reference, changes = MODELS[name]
    inputs = batch("left")
    real = inputs["attention_mask"].bool()
    results = []
    for implementation in ("neginf", reference):
        model = tiny(kind, implementation, **changes).train()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits[real]
        logits.float().square().sum().backward()
        results.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", ["llama", "sliding windows"])
def test_generate(name, padding, cache):
    """Greedy decoding over a cache: the same tokens, and the same scores of each."""
    kind, reference, changes = MODELS[name]
    results = []
    for implementation in ("neginf", reference):
        model = tiny(kind, implementation, **changes).eval()
        results.append(
            model.generate(
                **batch(padding), max_new_tokens=6, do_sample=False, output_scores=True,
                return_dict_in_generate=True, cache_implementation=cache, disable_compile=True,
            )
        )  # fmt: skip
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    for got, expected in zip(results[0].scores, results[1].scores, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def packed_batch():
    lengths = (4, 1, 6)
    ids = torch.randint(2, SIZES["vocab_size"], (1, sum(lengths)))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    return lengths, ids, position_ids


@pytest.mark.parametrize("name", ["llama", "sliding windows"])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(name, by):
    """Sequences in one row do not see each other."""
    kind, _, changes = MODELS[name]
    lengths, ids, position_ids = packed_batch()
    given = {"position_ids": position_ids, "use_cache": False}
    if by == "cu_seq_lens":
        cu_seqlens = torch.tensor([0, 4, 5, 11])
        given |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        given |= {"max_length_q": 6, "max_length_k": 6}
    model = tiny(kind, "neginf", **changes)
    together = model(ids, **given).logits[0]
    apart = torch.cat([model(part).logits[0] for part in ids.split(lengths, 1)])
    torch.testing.assert_close(together, apart, **TOLERANCE)


class Layer:
    is_causal = True


def dense_attention(query, key, value, mask):
    """By transformers' own mask; rows that see nothing are 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    scores = torch.where(mask, scores, NEG_INF)
    return torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0) @ value


PATTERNS = {
    "causal": (masking_utils.causal_mask_function, True, None),
    "window": (masking_utils.sliding_window_causal_mask_function(3), True, 3),
    "bidirectional": (masking_utils.bidirectional_mask_function, False, None),
    # The layer's window counts the row itself, the pattern's does not.
    "both windows": (masking_utils.sliding_window_bidirectional_mask_function(2), False, 3),
}


@given(
    data=st.data(),
    name=st.sampled_from(list(PATTERNS)),
    q_length=st.integers(1, 6),
    past=st.integers(0, 5),
    room=st.integers(0, 3),
)
def test_any_padding(data, name, q_length, past, room):
    """Padding anywhere, a cache with tokens before and room behind: what transformers' mask says,
    on every row that is a token. Rows whose keys are all padding too."""
    mask_function, causal, window = PATTERNS[name]
    positions = past + q_length
    room = room if causal else 0
    if window is None:
        padding = torch.tensor(
            [
                data.draw(st.lists(st.booleans(), min_size=positions, max_size=positions))
                for _ in range(2)
            ]
        )
    else:  # windows count real keys, so only padding at the ends can be compared
        edges = [sorted(data.draw(st.tuples(*[st.integers(0, positions)] * 2))) for _ in range(2)]
        padding = torch.tensor([[a <= i < b for i in range(positions)] for a, b in edges])
    given_mask = data.draw(st.sampled_from([padding, None]))
    sizes = {
        "batch_size": 2, "q_length": q_length, "kv_length": positions + room, "q_offset": past,
        "kv_offset": 0, "mask_function": mask_function, "attention_mask": given_mask,
    }  # fmt: skip
    expected_mask = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    query, key, value = (
        torch.randn(2, h, n, 8, dtype=torch.float64)
        for h, n in ((4, q_length), (2, positions + room), (2, positions + room))
    )
    mask = integration.attention_mask(**sizes)
    hidden = ~expected_mask.any(2).transpose(1, 2).expand(2, positions + room, 2)
    key.transpose(1, 2)[hidden], value.transpose(1, 2)[hidden] = float("nan"), float("nan")
    layer = Layer()
    layer.is_causal = causal
    out, _ = integration.attention(layer, query, key, value, mask, sliding_window=window)
    expected = dense_attention(query, key.nan_to_num(0), value.nan_to_num(0), expected_mask)
    rows = (
        padding[:, past:]
        if given_mask is not None and (causal or window)
        else torch.ones(2, q_length, dtype=torch.bool)
    )
    torch.testing.assert_close(out[rows], expected.transpose(1, 2)[rows], rtol=1e-12, atol=1e-12)
    judge.assert_zero(out[~rows], "rows that are padding")


@pytest.mark.parametrize("given_mask", [None, torch.ones(1, 6, dtype=torch.bool)])
def test_a_window_of_both_sides_needs_rows_that_end_with_the_keys(given_mask):
    """Lengths alone would move it to the last key without a word."""
    mask_function = PATTERNS["both windows"][0]
    options = {"mask_function": mask_function, "attention_mask": given_mask}
    assert integration.attention_mask(1, 3, 6, q_offset=3, **options) is None
    with pytest.raises(NotImplementedError, match=r"^mask_function: got .*accepted"):
        integration.attention_mask(1, 3, 6, q_offset=2, **options)


def test_packed_sequences_are_described_in_full():
    """Else they would see each other."""
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q, .*: got 2 of them; accepted"):
        attend(cu_seq_lens_q=torch.tensor([0, 4, 10]), cu_seq_lens_k=torch.tensor([0, 4, 10]))


def test_no_mask_where_nothing_is_masked():
    ones = torch.ones(2, 7, dtype=torch.bool)
    for given_mask in (None, ones):
        assert integration.attention_mask(2, 7, 7, attention_mask=given_mask) is None
        assert integration.attention_mask(2, 1, 7, q_offset=6, attention_mask=given_mask) is None
    assert integration.attention_mask(2, 3, 7, q_offset=2) is not None  # room behind the rows


def test_static_caches_pass_tensors_as_offsets():
    offset = torch.tensor(2)
    got = integration.attention_mask(1, 3, 7, q_offset=offset)
    assert got.tolist() == [[[[True] * 3 + [True] * 5 + [False] * 2]]]


def test_value_of_another_head_dim():
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    value = torch.randn(1, 2, 5, 8)
    out, weights = integration.attention(Layer(), query, key, value, None)
    mask = torch.ones(5, 5).tril().bool()
    assert weights is None
    assert out.is_contiguous()
    expected = dense_attention(query, key, value, mask).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_value_of_larger_head_dim_is_refused():
    query, value = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 16)
    with pytest.raises(ValueError, match=r"^value: got head_dim 16; accepted is at most"):
        integration.attention(Layer(), query, query, value, None)


def attend(mask=None, **options):
    tensors = (torch.zeros(2, 2, 5, 8) for _ in range(3))
    return integration.attention(Layer(), *tensors, mask, **options)


@pytest.mark.parametrize("padding", ["left", "none"])
def test_compiles_without_a_graph_break(padding):
    model, inputs = tiny("Llama", "neginf").eval(), batch(padding)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got, expected = (m(**inputs, use_cache=False).logits for m in (compiled, model))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real], **TOLERANCE)


REFUSED = {
    "dropout": lambda: attend(dropout=0.1),
    "output_attentions": lambda: attend(output_attentions=True),
    "position_bias": lambda: attend(position_bias=torch.zeros(1, 2, 5, 5)),
    "mask_function": lambda: integration.attention_mask(
        2,
        5,
        5,
        mask_function=masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(torch.zeros(2, 5, dtype=torch.long)),
        ),
    ),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_implemented_is_refused(argument):
    with pytest.raises(NotImplementedError, match=rf"^{argument}: got .*accepted"):
        REFUSED[argument]()


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(2, 1, 5, 5),
        torch.ones(2, 1, 5, 5, dtype=torch.bool),
        torch.zeros(2, 1, 1, 5),
        torch.ones(2, 1, 1, 5, dtype=torch.bool),
        torch.ones(2, 10, dtype=torch.bool),
        torch.ones(2, 5),
    ],
    ids=lambda mask: f"{mask.dtype}{tuple(mask.shape)}",
)
def test_other_masks_are_refused(mask):
    with pytest.raises(ValueError, match=r"^attention_mask: got .*accepted"):
        attend(mask)


def test_a_mask_that_ends_before_the_rows():
    with pytest.raises(
        ValueError, match=r"^attention_mask: got 5 positions; accepted are at least 7"
    ):
        integration.attention_mask(1, 3, 7, q_offset=4, attention_mask=torch.ones(1, 5).bool())


def test_chunks_are_refused_once_there_is_more_than_one():
    chunked = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    assert integration.attention_mask(1, 8, 8, mask_function=chunked) is None
    with pytest.raises(NotImplementedError, match="chunked_overlay"):
        integration.attention_mask(1, 9, 9, mask_function=chunked)


def test_patterns_of_others_are_refused():
    mask_function = functools.partial(masking_utils.causal_mask_function)
    with pytest.raises(NotImplementedError, match=r"functools\.partial"):
        integration.attention_mask(1, 4, 4, mask_function=mask_function)


def test_a_model_with_dropout_is_refused_in_training_only():
    model = tiny("Llama", "neginf", attention_dropout=0.1)
    model.eval()(**batch("left"))
    with pytest.raises(NotImplementedError, match="dropout"):
        model.train()(**batch("left"))

"""The examples on the CPU, in small: they run, and the training notices attention that is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import neginf

pytest.importorskip("rich", reason="rich is not installed")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import make_text  # noqa: E402
import small_gpt  # noqa: E402
import train_gpt  # noqa: E402

TINY = (
    "--device", "cpu", "--steps", "6", "--layers", "2", "--width", "16", "--heads", "2",
    "--batch", "4", "--seqlen", "24",
)  # fmt: skip

NAN = float("nan")

attend_dense = neginf.flash_attn_func
attend_varlen = neginf.flash_attn_varlen_func


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(make_text.make_text(5000))
    return str(path)


def test_scripts_run_one_after_the_other(tmp_path):
    path = tmp_path / "folder" / "text.txt"
    run("make_text.py", str(path), "--bytes", "3000")
    assert path.read_bytes() == make_text.make_text(3000)
    assert "step     5  loss" in run("train_gpt.py", str(path), *TINY)


def test_text():
    text = make_text.make_text(4000)
    assert len(text) == 4000
    assert text.isascii()
    assert train_gpt.PADDING not in text
    assert text.startswith(make_text.make_text(1000))
    assert text != make_text.make_text(4000, seed=1)


def test_attentions_agree_and_padding_sees_no_key(monkeypatch):
    """Out and gradients of real places, and exact zeros at the others."""
    rows = small_gpt.LeftPadded(torch.tensor([5, 0, 1, 3], dtype=torch.int32), 5)
    real = ~rows.padding
    assert real.sum(1).tolist() == [5, 0, 1, 3]
    assert real[:, -1].tolist() == [True, False, True, True]
    lses = []

    def attend_and_keep_lse(*arguments, **options):
        out, lse = attend_dense(*arguments, **options, return_lse=True)
        lses.append(lse)
        return out

    monkeypatch.setattr(neginf, "flash_attn_func", attend_and_keep_lse)
    inputs = torch.randn(3, 4, 5, 2, 8, dtype=torch.float64)
    dout = torch.randn(4, 5, 2, 8, dtype=torch.float64) * real[..., None, None]
    results = {}
    for name, attend in train_gpt.ATTENTIONS.items():
        q, k, v = (tensor.clone().requires_grad_() for tensor in inputs)
        out = attend(q, k, v, rows)
        results[name] = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for name in ("neginf", "neginf-packed"):
        for tensor, expected in zip(results[name], results["sdpa"], strict=True):
            torch.testing.assert_close(tensor[real], expected[real])
            assert (tensor[~real] == 0).all()
    assert torch.equal(lses[0].isneginf(), rows.padding[:, None].expand_as(lses[0]))


def test_comparison_succeeds(text, capsys):
    assert train_gpt.main([text, "--compare", *TINY]) == 0
    assert "all are within" in capsys.readouterr().out


def without_causal(*arguments, **options):
    return attend_varlen(*arguments, **{**options, "causal": False})


def one_key_missing(*arguments, **options):
    return attend_varlen(*arguments, **options, window_size=(20, 0))


def other_scale(q, *arguments, **options):
    return attend_varlen(q, *arguments, **options, softmax_scale=1.001 * q.shape[-1] ** -0.5)


def other_gradient(q, k, v, *arguments, **options):
    """The same out, and a gradient of v that is 0.1 % too large."""
    v = 1.001 * v - 0.001 * v.detach()
    return attend_varlen(q, k, v, *arguments, **options)


@pytest.mark.parametrize("wrong", [without_causal, one_key_missing, other_scale, other_gradient])
def test_comparison_fails_when_attention_is_wrong(wrong, text, monkeypatch, capsys):
    monkeypatch.setattr(neginf, "flash_attn_varlen_func", wrong)
    assert train_gpt.main([text, "--compare", *TINY]) == 1
    assert "outside it: neginf-packed" in " ".join(capsys.readouterr().out.split())


def with_gradient_of_q(change):
    def attend(q, *arguments, **options):
        q = q.view_as(q)
        q.register_hook(change)
        return attend_dense(q, *arguments, **options)

    return attend


def padding_sees_keys(*arguments, **options):
    return attend_dense(*arguments, **{**options, "causal": False})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_gradient_of_q(lambda dq: dq + 1e-9), "step 0: .* values of padding .* not 0"),
        (with_gradient_of_q(lambda dq: dq * NAN), "step 0: the norm of all gradients is nan"),
        (padding_sees_keys, "step 0: the norm of all gradients is nan"),
        (lambda q, *_, **__: q * NAN, "step 0: the loss is nan"),
    ],
)
def test_training_stops_when_padding_leaks(wrong, message, text, monkeypatch):
    monkeypatch.setattr(neginf, "flash_attn_func", wrong)
    with pytest.raises(SystemExit, match=f"neginf, {message}"):
        train_gpt.main([text, "--attention", "neginf", *TINY])

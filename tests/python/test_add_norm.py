"""The norm of a sum: forward the bits of the two ops, backward the gradients of both ops in one rounding."""

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.torch  # noqa: E402
from rlk._add_norm import AddNorm  # noqa: E402


def drawn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_results_and_gradients_are_those_of_add_and_norm(dtype):
    added, stream, weight = drawn(1, 9, 80, dtype=dtype), drawn(2, 9, 80, dtype=dtype), drawn(3, 80, dtype=dtype)
    d_y, d_stream = drawn(4, 9, 80, dtype=dtype), drawn(5, 9, 80, dtype=dtype)
    a, s, w = (t.clone().requires_grad_() for t in (added, stream, weight))
    y, total = AddNorm.apply(a, s, w, 1e-6)
    assert torch.equal(total, added + stream) and torch.equal(y, rlk.torch.rms_norm(added + stream, weight, eps=1e-6))
    torch.autograd.backward([y, total], [d_y, d_stream])
    assert torch.equal(a.grad, s.grad)

    exact = [t.double().requires_grad_() for t in (added, stream, weight)]
    whole = (added + stream).double() + (exact[0] - exact[0].detach()) + (exact[1] - exact[1].detach())
    normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * exact[2]
    torch.autograd.backward([normed, whole], [d_y.double(), d_stream.double()])
    for mine, want in ((a.grad, exact[0].grad), (w.grad, exact[2].grad)):
        bound = 3e-6 if dtype == torch.float32 else 2**-8
        assert float((mine.double() - want).abs().max()) <= bound * float(want.abs().max())


def test_results_that_nobody_used_have_no_part():
    added, stream, weight = (drawn(i, *s) for i, s in ((1, (4, 32)), (2, (4, 32)), (3, (32,))))
    d = drawn(4, 4, 32)
    a, s, w = (t.clone().requires_grad_() for t in (added, stream, weight))
    y, _ = AddNorm.apply(a, s, w, 1e-6)
    y.backward(d)
    want = rlk.torch.rms_norm_bwd(d, added + stream, weight, d_x=True, d_weight=True, eps=1e-6)
    assert torch.equal(a.grad, want[0]) and torch.equal(s.grad, want[0]) and torch.equal(w.grad, want[1])
    a, s, w = (t.clone().requires_grad_() for t in (added, stream, weight))
    _, total = AddNorm.apply(a, s, w, 1e-6)
    total.backward(d)
    assert torch.equal(a.grad, d) and torch.equal(s.grad, d) and w.grad is None


def test_a_weight_that_does_not_learn_gets_no_gradient():
    added, stream, weight = (drawn(i, *s) for i, s in ((1, (4, 32)), (2, (4, 32)), (3, (32,))))
    a = added.clone().requires_grad_()
    y, _ = AddNorm.apply(a, stream, weight, 1e-6)
    y.sum().backward()
    assert a.grad is not None and weight.grad is None

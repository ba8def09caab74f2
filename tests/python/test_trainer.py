"""rlk.trainer: a step's loss and gradients are those of the calls that it makes."""

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.model  # noqa: E402
import rlk.trainer  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def batch(seed, lengths, device, vocab=64):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (sum(lengths),), generator=draw).to(device)
    return tokens, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def plain(model, tokens, cu):
    model.zero_grad(set_to_none=True)
    logp = model.score(tokens, cu)
    loss = -logp.sum() / len(tokens)
    loss.backward()
    return loss.detach(), logp.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_leaves_what_its_calls_leave(device):
    model = rlk.model.Decoder("tiny-qwen3", seed=3, dtype=torch.bfloat16, device=device)

    def loss(tokens, cu):
        logp = model.score(tokens, cu)
        return -logp.sum() / len(tokens), logp

    step = rlk.trainer.Step(model, loss, graphs=2)
    # The same shapes with other lengths, other shapes, more of them than are captured, and the first again.
    for seed, lengths in ((1, [5, 30, 1]), (2, [20, 2, 14]), (3, [9, 9]), (4, [0, 36, 0]), (5, [40]), (6, [1, 34, 1])):
        given = batch(seed, lengths, device)
        want = plain(model, *given)
        found = step(*given)
        assert same(found[0], want[0]) and same(found[1], want[1])
        assert all(same(p.grad, g) for p, g in zip(model.parameters(), want[2]))


@pytest.mark.parametrize("device", DEVICES)
def test_steps_do_not_add_up(device):
    model = rlk.model.Decoder("tiny-llama", seed=3, device=device)
    step = rlk.trainer.Step(model, lambda tokens, cu: model.score(tokens, cu).sum())
    given = batch(1, [7, 3], device)
    first = [step(*given), *[p.grad.clone() for p in model.parameters()]]
    second = [step(*given), *[p.grad for p in model.parameters()]]
    assert all(map(same, first, second))


def test_a_batch_is_padded_by_a_sequence_that_the_loss_leaves_out():
    model = rlk.model.Decoder("tiny-qwen3", seed=3, dtype=torch.bfloat16)
    mask = torch.arange(64) < 41
    step = rlk.trainer.Step(model, lambda tokens, cu, mask: torch.where(mask, model.score(tokens, cu), 0.0).sum())
    tokens, cu = batch(1, [11, 30], "cpu")
    short = step(tokens, cu, mask[:41]), [p.grad.clone() for p in model.parameters()]
    padded = torch.cat([tokens, tokens.new_zeros(23)]), torch.cat([cu, cu.new_tensor([64])])
    long = step(*padded, mask), [p.grad for p in model.parameters()]
    assert float(short[0]) == pytest.approx(float(long[0]), rel=1e-6)
    assert all(map(same, short[1], long[1]))


def test_a_loss_that_is_no_number_is_refused():
    model = rlk.model.Decoder("tiny-qwen3", seed=3)
    given = batch(1, [5], "cpu")
    with pytest.raises(rlk.InvalidArgument, match=r"loss returned \[5\]"):
        rlk.trainer.Step(model, model.score)(*given)
    with pytest.raises(rlk.InvalidArgument, match="without a gradient"):
        rlk.trainer.Step(model, lambda tokens, cu: model.score(tokens, cu).sum().detach())(*given)


def test_rows_know_their_place_without_the_host():
    cu = torch.tensor([0, 0, 3, 3, 7, 8, 8], dtype=torch.int32)
    assert rlk.model.places(cu, 8).tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    model = rlk.model.Decoder("tiny-qwen3", seed=3)
    tokens = torch.arange(8)
    logp = model.score(tokens, cu)
    assert logp[[0, 3, 7]].tolist() == [0.0, 0.0, 0.0] and bool((logp[[1, 2, 4, 5, 6]] < 0).all())
    for dtype in (torch.int32, torch.int64):
        assert same(model.score(tokens, cu.to(dtype)), logp)

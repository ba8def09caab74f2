"""Adapters beside the functions they replace, where these are installed."""

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rlk  # noqa: E402

MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma")


def module_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def tiny(name):
    camel = name.capitalize()
    config = getattr(transformers, f"{camel}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=131, max_position_embeddings=64, pad_token_id=0)
    torch.manual_seed(0)
    return getattr(transformers, f"{camel}ForCausalLM")(config).eval()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("batch_of_tables", [1, 2])
@pytest.mark.parametrize("unsqueeze", [1, 2])
def test_rope_is_transformers_own(dtype, tolerance, batch_of_tables, unsqueeze):
    torch.manual_seed(0)
    angles = torch.randn(batch_of_tables, 5, 8).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    shape = (2, 4, 5, 16) if unsqueeze == 1 else (2, 5, 4, 16)
    q, k = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    mine = rlk.adapters.transformers.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze)
    theirs = module_of("llama").apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze)
    for a, b in zip(mine, theirs):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(torch.autograd.grad(sum(t.float().pow(2).sum() for t in mine), (q, k)),
                    torch.autograd.grad(sum(t.float().pow(2).sum() for t in theirs), (q, k))):
        assert torch.allclose(a, b, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_computes_and_learns_the_same(name):
    model = tiny(name)
    ids = torch.arange(1, 25).reshape(2, 12)
    want = model(ids, labels=ids)
    want.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    before = module_of(name).apply_rotary_pos_emb
    with rlk.adapters.transformers.patch(model):
        assert module_of(name).apply_rotary_pos_emb is not before
        got = model(ids, labels=ids)
        got.loss.backward()
    assert module_of(name).apply_rotary_pos_emb is before and "forward" not in model.lm_head.__dict__
    assert not torch.equal(got.logits, torch.zeros_like(got.logits))
    assert torch.allclose(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, gradients[n], rtol=1e-3, atol=1e-6), n


def test_a_function_that_is_not_known_is_refused(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(module_of("llama"), "rotate_half", module_of("cohere").rotate_half)  # turns neighbours
    with pytest.raises(rlk.Unsupported, match="none that this adapter knows"):
        rlk.adapters.transformers.patch(model)

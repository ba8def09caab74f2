"""Adapters beside the functions they replace, where these are installed."""

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rlk  # noqa: E402
import rlk.torch  # noqa: E402

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_a_patched_model_generates_is_what_it_scores(name, dtype):
    model = tiny(name).to(dtype)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 131, (n,), generator=draw) for n in (5, 33, 12)]
    most = max(map(len, prompts))
    ids, mask = torch.zeros(3, most, dtype=torch.long), torch.zeros(3, most, dtype=torch.long)
    for i, p in enumerate(prompts):  # padded on the left, as for generation
        ids[i, most - len(p):], mask[i, most - len(p):] = p, 1

    def rows_that_differ():
        torch.manual_seed(2)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=True, output_logits=True,
                             return_dict_in_generate=True)
        wrong = 0
        for i, p in enumerate(prompts):
            scored = model(out.sequences[i, most - len(p):][None]).logits[0].float()
            wrong += sum(not torch.equal(step[i].float(), scored[len(p) - 1 + j]) for j, step in enumerate(out.logits))
        return wrong

    with torch.no_grad():
        before = model(ids[1:2, -33:]).logits
        assert rows_that_differ() > 0  # the control
        with rlk.torch.patch(model):
            assert torch.allclose(model(ids[1:2, -33:]).logits, before, rtol=3e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
            assert rows_that_differ() == 0
        assert torch.equal(model(ids[1:2, -33:]).logits, before)


def test_what_a_whole_patch_does_not_know_is_refused_and_nothing_stays(monkeypatch):
    model = tiny("gemma")
    before = model.model.norm.forward
    with pytest.raises(rlk.Unsupported, match="does not know"):
        rlk.torch.patch(model)
    assert model.model.norm.forward == before and "forward" not in model.lm_head.__dict__
    packed = torch.tensor([[0, 1, 0]])
    with pytest.raises(rlk.Unsupported, match="several sequences lie in one row"):
        rlk.adapters.transformers.attention(None, *(torch.zeros(1, 2, 3, 16) for _ in range(3)), None, position_ids=packed)
    with pytest.raises(rlk.Unsupported, match="dropout is 0.5"):
        rlk.adapters.transformers.attention(None, *(torch.zeros(1, 2, 3, 16) for _ in range(3)), None, dropout=0.5)

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


def tiny(name, **changes):
    camel = name.capitalize()
    config = getattr(transformers, f"{camel}Config")(**{
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 131, "max_position_embeddings": 64, "pad_token_id": 0} | changes)
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


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
VARIANTS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "no grouping": ("qwen3", {"num_key_value_heads": 4}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "yarn": ("qwen3", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    "linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "window everywhere": ("mistral", {"sliding_window": 7}),
    "heads of another width": ("llama", {"head_dim": 32}),
}


def padded(prompts):
    """Rows padded on the left, as for generation."""
    most = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), most, dtype=torch.long), torch.zeros(len(prompts), most, dtype=torch.long)
    for i, p in enumerate(prompts):
        ids[i, most - len(p):], mask[i, most - len(p):] = p, 1
    return ids, mask


def draw_prompts(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 131, (n,), generator=draw) for n in lengths]


def biased(model):
    """Biases are zero when a model is made: here they are not."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-1, 1, p.numel()))
    return model


def rows_that_differ(model, prompts, scored_by=None, **options):
    """How many rows of generate() have other logits than a forward over each whole sequence alone."""
    ids, mask = padded(prompts)
    torch.manual_seed(2)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=True, output_logits=True, return_dict_in_generate=True,
                         **options)
    wrong = 0
    for i, p in enumerate(prompts):
        scored = (scored_by or model)(out.sequences[i, ids.shape[1] - len(p):][None]).logits[0].float()
        wrong += sum(not torch.equal(step[i].float(), scored[len(p) - 1 + j]) for j, step in enumerate(out.logits))
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_patched_model_generates_is_what_it_scores(variant, dtype):
    name, changes = VARIANTS[variant]
    model, prompts = biased(tiny(name, **changes)).to(dtype), draw_prompts(5, 33, 12)
    with torch.no_grad():
        before = model(prompts[1][None]).logits
        assert rows_that_differ(model, prompts) > 0  # the control
        with rlk.torch.patch(model):
            assert torch.allclose(model(prompts[1][None]).logits, before, rtol=3e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)
            assert rows_that_differ(model, prompts) == 0
        assert torch.equal(model(prompts[1][None]).logits, before)


@pytest.mark.parametrize("variant", ["llama", "window", "window everywhere"])
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 3}, {"prefill_chunk_size": 7}, {"use_cache": False}])
def test_other_ways_to_generate_have_the_same_bits(variant, options):
    name, changes = VARIANTS[variant]
    model, prompts = tiny(name, **changes), draw_prompts(5, 33, 12)
    if "num_beams" in options:  # rows of out.logits are then beams: only that it runs as without a cache
        ids, mask = padded(prompts)
        with torch.no_grad(), rlk.torch.patch(model):
            found = [model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=c, **options) for c in (True, False)]
        assert torch.equal(*found)
        return
    with torch.no_grad(), rlk.torch.patch(model):
        assert rows_that_differ(model, prompts, **options) == 0


def test_a_static_cache_without_a_mask_is_read_where_it_is_filled():
    from transformers import StaticCache
    model, ids = tiny("llama"), draw_prompts(20)[0][None]
    with torch.no_grad(), rlk.torch.patch(model):
        want, cache = model(ids).logits, StaticCache(model.config, max_cache_len=40)
        first = model(ids[:, :15], past_key_values=cache).logits
        steps = [model(ids[:, i:i + 1], past_key_values=cache, position_ids=torch.tensor([[i]])).logits for i in range(15, 20)]
    assert torch.equal(torch.cat([first, *steps], 1), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_scores_as_each_row_alone(side):
    model, prompts = tiny("qwen3"), draw_prompts(5, 33, 12)
    ids, mask = padded(prompts)
    if side == "right":
        ids, mask = (torch.stack([t.roll(int(n)) for t, n in zip(x, mask.sum(1))]) for x in (ids, mask))
    with torch.no_grad(), rlk.torch.patch(model):
        together = model(ids, attention_mask=mask).logits
        for row, here, p in zip(together, mask.bool(), prompts):
            assert torch.equal(row[here], model(p[None]).logits[0])
        with pytest.raises(rlk.Unsupported, match="positions must count them"):
            model(ids, attention_mask=mask, position_ids=torch.arange(33)[None] + 1)


def test_a_compiled_model_has_the_bits_of_an_eager_one():
    model, prompts = tiny("qwen3", num_hidden_layers=1), draw_prompts(5, 33, 12)
    ids, mask = padded(prompts)
    with torch.no_grad(), rlk.torch.patch(model):
        compiled = torch.compile(model)
        assert torch.equal(compiled(prompts[1][None], use_cache=False).logits, model(prompts[1][None]).logits)
        assert torch.equal(compiled(ids, attention_mask=mask, use_cache=False).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("variant", ["qwen3", "tied", "biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_no_bit_of_a_training_step(variant, dtype):
    """Layers are computed a second time in the backward, then with gradients: their bits are those of the first time."""
    name, changes = VARIANTS[variant]
    model = biased(tiny(name, **changes)).to(dtype).train()
    ids, mask = padded(draw_prompts(5, 33, 12))
    labels = ids.masked_fill(mask == 0, -100)

    def step(**checkpointing):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        found = model(ids, attention_mask=mask, labels=labels, use_cache=False)
        found.loss.backward()
        model.gradient_checkpointing_disable()
        return {"logits": found.logits.detach(), "loss": found.loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}

    plain = step()
    with rlk.torch.patch(model):
        ours = step()
        for reentrant in (False, True):
            again = step(use_reentrant=reentrant)
            assert [n for n in ours if not torch.equal(ours[n], again[n])] == []
        with torch.no_grad():
            assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, ours["logits"])
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    most = max(float(p.grad.abs().max()) for p in model.parameters())
    for n, t in plain.items():  # and the gradients are transformers' own, but for rounding
        t, mine = t.float(), ours[n].float()
        if n == "logits":  # of padding transformers makes something else
            t, mine = t[mask.bool()], mine[mask.bool()]
        assert torch.allclose(t, mine, atol=tolerance * max(float(t.abs().max()), 1e-3 * most)), n


def test_masks_of_any_dtype_say_the_same():
    model, prompts = tiny("llama"), draw_prompts(5, 33, 12)
    ids, mask = padded(prompts)
    with torch.no_grad(), rlk.torch.patch(model):
        want = model(ids, attention_mask=mask).logits
        for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32):
            assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits[mask.bool()], want[mask.bool()]), dtype
        whole = model(prompts[1][None]).logits
        assert torch.equal(model(prompts[1][None], attention_mask=torch.ones(1, 33, dtype=torch.long)).logits, whole)
        cut = mask.clone()
        cut[:, :8] = 0  # tokens that are there, hidden from the left
        hidden = model(ids, attention_mask=cut).logits
        assert torch.equal(hidden[1, 8:], model(prompts[1][None, 8:]).logits[0])


@pytest.mark.parametrize("name, changes, words", [
    ("gemma", {}, r"model\.embed_tokens: .*GemmaTextScaledWordEmbedding has weights, and this adapter does not know it"),
    ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, r"model\.rotary_emb: rope_type 'dynamic'"),
    ("mixtral", {}, r"layers\.0\.mlp.*has weights, and this adapter does not know it"),
    ("llama", {"attention_dropout": 0.5}, "dropout is 0.5"),
])
def test_what_a_whole_patch_does_not_know_is_refused_by_name(name, changes, words):
    model = tiny(name, **changes).train()
    before = model.model.norm.forward
    with pytest.raises(rlk.Unsupported, match=words):
        with rlk.torch.patch(model):
            model(draw_prompts(5)[0][None])
    assert model.model.norm.forward == before and "forward" not in model.lm_head.__dict__


def test_what_the_attention_of_a_whole_patch_does_not_know_is_refused():
    packed = torch.tensor([[0, 1, 0]])
    call = rlk.adapters.transformers.attention
    tensors = [torch.zeros(1, 2, 3, 16) for _ in range(3)]
    with pytest.raises(rlk.Unsupported, match="several sequences lie in one row"):
        call(None, *tensors, None, position_ids=packed)
    with pytest.raises(rlk.Unsupported, match="s_aux is"):
        call(None, *tensors, None, s_aux=torch.zeros(2))
    with pytest.raises(rlk.Unsupported, match="output_attentions is True"):
        call(None, *tensors, None, output_attentions=True)
    with pytest.raises(rlk.Unsupported, match="the mask has 4 axes"):
        call(None, *tensors, torch.zeros(1, 1, 3, 3))

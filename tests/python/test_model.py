"""rlk.model: the trainer's packed forward and the sampler's cache have the same bits; checkpoints; the loop."""

import json
import sys

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.model  # noqa: E402
from rlk import _peer, sampler, verify_model  # noqa: E402


def decoder(name="tiny-qwen3", **options):
    return rlk.model.Decoder(name, **({"seed": 3} | options))


def prompts(*lengths, vocab=64):
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(vocab, (n,), generator=draw).tolist() for n in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-kimi"])
def test_every_path_has_the_bits_of_the_packed_forward(name, dtype):
    model = decoder(name, dtype=dtype)
    sequences = verify_model.corpus(model, 5, 140, 2)
    reference = verify_model.packed(model, sequences)
    for path, run in verify_model.paths(model, sequences):
        verdict, apart = verify_model.compare(reference, run())
        assert apart == 0 and not any(verdict.values()), (path, verdict, apart)


def test_the_comparison_finds_the_op_that_differs():
    model = decoder()
    sequences = verify_model.corpus(model, 3, 40, 2)
    reference = verify_model.packed(model, sequences)

    class Broken:
        def __getattr__(self, name):
            return getattr(rlk.torch, name)

        def swiglu(self, x):
            out = rlk.torch.swiglu(x)
            return out * (1 + 2**-20) if x.shape[0] < 4 else out  # a variant for few rows

    model.ops = Broken()
    verdict, apart = verify_model.compare(reference, verify_model.sampled(model, sequences, 1))
    assert verdict[0].startswith("mlp") and apart > 0 and verdict[-1] == ""


def test_the_peer_computes_the_same_model():
    ours, peers = decoder(dtype=torch.float32), decoder(dtype=torch.float32, ops=_peer)
    tokens = torch.tensor(sum(prompts(30, 9), []))
    cu = torch.tensor([0, 30, 39], dtype=torch.int32)
    with torch.no_grad():
        a, b = ours.score(tokens, cu), peers.score(tokens, cu)
    assert torch.allclose(a, b, atol=1e-4) and a[0] == a[30] == 0


@pytest.mark.parametrize("options", [{}, {"chunk": 3, "page_size": 4}, {"batch": 1}, {"reuse": False, "page_size": 1}])
def test_what_is_sampled_is_what_is_scored(options):
    model = decoder(dtype=torch.bfloat16)
    requests = [sampler.Request(p, most=12, seed=4, stream=i, temperature=0.9) for i, p in enumerate(prompts(3, 40, 17, 17))]
    requests.append(sampler.Request(requests[1].prompt + [1, 2], most=5, seed=8, temperature=0.9))
    answers = sampler.Sampler(model, pages=200, **options).run(requests)
    again = sampler.Sampler(model, pages=200).run(requests[::-1])[::-1]
    assert [(a.tokens, a.logp) for a in answers] == [(a.tokens, a.logp) for a in again]
    rows = [r.prompt + a.tokens for r, a in zip(requests, answers)]
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        scored = model.score(torch.tensor(sum(rows, [])), cu, temperature=0.9)
    for i, (request, answer) in enumerate(zip(requests, answers)):
        assert scored[cu[i] + len(request.prompt):cu[i + 1]].tolist() == answer.logp


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}])
def test_captured_steps_draw_what_eager_ones_draw(filters):
    """On a CPU a captured step is computed anew each time, on the memory and in the sizes that a GPU replays."""
    model = decoder(dtype=torch.bfloat16)
    requests = [sampler.Request(p, most=5 + 7 * i, seed=4, stream=i, **filters) for i, p in enumerate(prompts(3, 9, 5, 1, 7))]
    eager, captured = (sampler.Sampler(model, pages=200, page_size=2, graphs=g) for g in (False, True))
    assert [(a.tokens, a.logp) for a in eager.run(requests)] == [(a.tokens, a.logp) for a in captured.run(requests)]
    sizes = {key[:2] for key in captured._steady}
    assert not eager._steady and {rows for rows, _ in sizes} == {1, 2, 4, 8} and len({width for _, width in sizes}) > 1


def test_a_step_that_is_begun_early_changes_nothing(monkeypatch):
    """Sequences that end by a token of their own, or come while the next step is under way; and who looks at a step sees that one."""
    model, begun = decoder(), []
    plain = sampler._Steady._begin
    monkeypatch.setattr(sampler._Steady, "_begin", lambda self: begun.append(self) or plain(self))
    first = [sampler.Request(p, most=30, seed=4, stream=i) for i, p in enumerate(prompts(7, 20, 33))]
    whole = sampler.Sampler(model, pages=200, page_size=8, graphs=False).run(first)
    stops = [a.tokens[n] for a, n in zip(whole, (4, 17, 29))]
    first = [sampler.Request(r.prompt, most=30, seed=4, stream=r.stream, stop=t) for r, t in zip(first, stops)]
    late = sampler.Request(prompts(5)[0], most=9, seed=4, stream=9)

    def run(**options):
        found, rows = sampler.Sampler(model, pages=200, page_size=8, **options), {}
        answers = [found.add(r) for r in first]
        for step in range(12):
            assert found.step() and (step or found.step())
        answers.append(found.add(late))
        while found.step():
            pass
        assert not found.running and found.cache.free == 200
        return [(a.tokens, a.logp) for a in answers]

    eager = run(graphs=False)
    assert not begun and [len(t) for t, _ in eager] == [t.index(s) + 1 for (t, _), s in zip(eager, stops)] + [9]
    assert run(graphs=True) == eager
    assert sum(s.ahead for s in begun) == 0 and len(begun) > 20


@pytest.mark.parametrize("name, most", [("tiny-qwen3", 2), ("tiny-kimi", 3)])
def test_a_captured_step_leaves_what_the_next_one_needs(name, most, monkeypatch):
    """The host writes for the first step, where a page is full, and where a chunk of KDA begins."""
    filled, plain = [], sampler._Steady.fill
    monkeypatch.setattr(sampler._Steady, "fill", lambda self, *given: filled.append(given) or plain(self, *given))
    made = sampler.Sampler(decoder(name), pages=20, page_size=64, graphs=True)
    made.run([sampler.Request(prompts(40)[0], most=60, stream=1), sampler.Request(prompts(40)[0], most=60, stream=2)])
    assert 1 < len(filled) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_of_recurrent_layers_draw_what_eager_ones_draw(dtype):
    """Sequences join and leave, before, at and behind the ends of KDA's chunks, and begin with a single token or from a prefix."""
    model = decoder("tiny-kimi", dtype=dtype)
    asked = zip([*prompts(62, 1, 64, 3, 130), prompts(130)[0]], (5, 80, 3, 66, 9, 70))
    requests = [sampler.Request(p, most=m, seed=4, stream=i) for i, (p, m) in enumerate(asked)]
    eager, captured = (sampler.Sampler(model, pages=400, page_size=4, batch=4, graphs=g) for g in (False, True))
    assert [(a.tokens, a.logp) for a in eager.run(requests)] == [(a.tokens, a.logp) for a in captured.run(requests)]
    assert not eager._resident and captured._resident.keys() == {1, 2, 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mlp_in_one_step_has_the_bits_of_two(dtype, monkeypatch):
    """One where its arithmetic is that of linear alone; two where no implementation has it so."""
    model, x, asked = decoder(dtype=dtype), torch.randn(9, 64).to(dtype), []
    with torch.no_grad():
        one = rlk.model.gated(rlk.torch, x, model.blocks[0].gate_up, asked.append)
    two = rlk.model.gated(rlk.torch, x, model.blocks[0].gate_up, asked.append)  # a gradient wants gate and up
    assert torch.equal(one, two) and asked == ["gate_up", "swiglu"]
    with torch.no_grad(), rlk.backend("linear=native.replay_sm90;*=native"):
        if dtype == torch.bfloat16:
            assert torch.equal(rlk.model.gated(rlk.torch, x, model.blocks[0].gate_up, asked.append),
                               rlk.torch.swiglu(rlk.torch.linear(x, model.blocks[0].gate_up)))
    linear = rlk.torch.linear

    def without_swiglu(x, w, **more):
        if more:
            raise rlk.NoImplementation("linear: no implementation takes this call")
        return linear(x, w)

    monkeypatch.setattr(rlk.torch, "linear", without_swiglu)
    del asked[:]
    with torch.no_grad():
        assert torch.equal(rlk.model.gated(rlk.torch, x, model.blocks[0].gate_up, asked.append), one) and asked == ["gate_up", "swiglu"]


def test_weights_that_changed_serve_no_later_request():
    model = decoder()
    request = sampler.Request(prompts(40)[0], most=6, seed=1)
    kept = sampler.Sampler(model, pages=20, page_size=8)
    kept.run([request])
    with torch.no_grad():
        model.blocks[0].qkv.mul_(1.5)
    kept.weights_changed()
    again, fresh = kept.run([request]), sampler.Sampler(model, pages=20, page_size=8).run([request])
    assert again[0].logp == fresh[0].logp and kept.cache.free == 20
    kept.add(request)
    kept.step()
    with pytest.raises(rlk.InvalidArgument, match="weights changed while 1 sequences run"):
        kept.weights_changed()


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-kimi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits_holds_what_is_trained_on(name, dtype):
    """The packed forward rounds keys and values as the cache does; their gradient is that of the rounded ones."""
    model, exact = (decoder(rlk.model.config(name, fp8_cache=f8), dtype=dtype) for f8 in (True, False))
    requests = [sampler.Request(p, most=m, seed=4, stream=i) for i, (p, m) in enumerate(zip(prompts(30, 1, 70), (9, 4, 20)))]
    found = [sampler.Sampler(model, pages=200, page_size=8, **more).run(requests) for more in ({}, {"chunk": 7}, {"batch": 1, "graphs": True})]
    assert found[0][0].tokens and all([(a.tokens, a.logp) for a in f] == [(a.tokens, a.logp) for a in found[0]] for f in found[1:])
    rows = [r.prompt + a.tokens for r, a in zip(requests, found[0])]
    tokens, cu = torch.tensor(sum(rows, [])), torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    scored, other = model.score(tokens, cu), exact.score(tokens, cu)
    for i, (request, answer) in enumerate(zip(requests, found[0])):
        assert scored[cu[i] + len(request.prompt):cu[i + 1]].tolist() == answer.logp
    assert not torch.equal(scored, other) and torch.allclose(scored, other, atol=0.5)
    made = sampler.Sampler(model, pages=4).cache
    assert made.k.dtype == torch.float8_e4m3fn and made.k.isnan().all() and made.k.element_size() == 1
    scored.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"chunk": 1}, {"chunk": 63}, {"chunk": 64}, {"chunk": 65}, {"batch": 1}])
def test_recurrent_layers_sample_what_is_scored(options):
    """Around the bounds of KDA's chunks of 64 tokens: prompts end, and answers go on, before, at and behind them."""
    model = decoder("tiny-kimi")
    requests = [sampler.Request(p, most=m, seed=4, stream=i)
                for i, (p, m) in enumerate(zip(prompts(62, 63, 64, 1, 130), (4, 2, 3, 66, 1)))]
    answers = sampler.Sampler(model, pages=200, **options).run(requests)
    rows = [r.prompt + a.tokens for r, a in zip(requests, answers)]
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        scored = model.score(torch.tensor(sum(rows, [])), cu)
    for i, (request, answer) in enumerate(zip(requests, answers)):
        assert scored[cu[i] + len(request.prompt):cu[i + 1]].tolist() == answer.logp


def test_every_weight_of_recurrent_layers_has_a_gradient_and_learns():
    model = decoder("tiny-kimi")
    tokens, cu = torch.tensor(sum(prompts(70, 9), [])), torch.tensor([0, 70, 79], dtype=torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(6):
        loss = -model.score(tokens, cu).sum()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_recurrent_layers_go_on_from_a_prefix_with_the_same_bits(page_size):
    model, shared = decoder("tiny-kimi"), prompts(200)[0]
    requests = [sampler.Request(shared[:n] + more, most=5, seed=4, stream=i)
                for i, (n, more) in enumerate(((150, []), (150, [7, 8]), (70, [9]), (200, []), (190, [3])))]
    reused, fresh = (sampler.Sampler(model, pages=200, page_size=page_size, batch=1, reuse=r) for r in (True, False))
    rows = {}
    for s in (reused, fresh):
        s.note = lambda layer, name, found, keys, s=s: name == "embedding" and rows.update({s: rows.get(s, 0) + len(keys)})
    assert [(a.tokens, a.logp) for a in reused.run(requests)] == [(a.tokens, a.logp) for a in fresh.run(requests)]
    assert rows[reused] < rows[fresh] - 250  # of the second, fourth and fifth prompt most was there


def test_what_recurrent_layers_lack_is_refused(tmp_path, capsys):
    assert verify_model.main(["tiny-kimi", "--peer", "torch"]) == 2
    assert "PyTorch has no ops for the recurrent layers of tiny-kimi" in capsys.readouterr().err


def test_a_full_cache_waits_and_forgets_prefixes():
    model = decoder()
    requests = [sampler.Request(p, most=4, stream=i) for i, p in enumerate(prompts(20, 21, 22, 23, 24))]
    small, large = (sampler.Sampler(model, pages=n, page_size=8) for n in (6, 100))
    assert [a.tokens for a in small.run(requests)] == [a.tokens for a in large.run(requests)]
    assert small.cache.free == 6


@pytest.mark.parametrize("request_, words", [
    (sampler.Request([], 4), "no tokens"),
    (sampler.Request([64], 4), "has token 64, the vocabulary has 64"),
    (sampler.Request([1] * 90, 60), "150 tokens need 10 pages, the cache has 8"),
    (sampler.Request([1], 5000), "5001 tokens are asked for, the model's max_length is 4096"),
])
def test_requests_that_cannot_be_served_are_refused(request_, words):
    with pytest.raises(rlk.InvalidArgument, match=words):
        sampler.Sampler(decoder(), pages=8).add(request_)


@pytest.mark.parametrize("bounds, words", [
    ([0, 4, 7], "cu_seqlens goes from 0 to 7, there are 10 tokens"),
    ([1, 10], "cu_seqlens goes from 1 to 10, there are 10 tokens"),
    ([0, 12], "cu_seqlens goes from 0 to 12, there are 10 tokens"),
])
def test_tokens_of_no_sequence_are_refused(bounds, words):
    with pytest.raises(rlk.InvalidArgument, match=words):
        decoder().score(torch.arange(10), torch.tensor(bounds, dtype=torch.int32))


# As llama-3.1-8b has it, of a model that was trained at 32 positions.
SCALED = rlk.model.config("tiny-llama", theta=5e5, scaling=rlk.model.config("llama-3.1-8b").scaling | {"original_max": 32})


def test_scaled_rope_turns_otherwise():
    tokens, cu = torch.tensor(prompts(50)[0]), torch.tensor([0, 50], dtype=torch.int32)
    with torch.no_grad():
        plain, scaled = (decoder(rlk.model.config(SCALED, scaling=s)).score(tokens, cu) for s in ({}, SCALED.scaling))
    assert float((plain - scaled).abs().max()) > 0.01


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", pytest.param(SCALED, id="scaled rope"), "tiny-kimi"])
def test_checkpoints_go_to_transformers_and_back(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if name == "tiny-kimi":
        monkeypatch.setitem(sys.modules, "fla", None)  # whose kernels need a GPU: transformers then has its own
        if not hasattr(transformers, "KimiLinearForCausalLM"):
            pytest.skip("this version of transformers has no Kimi-Linear")
    model = decoder(name, dtype=torch.float32)
    model.save(tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    tokens = prompts(50)[0]
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
        ours = model.logits(model.packed(torch.tensor(tokens), torch.tensor([0, 50], dtype=torch.int32)))
    assert torch.allclose(logits, ours, atol=2e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    back = rlk.model.load(tmp_path / "theirs")
    assert back.config == model.config
    for (name_, a), (_, b) in zip(model.named_parameters(), back.named_parameters()):
        assert torch.equal(a, b), name_


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    pytest.importorskip("safetensors")
    decoder("tiny-llama").save(tmp_path)
    model = decoder(seed=9)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(rlk.InvalidArgument, match="missing 4, the first is model.layers.0.self_attn.k_norm.weight"):
        model.load_weights(tmp_path)
    other = decoder(rlk.model.config("tiny-llama", mlp=64))
    with pytest.raises(rlk.InvalidArgument, match=r"mlp.gate_proj.weight is \[176, 64\], the model has \[64, 64\]"):
        other.load_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("change, words", [({"model_type": "gpt2"}, "model_type 'gpt2'"), ({"attention_bias": True}, "attention_bias is True"),
                                           ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'")])
def test_a_checkpoint_of_another_kind_is_refused(change, words):
    described = rlk.model.to_checkpoint(rlk.model.config("tiny-qwen3"))
    assert rlk.model.from_checkpoint(described) == rlk.model.config("tiny-qwen3")
    with pytest.raises(rlk.Unsupported, match=words):
        rlk.model.from_checkpoint(described | change)


@pytest.mark.parametrize("change, words", [
    ({"mlp_layer_types": None, "first_k_dense_replace": 1}, "3 of 4 layers have experts"), ({"q_lora_rank": 8}, "q_lora_rank is 8"),
    ({"mla_use_nope": False}, "mla_use_nope is False"), ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "not every n-th")])
def test_a_kimi_checkpoint_that_this_decoder_does_not_compute_is_refused(change, words):
    described = rlk.model.to_checkpoint(rlk.model.config("tiny-kimi"))
    assert rlk.model.from_checkpoint(described) == rlk.model.config("tiny-kimi", theta=1e6)
    with pytest.raises(rlk.Unsupported, match=words):
        rlk.model.from_checkpoint(described | change)


@pytest.mark.parametrize("name", ["tiny-ranks"])
def test_several_ranks_are_paths_too(name, capsys):
    assert verify_model.main([name, "--layers", "1", "--sequences", "2", "--longest", "20", "--ranks", "2", "8"]) == 0
    said = capsys.readouterr().out
    assert all(f"{way}, over {n} ranks" in said for way in ("packed", "decoded") for n in (2, 8))
    assert verify_model.main(["tiny-qwen3", "--ranks", "2"]) == 2
    assert "4 heads of 16 over 2 ranks" in capsys.readouterr().err


def test_a_rank_that_differs_is_found(monkeypatch, capsys):
    from rlk import parallel
    plain = parallel.decoder

    def broken(model, group):
        model = plain(model, group)
        if group.rank == 1:
            with torch.no_grad():
                model.blocks[0].down[0, 0] += 1
        return model

    monkeypatch.setattr(parallel, "decoder", broken)
    assert verify_model.main(["tiny-ranks", "--layers", "1", "--sequences", "2", "--longest", "20", "--ranks", "2"]) == 1
    assert "mlp " in capsys.readouterr().out


def test_the_control_is_beside_and_says_where_it_differs(tmp_path, capsys):
    from rlk import _tools
    import subprocess
    file, page = tmp_path / "found.json", tmp_path / "page.html"
    words = ["tiny-qwen3", "--layers", "1", "--sequences", "3", "--longest", "40", "--peer", "torch"]
    assert verify_model.main([*words, "--certificate", str(file), "--report", str(page)]) == 0
    found, said = json.loads(file.read_text()), capsys.readouterr().out
    assert found["good"] and len(found["peer"]["paths"]) > 6 and "PyTorch:" in said
    assert "The control: the same model" in page.read_text()
    done = subprocess.run([_tools.dispatch_program(), "--verify-model", str(file), "--report", str(page)])
    assert done.returncode == 0


def test_verify_model_says_same_and_its_control_does_not(tmp_path, capsys):
    file = tmp_path / "found.json"
    small = ["tiny-qwen3", "--layers", "1", "--sequences", "3", "--longest", "40"]
    assert verify_model.main([*small, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["good"] and all(p["d_logp"] == 0 for p in found["paths"]) and len(found["paths"]) > 6
    said = capsys.readouterr().out
    assert "every path has the same bits" in said and " none" not in said


def test_every_call_is_computed_again_on_the_cpu(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    words = ["tiny-kimi", "--sequences", "2", "--longest", "20", "--dtype", "bf16", "--replay", "--certificate", str(file)]
    assert verify_model.main(words) == 0
    again = {f["op"]: f for f in json.loads(file.read_text())["replay"]}
    assert again.keys() == {"embedding", "rms_norm", "linear", "short_conv", "kda_fwd", "swiglu", "attention", "linear_logp"}
    assert all(f["rows"] and not f["differ"] and not f["refused"] for f in again.values())
    assert "computed again on the CPU: the same bits" in capsys.readouterr().out
    swiglu = rlk.torch.swiglu

    def on_this_machine_alone(x, **held):
        return swiglu(x, **held) * (1 if held else 1 + 2**-7)

    model = decoder("tiny-kimi", dtype=torch.bfloat16)
    monkeypatch.setattr(rlk.torch, "swiglu", on_this_machine_alone)
    assert [f["op"] for f in verify_model.replay(model, [[1, 2, 3], [4, 5]]) if f["differ"]] == ["swiglu"]
    assert model.ops is rlk.torch


needs_backward = pytest.mark.skipif(not rlk.torch.Schema("attention").backward, reason="attention has no backward")


@needs_backward
def test_gradients_of_the_model_agree_with_the_peers():
    ours, peers = decoder(dtype=torch.float32), decoder(dtype=torch.float32, ops=_peer)
    tokens, cu = torch.tensor(sum(prompts(30, 9), [])), torch.tensor([0, 30, 39], dtype=torch.int32)
    for model in (ours, peers):
        (model.score(tokens, cu) * torch.linspace(-1, 1, 39)).sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), peers.named_parameters()):
        assert torch.allclose(a.grad, b.grad, atol=2e-4 * float(b.grad.abs().max()) + 1e-7), name


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_scored_after_a_prompt_that_is_there_once(name, dtype):
    model, (a, b, *samples) = decoder(name, dtype=dtype), prompts(20, 7, 9, 1, 4, 5)
    # Two prompts, samples of both, one of them empty, and a sequence of none between.
    packed, prefix_of = [a, samples[0], b, [], samples[1], samples[3], samples[2]], [-1, 0, -1, 0, 2, -1, 0]
    bounds = lambda sequences: torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)  # noqa: E731
    cu, of = bounds(packed), torch.tensor(prefix_of, dtype=torch.int32)
    shared = model.score(torch.tensor(sum(packed, [])), cu, prefix_of=of, entropy=True)
    whole = [([] if n < 0 else packed[n]) + s for s, n in zip(packed, prefix_of)]
    alone = model.score(torch.tensor(sum(whole, [])), bounds(whole), entropy=True)
    # Each sample's tokens in both, and the prompts' own.
    at = [end - len(s) + i for s, end in zip(packed, bounds(whole)[1:].tolist()) for i in range(len(s))]
    for x, y in zip(shared, alone, strict=True):
        assert torch.equal(x, y[at])
    assert shared[0][len(a)] != 0 and shared[0][0] == 0
    weight = torch.linspace(-1, 1, len(at)) * torch.tensor([n >= 0 for s, n in zip(packed, prefix_of) for _ in s])
    gradients = [torch.autograd.grad((logp * weight).sum(), list(model.parameters())) for logp in (shared[0], alone[0][at])]
    for x, y in zip(*gradients, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=(1e-5 if dtype == torch.float32 else 2e-2) * float(y.abs().max()))


def test_prompts_are_shared_within_what_a_model_knows():
    model, tokens, cu = decoder("tiny-qwen3"), torch.arange(8), torch.tensor([0, 3, 6, 8], dtype=torch.int32)
    for wrong, words in [([0, 0, 0], r"prefix_of\[0\] is 0"), ([-1, 0, 1], r"prefix_of\[2\] is 1"), ([-1, -1], "prefix_of has 2 sequences")]:
        with pytest.raises(rlk.InvalidArgument, match=words):
            model.score(tokens, cu, prefix_of=torch.tensor(wrong))
    with pytest.raises(rlk.Unsupported, match="recurrent layers"):
        decoder("tiny-kimi").score(tokens, cu, prefix_of=torch.tensor([-1, 0, 0]))
    short = decoder(rlk.model.config("tiny-qwen3", max_length=5))
    with pytest.raises(rlk.InvalidArgument, match="a sequence has 6 tokens"):
        short.score(tokens, cu, prefix_of=torch.tensor([-1, 0, -1]))


def test_the_program_verifies_a_model_with_certificate_and_page(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path
    from rlk import _tools

    def dispatch(*words, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        return subprocess.run([_tools.dispatch_program(), "--verify-model", *map(str, words)], capture_output=True, text=True,
                              env={**os.environ, "PATH": path})

    certificate, page = tmp_path / "c.json", tmp_path / "page.html"
    done = dispatch("tiny-llama", "--certificate", certificate, "--report", page, "--seed", 3, "--dtype", "bf16", "--replay")
    assert "computed again on the CPU: the same bits" in done.stdout, done.stderr
    assert done.returncode == 0 and "every path has the same bits" in done.stdout, done.stderr
    found = json.loads(certificate.read_text())
    assert found["good"] and (found["seed"], found["dtype"]) == (3, "bf16") and len(found["paths"]) > 8
    assert all(op["differ"] == 0 for path in found["paths"] for op in path["ops"])
    assert {d["op"] for d in found["digests"]} == {"embedding", "qkv", "rope", "attention", "stream", "mlp", "hidden"}
    assert all(d["arithmetic"] and len(d["digest"]) == 16 for d in found["digests"])
    text = page.read_text()
    assert "every path has the same bits" in text and found["digest"] in text and "rows differ</title>" in text
    again = text[text.index("Computed again on the CPU"):]
    assert all(f"<td>{f['op']}<td>{f['arithmetic']}<td>{f['calls']}<td>{f['rows']}<td class=good>" in again for f in found["replay"])
    # A page of a certificate that says otherwise says so, and so does the exit code.
    found["good"], found["paths"][0]["ops"][3]["differ"], found["paths"][0]["layers"]["layer 1"] = False, 5, "<mlp> 5/9"
    found["replay"][0]["differ"], found["replay"][1]["refused"] = 77, "no <such> arithmetic"
    certificate.write_text(json.dumps(found))
    assert dispatch(certificate, "--report", page).returncode == 1
    text = page.read_text()
    assert "paths differ" in text and "5 of " in text and "&lt;mlp&gt; 5/9" in text
    assert "<td class=bad>77" in text and "not computed: no &lt;such&gt; arithmetic" in text
    found["replay"] = []
    certificate.write_text(json.dumps(found))
    assert dispatch(certificate, "--report", page).returncode == 1 and "Computed again" not in page.read_text()
    certificate.write_text("{}")
    assert dispatch(certificate, "--report", page).returncode == 2
    unknown = dispatch("tiny-nothing")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: model 'tiny-nothing' is unknown")
    without = dispatch("tiny-llama", path=str(tmp_path))
    assert without.returncode == 2 and "runs in Python, and python3 cannot be started: No such file" in without.stderr


def test_the_module_verify_takes_ops_and_models():
    import subprocess
    import sys

    def verify(*words):
        return subprocess.run([sys.executable, "-m", "rlk.verify", *words], capture_output=True, text=True)

    model = verify("tiny-qwen3", "--layers", "1", "--sequences", "2", "--longest", "12")
    assert model.returncode == 0 and "every path has the same bits" in model.stdout, model.stderr
    op = verify("tp_sum", "--budget", "short")
    assert op.returncode == 0 and "tp_sum" in op.stdout, op.stderr
    unknown = verify("tiny-nothing")
    assert unknown.returncode == 2 and "model 'tiny-nothing' is unknown" in unknown.stderr
    assert verify().returncode == 2 and "python -m rlk.verify" in verify("--help").stdout
    # The function of that name stays, whoever imports the module.
    done = subprocess.run([sys.executable, "-c", "import rlk, rlk.verify; from rlk import verify; assert rlk.verify is verify and callable(verify)"])
    assert done.returncode == 0

"""One model at degrees 1, 2, 4 and 8, compared with the model of one device op by op, to the bit.

    python -m rlk.parallel                                          # ranks are threads: runs anywhere
    python -m rlk.parallel --threads 1 2 --layers 1 --model qwen3-0.6b
    torchrun --nproc-per-node 4 -m rlk.parallel --device cuda       # ranks are processes; degree 1 beside theirs

For every layer the table says whether all rows are those of the model that is not spread, or the first op that left other bits; then the
largest difference between log-probabilities, and whether the gradients of all weights are those of degree 1 and the sampled tokens those
of the model.
"""

import argparse
import hashlib
import os
import sys

import torch

import rlk
import rlk.model
from rlk import parallel, sampler, verify_model


def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def build(given):
    shape = rlk.model.config(given.model, **({"layers": given.layers} if given.layers else {}))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
    return rlk.model.Decoder(shape, seed=given.seed, dtype=dtype, device=given.device)


def found(given, group=None):
    """What a model leaves: rows of every op, sampled answers, and where it is spread a digest of its gradients."""
    model = build(given)
    if group is not None:
        model = parallel.decoder(model, group)
        model.whole_notes = True
    sequences = verify_model.corpus(model, given.sequences, given.longest, given.seed)
    rows = verify_model.packed(model, sequences)
    requests = [sampler.Request(s[:5], most=8, seed=given.seed, stream=i, temperature=0.9) for i, s in enumerate(sequences)]
    drawn = [(a.tokens, a.logp) for a in sampler.Sampler(model, pages=4 * len(requests)).run(requests)]
    if group is None:
        return rows, drawn, None
    tokens = torch.tensor(sum(sequences, []), device=model.device)
    cu = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32).to(model.device)
    weights = torch.randn(len(tokens), generator=torch.Generator("cpu").manual_seed(given.seed), device="cpu").to(model.device)
    (model.score(tokens, cu, temperature=0.8) * weights).sum().backward()
    return rows, drawn, digest(g for _, g in parallel.state(model, gradients=True))


def report(given, degrees):
    """Prints a line for each of (degree, what its ranks found); whether all is as it should be."""
    plain, good, first = found(given), True, None
    layers = sorted({layer for layer, _ in plain[0].order})
    titles = ["embed" if i < 0 else "last" if i == layers[-1] else f"layer {i}" for i in layers]
    print(f"{'degree':>6}" + "".join(f"{t:>16}" for t in titles) + f"{'max |d logp|':>14}{'gradients':>11}{'tokens':>8}")
    for degree, ranks in degrees:
        for rows, drawn, gradients in ranks:
            first = first or gradients
            verdict, apart = verify_model.compare(plain[0], rows)
            last = ["same" if gradients == first else "differ", "same" if drawn == plain[1] else "differ"]
            good &= apart == 0 and not any(verdict.values()) and last == ["same"] * 2
        print(f"{degree:6}" + "".join(f"{verdict[i] or 'same':>16}" for i in layers) + f"{apart:14.2g}{last[0]:>11}{last[1]:>8}", flush=True)
    print("every degree has the same bits" if good else "degrees differ")
    return good


def options(arguments):
    parser = argparse.ArgumentParser(prog="python -m rlk.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-ranks", choices=sorted(rlk.model.CONFIGS))
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8], help="the degrees, where ranks are threads")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--longest", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments=None):
    given = options(arguments)
    if "RANK" not in os.environ:
        return 0 if report(given, ((n, parallel.Threads.run(n, lambda group: found(given, group))) for n in given.threads)) else 1
    import torch.distributed as dist
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    together = [None] * dist.get_world_size()
    dist.all_gather_object(together, found(given, parallel.as_group()))
    good = report(given, [(1, [found(given, parallel.Group(0, 1))]), (len(together), together)]) if dist.get_rank() == 0 else True
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""A training step's forward and backward; on a GPU one CUDA graph for each set of shapes.

    step = rlk.trainer.Step(model, lambda tokens, cu: -model.score(tokens, cu).mean())
    loss = step(tokens, cu_seqlens)      # the gradients of model's parameters are in .grad
    optimizer.step()

A step of a small model is more than a thousand launches, which take a host longer than a GPU takes the kernels. A graph is replayed by one
call, to the same bits. Its memory stays: activations once, gradients for each set of shapes, so bring few (pad a batch by a sequence whose
rows the loss leaves out: it changes no bit of any other row's gradient, and adds zeros to those of weights).
"""

import torch

import rlk
from rlk import _errors


class Step:
    """Calls `loss`, of which the first result is a number with a gradient, and its backward. `graphs`: how many sets of shapes are captured; others
    run as they come, as all do on a CPU, in a trace, and in a model with recurrent layers."""

    def __init__(self, model, loss, graphs=4):
        self.model, self.loss, self.most = model, loss, graphs
        self._captured = {}
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, *tensors):
        """What the loss returned, without its graph. Gradients are those of this call alone."""
        key = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)
        if key not in self._captured and not (self._can_capture(tensors) and len(self._captured) < self.most):
            return self._run(tensors)
        if key not in self._captured:
            self._captured[key] = self._capture(tensors)
        given, graph, gradients, found = self._captured[key]
        for to, t in zip(given, tensors):
            to.copy_(t)
        graph.replay()
        for p, gradient in zip(self._parameters, gradients):
            p.grad = gradient
        return tuple(f.clone() for f in found) if isinstance(found, tuple) else found.clone()

    def _can_capture(self, tensors):
        on_gpu = all(t.is_cuda for t in (*tensors, *self._parameters))
        return on_gpu and not rlk.tracing() and not getattr(getattr(self.model, "config", None), "period", 0)

    def _run(self, tensors):
        for p in self._parameters:
            p.grad = None
        found = self.loss(*tensors)
        first = found[0] if isinstance(found, tuple) else found
        if first.numel() != 1 or not first.requires_grad:
            raise _errors.InvalidArgument(f"trainer: loss returned {list(first.shape)}{'' if first.requires_grad else ' without a gradient'}, "
                                          "a number with a gradient is needed")
        first.backward()
        return tuple(f.detach() for f in found) if isinstance(found, tuple) else found.detach()

    def _capture(self, tensors):
        """What is done once must not be captured, so the step first runs as it comes."""
        given = [t.clone() for t in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(given)
        torch.cuda.current_stream().wait_stream(side)
        for p in self._parameters:
            p.grad = None  # the graph leaves them in memory of its own
        graph = torch.cuda.CUDAGraph()
        # Another thread, as NCCL's, may ask the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = self._run(given)
        return given, graph, [p.grad for p in self._parameters], found

"""Whether torch's C++ functions, looked up by symbol, say what torch's Python functions say. rlk._C asks once, when it first meets
torch, and relies on them only then."""

from rlk import _C


def _tensors(torch):
    """One for every answer."""
    plain, leaf = torch.ones(2, device="cpu"), torch.ones(2, device="cpu", requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(3, device="cpu"))
    imaginary = torch.ones(2, device="cpu", dtype=torch.complex64).conj().imag
    with torch.inference_mode():
        inference = torch.ones(1, device="cpu")
    return (plain, leaf, leaf.detach(), torch.ones(3, 4, device="cpu").t()[1:], leaf * 2, parameter, torch.nn.Parameter(plain, requires_grad=False), torch._neg_view(plain),
            torch._neg_view(leaf), imaginary, inference, torch.ones(4, device="meta"))


def _view(tensor):
    return None if tensor.is_meta else (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _states(torch):
    """One for every answer: contexts, the first of which changes nothing."""
    import contextlib

    @contextlib.contextmanager
    def transform():
        torch._C._functorch._vmap_increment_nesting(2, "error")
        try:
            yield
        finally:
            torch._C._functorch._vmap_decrement_nesting()

    @contextlib.contextmanager
    def autocast_of_cuda():  # torch.autocast would look for a GPU
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before)

    return (contextlib.nullcontext(), torch.no_grad(), torch.enable_grad(), torch.inference_mode(), torch.overrides.BaseTorchFunctionMode(),
            torch.utils._python_dispatch.TorchDispatchMode(), torch.autocast("cpu", dtype=torch.bfloat16),
            autocast_of_cuda(), transform())


def _thread(torch):
    """What torch._C says of this thread, as _C.torch_native_thread does."""
    c = torch._C
    return (c._len_torch_function_stack(),
            c._len_torch_dispatch_stack() != 0 or c._functorch.peek_interpreter_stack() is not None or c._is_tracing(),
            torch.is_grad_enabled(), c._is_any_autocast_enabled())


def prove():
    """True, False, or None where this thread is in a state that its first answer needs to be another."""
    import torch
    if _thread(torch)[:2] != (0, False) or torch.is_inference_mode_enabled():
        return None
    tensors, key, api = _tensors(torch), torch._C._dispatch_key_parse, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if not _C.torch_native_find(api, tensors, tuple(t._cdata for t in tensors), int(key("Tracer")), int(key("FuncTorchDynamicLayerFrontMode"))):
        return False
    if _C.torch_native_object(api, tensors[0]) is not tensors[0]:
        return False
    if any(_C.torch_native_tensor(t) != (t.is_neg(), t.requires_grad, _view(t)) for t in tensors):
        return False
    for state in _states(torch):
        with state:
            if _C.torch_native_thread() != _thread(torch):
                return False
    written, before = tensors[0], tensors[0]._version
    _C.torch_native_written(written)
    return written._version == before + 1 and tensors[1]._version == 0

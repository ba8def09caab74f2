"""One line to try rlk where a model is written: ``rlk.adapters.transformers.patch(model)``, ``rlk.adapters.fla.patch()``."""

NAMES = ("deepspeed", "fla", "liger", "megatron", "rl_kernel", "transformers")


def __getattr__(name):
    import importlib
    if name in NAMES:
        return importlib.import_module(f"rlk.adapters.{name}")
    raise AttributeError(f"module 'rlk.adapters' has no attribute '{name}'")


def __dir__():
    return [*globals(), *NAMES]

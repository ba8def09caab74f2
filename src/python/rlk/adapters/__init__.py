"""One line to try rlk where a model is written: ``rlk.adapters.transformers.patch(model)``."""


def __getattr__(name):
    import importlib
    if name in ("transformers",):
        return importlib.import_module(f"rlk.adapters.{name}")
    raise AttributeError(f"module 'rlk.adapters' has no attribute '{name}'")

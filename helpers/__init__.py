"""The public API. `import helpers` is lazy: torch and transformers are imported once a name that needs them is used."""

import importlib
from importlib.util import find_spec

_HOME = {
    "BeamOutput": "features.beam_search",
    "Engine": "model_engine",
    "EngineConfig": "engine_config",
    "Generation": "loops",
    "Request": "request",
    "RequestOutput": "engine",
    "RoundedKVCache": "features.quantized_kv_cache.rounding",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "features.structured_outputs",
    "Trace": "trace",
    "dequantized": "models",
    "filter_batch": "batching",
    "generate_alone": "loops",
    "generate_continuous": "loops",
    "generate_next_token": "batching",
    "generate_static": "loops",
    "init_batch": "batching",
    "integer_reference": "models",
    "load_model": "models",
    "merge_batches": "batching",
    "tiny_adapter": "tiny_model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        if find_spec(f"{__name__}.{name}") is not None:  # a module, as in `helpers.kv_cache`
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]

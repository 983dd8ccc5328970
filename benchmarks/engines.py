"""One adapter per engine, all with the same five methods: why_unavailable, load, run, versions, close.

    static, padded, ragged, ragged-longest    the course's engine in four configurations
    ragged-int8                               the same with integer products, which are another model's
    transformers                              `model.generate`, in batches that wait for their longest request
    generate_batch                            transformers' own continuous batching
    vllm, llama                               engines in environments and processes of their own

Every engine decodes greedily unless a workload is sampled. Each ignores EOS, shares no prefixes between requests or
runs, and uses all cores.
"""

import dataclasses
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.fast import kernels

from .install import HOME, python_of
from .worker import Worker
from .workloads import TokenRequest

HERE = Path(__file__).resolve().parent


class BenchEngine(Protocol):
    """What the benchmark asks of an engine.

    Attributes:
        name: as on the command line and in reports.
        ours: whether it is the course's engine.
        rounds: whether it rounds weights and inputs to integers, so that its tokens are those of
            `helpers.integer_reference(model)`.
        samples: whether it can draw tokens at random.
    """

    name: str
    ours: bool
    rounds: bool = False
    samples: bool = False

    def why_unavailable(self) -> str | None:
        """Return why the engine cannot run on this machine; None if it can."""

    def load(self, folder: Path, dtype: str, rows: int) -> None:
        """Prepare to run up to `rows` requests at once, in "float32" or "bfloat16". This is not timed."""

    def run(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        """Return the generated token ids of each request, in order. This is what is timed."""

    def versions(self) -> dict[str, str]:
        """Return the versions of its parts, once loaded."""

    def close(self) -> None:
        """Free everything; `load` may be called again."""


class CourseEngine(BenchEngine):
    """The course's engine.

    Args:
        name: as on the command line and in reports.
        settings: fields of `EngineConfig`.
    """

    ours = samples = True

    def __init__(self, name: str, **settings):
        self.name, self.settings, self.engine = name, settings, None
        self.rounds = "compute" in settings

    def why_unavailable(self) -> str | None:
        return None

    def load(self, folder: Path, dtype: str, rows: int) -> None:
        model, tokenizer = load_model(folder, dtype=getattr(torch, dtype))
        # Without prefix caching: a repeated run would find all its prompts in the KV cache.
        config = EngineConfig(max_batch_size=rows, prefix_caching=False, **self.settings)
        self.engine = Engine(model, tokenizer, config)

    def run(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        params = [
            SamplingParams(request.max_tokens, request.temperature, top_p=request.top_p, ignore_eos=True)
            for request in requests
        ]
        outputs = self.engine.generate([request.prompt for request in requests], params)
        return [output.token_ids for output in outputs]

    def versions(self) -> dict[str, str]:
        return {"the course's kernels": kernels.unavailable() or "compiled"}

    def close(self) -> None:
        self.engine = None


class TransformersStatic(BenchEngine):
    """`model.generate` on the first `rows` requests, then on the next: a program without a serving engine."""

    name, ours = "transformers", False

    def why_unavailable(self) -> str | None:
        return None

    def load(self, folder: Path, dtype: str, rows: int) -> None:
        self.model, _ = load_model(folder, dtype=getattr(torch, dtype))
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # and no EOS
        self.rows = rows

    def run(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        outputs = []
        for start in range(0, len(requests), self.rows):
            batch = requests[start : start + self.rows]
            width = max(len(request.prompt) for request in batch)
            pads = [width - len(request.prompt) for request in batch]
            ids = torch.tensor([[0] * pad + request.prompt for pad, request in zip(pads, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            tokens = max(request.max_tokens for request in batch)
            device = self.model.device
            token_ids = self.model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=tokens)
            generated = token_ids[:, width:].tolist()
            outputs += [row[: request.max_tokens] for row, request in zip(generated, batch, strict=True)]
        return outputs

    def versions(self) -> dict[str, str]:
        return {"transformers": importlib.metadata.version("transformers")}

    def close(self) -> None:
        self.model = None


class TransformersContinuous(BenchEngine):
    """transformers' continuous batching, through the manager behind `generate_batch`.

    `generate_batch` itself has one max_new_tokens for all requests; its manager has one for each.
    """

    name, ours = "generate_batch", False

    # Tried on GPT-2 124M in float32 (lesson 3's race, output tokens per CPU second): 69 with pages of 256 tokens, the
    # default, and 61 with pages of 32. With the latter, max_batch_tokens of 128, 512 and 2048, the other scheduler and
    # eager attention came within 5%. Rows capped by max_requests_per_batch gave 42. Asynchronous batching is refused on
    # a CPU. So rows stay uncapped. Without num_blocks it would fill 60% of the memory, which takes most of a minute.
    SETTINGS = MappingProxyType({"num_blocks": 160, "max_batch_tokens": 512, "allow_block_sharing": False})

    def __init__(self, **settings):
        self.settings = {**self.SETTINGS, **settings}

    def why_unavailable(self) -> str | None:
        return None

    def load(self, folder: Path, dtype: str, rows: int) -> None:
        self.model, _ = load_model(folder, dtype=getattr(torch, dtype))
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
        self.config = ContinuousBatchingConfig(**self.settings)

    def run(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        # Persistent: the cache is allocated once instead of in every run.
        with self.model.continuous_batching_context_manager(
            continuous_batching_config=self.config, persistent_manager=True
        ) as manager:
            ids = [manager.add_request(request.prompt, max_new_tokens=request.max_tokens) for request in requests]
            outputs = {}
            while len(outputs) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"generate_batch failed: {result.error}")
                    outputs[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("generate_batch's thread ended before all requests had finished")
        return [outputs[id] for id in ids]

    def versions(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self.model.destroy_cached_continuous_batching_manager()
        self.model = None


class ExternalEngine(BenchEngine):
    """An engine in an environment and a process of its own, which is called over pipes.

    A call takes a few milliseconds, which count as the engine's time.

    Args:
        name: the name of the engine, of its environment and of its worker script.
        preload: a library in its environment that the process must load first.
        samples: whether its worker can draw tokens at random.
        environment: the environment variables of the process.
    """

    ours = False

    def __init__(self, name: str, preload: str = "", samples: bool = False, **environment: str):
        self.name, self.preload, self.samples, self.environment = name, preload, samples, environment
        self.worker, self._versions = None, {}

    def why_unavailable(self) -> str | None:
        if not python_of(self.name).exists():
            return f"not installed: python -m benchmarks.install {self.name}"
        return None

    def load(self, folder: Path, dtype: str, rows: int) -> None:
        python, environment = python_of(self.name), dict(self.environment)
        if self.preload:
            environment["LD_PRELOAD"] = str(python.parent.parent / self.preload)
        command = [python, HERE / f"{self.name}_worker.py"]
        self.worker = Worker(self.name, command, HOME / "logs" / f"{self.name}.log", environment)
        self._versions = self.worker.call("load", folder=str(folder), dtype=dtype, rows=rows)

    def run(self, requests: Sequence[TokenRequest]) -> list[list[int]]:
        return self.worker.call("run", requests=[dataclasses.astuple(request) for request in requests])

    def versions(self) -> dict[str, str]:
        return self._versions

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def vllm_environment() -> dict[str, str]:
    """Return the environment variables with which vLLM uses all cores, 4 GiB of KV cache and no network."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(HOME / "cache" / "vllm"),  # what it compiles stays out of the home folder
        "HF_HUB_OFFLINE": "1",
    }


def all_engines() -> list[BenchEngine]:
    """Return all engines, the reference first: the others must give its tokens, and its speed is 1."""
    logging.set_verbosity_error()  # transformers warns of settings that are intended here
    return [
        TransformersStatic(),
        TransformersContinuous(),
        CourseEngine("static", policy="static", execution="padded"),
        CourseEngine("padded", execution="padded"),
        CourseEngine("ragged", execution="ragged"),
        CourseEngine("ragged-longest", execution="ragged", policy="longest_first"),
        CourseEngine("ragged-int8", execution="ragged", weights="int8", compute="int8"),
        ExternalEngine(
            "vllm",
            # vLLM preloads OpenMP into the processes that it starts. Here it starts none, and would use one core.
            preload="lib/libiomp5.so",
            samples=True,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            **vllm_environment(),
        ),
        ExternalEngine("llama"),
    ]

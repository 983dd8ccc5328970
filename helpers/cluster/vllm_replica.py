"""vLLM as the engine of a replica: its scheduler, its KV cache and its kernels with the methods of `EngineCore`.

vLLM chooses the tokens. Their text, and stop strings in it, are the work of the course's detokenizer. So an output that
moves here from another replica continues in the middle of a word, or of a stop string, and no text is lost or repeated.

Each output is a vLLM request of its own. It continues from its prompt and its tokens so far, which together are vLLM's
prompt. Greedy outputs thus get the same tokens as without a break, except where rounding decides between near ties. Of
some sampling parameters vLLM keeps a state that the tokens do not determine; outputs with these do not continue.

vLLM runs in the replica's own process, on the thread of `Replica`. Killing the process leaves nothing of vLLM behind,
and an iteration that hangs is noticed. vLLM reports which blocks it caches, so the router knows its prefixes.
"""

import os
import platform
import subprocess
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..block_hashes import hash_blocks
from ..detokenizer import IncrementalDetokenizer, make_detokenizer
from ..engine import EngineConfig, ModelInfo, SamplingParams
from ..engine.sequence import GREEDY
from ..engine.validation import RequestValidator
from ..server.output_delta import OutputDelta
from ..trace import Trace

EMBEDDED = Path(__file__).resolve().parents[1] / "tiny_model"
UNSUPPORTED = ("structured_outputs", "prompt_logprobs")  # such requests are refused
NOT_RESUMABLE = ("seed", "presence_penalty", "frequency_penalty", "bad_words")  # these count from the prompt's end
COPIED = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "logprobs", "logit_bias",
)  # fmt: skip
POLICIES = ("fcfs", "priority")
VERSIONS = (  # a program
    "import platform, ray, importlib.util as util;"
    "print(ray.__version__, platform.python_version(), util.find_spec('vllm') is not None)"
)
GIB = 1  # of the KV cache on a CPU, as in the course's engine


def environment(python: str, num_cpus: int) -> dict[str, str]:
    """Return the environment variables of a replica's process. Variables that are set here keep their values.

    Args:
        python: the interpreter that has vLLM.
        num_cpus: on a CPU, the threads that the model computes on.
    """
    folder = Path(python).parent
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no further process for the engine
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all replicas bind their threads to the same cores
        "VLLM_CPU_KVCACHE_SPACE": str(GIB),
        "OMP_NUM_THREADS": str(num_cpus),
    }
    if (openmp := folder.parent / "lib" / "libiomp5.so").exists():
        variables["LD_PRELOAD"] = str(openmp)  # vLLM's CPU build computes on one core without it
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}  # compilers that vLLM calls


def check_python(python: str) -> None:
    """Refuse an interpreter that cannot run a replica of vLLM.

    Raises:
        ValueError: it does not start, lacks vLLM or Ray, or has another version of Ray or Python than this process.
    """
    import ray

    try:
        found = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{python} cannot import Ray: install `ray=={ray.__version__}` for it ({error}).") from error
    if found.endswith(" False\n"):
        raise ValueError(
            f"{python} has no vLLM: install it there, or name another interpreter with --python. docs/deployment.md "
            "says how."
        )
    here = f"{ray.__version__} {platform.python_version()}"
    if not found.startswith(f"{here} "):
        there = " and ".join(found.split()[:2])
        raise ValueError(f"{python} has Ray and Python {there}, and the front end {here}: use the same versions.")


class VLLMBlocks:
    """The blocks of vLLM's KV cache, as far as a report describes them.

    vLLM recognizes blocks by hashes of its own. Its events name the tokens, too, so they can be translated.

    Args:
        num_blocks, block_size: of vLLM's KV cache.
        prefix_caching: whether vLLM caches prefixes.
        scheduler: vLLM's.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool, scheduler: Any):
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._scheduler, self._digests, self._events = scheduler, {}, []

    @property
    def used(self) -> int:
        """The number of blocks that running sequences hold."""
        return round(self._scheduler.get_kv_cache_usage() * self.num_blocks)

    @property
    def cached(self) -> int:
        """The number of cached blocks beyond those that are used; a lower bound."""
        return max(0, len(self._digests) - self.used)

    def publish(self, batch: Any) -> None:
        """Receive a batch of vLLM's events."""
        for event in batch.events:
            if getattr(event, "group_idx", None):
                continue  # layers with another kind of cache; the first group stands for all
            if hasattr(event, "token_ids"):
                self._add(event)
            else:
                for name in getattr(event, "block_hashes", list(self._digests)):  # without: all blocks were cleared
                    if (digest := self._digests.pop(name, None)) is not None:
                        self._events.append((digest, False))

    def _add(self, event: Any) -> None:
        parent = self._digests.get(event.parent_block_hash)
        if event.parent_block_hash is not None and parent is None:
            return
        digests = hash_blocks(event.token_ids, event.block_size, parent or b"")
        for name, digest in zip(event.block_hashes, digests, strict=True):
            self._digests[name] = digest
            self._events.append((digest, True))

    def take_cache_events(self) -> list[tuple[bytes, bool]]:
        """Return the new events: (hash, whether the block was registered or evicted)."""
        events, self._events = self._events, []
        return events


@dataclass(eq=False)
class _Output:
    """An unfinished output, and how much of it was delivered, here or by another replica."""

    request_id: Hashable
    index: int
    name: str
    detokenizer: IncrementalDetokenizer
    num_tokens: int


class VLLMEngine:
    """vLLM with the methods and attributes of `EngineCore` that a `Replica` uses.

    Args:
        llm: a `vllm.LLMEngine` that runs in this process.
        tokenizer: the model's tokenizer.
        config: the settings, of which vLLM has taken those that it has a counterpart for.

    Attributes:
        config: the same with vLLM's rows, tokens per iteration and prefix caching, which its own arguments may set.
        unsupported: the sampling parameters that it refuses.
    """

    unsupported = UNSUPPORTED

    def __init__(self, llm: Any, tokenizer: Any, config: EngineConfig):
        self._llm, self._scheduler = llm, llm.engine_core.engine_core.scheduler
        cache, model = llm.vllm_config.cache_config, llm.vllm_config.model_config
        limits = llm.vllm_config.scheduler_config
        self.tokenizer = tokenizer
        self.config = replace(
            config,
            max_batch_size=limits.max_num_seqs,
            max_tokens_per_step=limits.max_num_batched_tokens,
            prefix_caching=cache.enable_prefix_caching,
        )
        # One of vLLM's blocks is a placeholder.
        self.block_manager = VLLMBlocks(
            cache.num_gpu_blocks - 1, cache.block_size, cache.enable_prefix_caching, self._scheduler
        )
        self._scheduler.kv_event_publisher.publish = self.block_manager.publish
        eos = (model.try_get_generation_config() or {}).get("eos_token_id")
        eos = {tokenizer.eos_token_id} if eos is None else {eos} if isinstance(eos, int) else set(eos)
        info = ModelInfo(model.get_vocab_size(), model.max_model_len, frozenset(eos - {None}))
        self.validator = RequestValidator(tokenizer, self.config, info, None)  # the front end checks the blocks
        self.outputs = SimpleNamespace(output_type=OutputDelta)  # always, so that the setting has no effect
        self.trace, self.steps = Trace(self.config.max_batch_size, config.trace_length), 0  # it stays empty
        self._unfinished: dict[str, _Output] = {}
        self._pending: list[OutputDelta] = []  # the last outputs of aborted requests

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would do anything."""
        return bool(self._unfinished or self._pending)

    @property
    def num_running(self) -> int:
        return self._scheduler.get_request_counts()[0]

    @property
    def num_waiting(self) -> int:
        return self._scheduler.get_request_counts()[1]

    def waiting_labels(self, most: int) -> list[Hashable]:
        """Return no labels: vLLM's queue is its own."""
        return []

    def add_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: Hashable,
        priority: int = 0,
        generated: Mapping[int, Seq[int]] | None = None,
    ) -> None:
        """Add a request, see `EngineCore.add_request`.

        Raises:
            ValueError: vLLM cannot run the request, or it cannot continue an output with these parameters.
        """
        generated = generated or {index: () for index in range(params.n)}
        stateful = [name for name in NOT_RESUMABLE if getattr(params, name) != getattr(GREEDY, name)]
        if stateful and any(generated.values()):
            raise ValueError(f"The replica was lost, and vLLM cannot continue an output with {' or '.join(stateful)}.")
        max_tokens = self.validator.check_counts(len(token_ids), params)
        for index, before in generated.items():
            self._add(request_id, index, params, max_tokens, [*token_ids, *before], before, priority)

    def _add(self, request_id, index, params, max_tokens, prompt, before, priority) -> None:
        detokenizer = make_detokenizer(self.tokenizer, params.stop, params.min_tokens)
        for token_id in before:
            detokenizer.push(token_id)
        output = _Output(request_id, index, f"{request_id}/{index}", detokenizer, len(before))
        priority = priority if self.config.policy == "priority" else 0
        vllm_params = self._vllm_params(params, index, max_tokens, len(before))
        self._llm.add_request(output.name, {"prompt_token_ids": prompt}, vllm_params, priority=priority)
        self._unfinished[output.name] = output

    def _vllm_params(self, params: SamplingParams, index: int, max_tokens: int, num_generated: int) -> Any:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        return vllm.SamplingParams(
            **{name: getattr(params, name) for name in COPIED},
            max_tokens=max_tokens - num_generated,
            min_tokens=max(0, params.min_tokens - num_generated),
            seed=None if params.seed is None else (params.seed + index) % 2**63,  # the outputs must differ
            stop_token_ids=list(params.stop_token_ids),
            allowed_token_ids=params.allowed_token_ids and list(params.allowed_token_ids),
            bad_words=list(params.bad_words),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def abort_request(self, request_id: Hashable) -> bool:
        """Abort a request, and return whether there was one. The next step returns its last outputs."""
        aborted = [output for output in self._unfinished.values() if output.request_id == request_id]
        self._llm.abort_request([output.name for output in aborted])
        self._pending += [self._delta(output, [], None, "abort") for output in aborted]
        return bool(aborted)

    def step(self) -> list[OutputDelta]:
        """Run one iteration of vLLM, and return what is new."""
        self.steps += 1
        deltas, self._pending = self._pending, []
        if self._unfinished:
            for vllm_output in self._llm.step():
                if (output := self._unfinished.get(vllm_output.request_id)) is not None:
                    (new,) = vllm_output.outputs
                    deltas.append(self._delta(output, list(new.token_ids), new.logprobs, new.finish_reason))
                    if new.finish_reason is None and deltas[-1].finish_reason is not None:
                        self._llm.abort_request([output.name])  # a stop string, which vLLM does not look for
        return deltas

    def _delta(self, output: _Output, token_ids: list[int], logprobs: Any, reason: str | None) -> OutputDelta:
        """Make the delta of new tokens. Those after a stop string are dropped."""
        before, number = len(output.detokenizer.text), 0
        for token_id in token_ids:
            number += 1
            if reason != "stop" or number < len(token_ids):  # vLLM stops at end tokens only, which have no text
                output.detokenizer.push(token_id)
            if output.detokenizer.stopped:
                reason = "stop"
                break
        output.num_tokens += number
        if reason is not None:
            output.detokenizer.finish()
            del self._unfinished[output.name]
        if logprobs is not None:
            logprobs = [{id: found.logprob for id, found in row.items()} for row in logprobs[:number]]
        error = "vLLM could not continue this output." if reason == "error" else None
        text = output.detokenizer.text[before:]
        return OutputDelta(
            output.request_id, output.index, text, token_ids[:number], logprobs, output.num_tokens, reason, error
        )  # fmt: skip


def load(model: str | None, dtype: Any, config: EngineConfig, arguments: Mapping[str, Any]) -> VLLMEngine:
    """Load a model with vLLM.

    Args:
        model: a folder in the Hugging Face format or a Hub id; None for the embedded model.
        dtype: the torch dtype of the weights.
        config: rows, tokens per iteration, blocks, prefix caching, and a policy in `POLICIES`.
        arguments: further fields of `vllm.EngineArgs`, which win over these.

    Raises:
        ValueError: vLLM refuses the model or the arguments.
    """
    import vllm
    from transformers import AutoTokenizer
    from vllm.config import KVEventsConfig

    model = str(model or os.environ.get("COURSE_MODEL") or EMBEDDED)
    settings = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": config.max_batch_size,
        "max_num_batched_tokens": config.max_tokens_per_step,
        "num_gpu_blocks_override": config.num_blocks,
        "enable_prefix_caching": config.prefix_caching,
        "scheduling_policy": config.policy,
        "disable_log_stats": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }
    try:
        llm = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**settings | dict(arguments)))
        return VLLMEngine(llm, AutoTokenizer.from_pretrained(model), config)
    except Exception as error:  # of many types; only its text reaches the front end
        raise ValueError(f"vLLM cannot load {model!r}: {type(error).__name__}: {error}") from error

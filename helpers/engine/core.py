"""The core of the engine: requests arrive and leave at any time, and `step()` runs one iteration for all of them.

    schedule    which sequences compute how many tokens    scheduler.py, policies.py, block_manager.py
    run         forward passes, tokens chosen              ../runners/ragged.py or padded.py, sampling.py
    update      tokens appended, outputs ended             scheduler.py, sequence.py
    collect     what is new for each request               outputs.py

An iteration is one such step. It takes one forward pass, or several where a model cannot mix prefill and decode.

Whatever the policy, and whichever requests arrive, leave or are preempted, every greedy request gets the tokens that it
would get alone. `BaseEngine` (`../base_engine.py`) adds `generate` and `stream`, and `helpers.Engine` chooses a runner
for a model.
"""

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral

from ..detokenizer import make_detokenizer
from ..engine_config import EngineConfig
from ..interrupts import deferred
from ..sampling_params import SamplingParams
from ..trace import Trace, record_iteration
from .block_manager import BlockManager
from .hooks import attach_features
from .outputs import OutputCollector, RequestOutput
from .plan import ModelInfo, Plan, Runner
from .scheduler import Scheduler
from .sequence import EngineRequest, Prompt, Sequence
from .validation import RequestValidator, check_needs


class EngineCore:
    """Runs requests, one iteration at a time.

    Ctrl-C during an iteration takes effect at its end (`../interrupts.py`): no request is lost, and no token that it
    has. A second Ctrl-C takes effect at once; the engine cannot be used after it.

    Args:
        runner: computes the planned iterations.
        tokenizer: turns text into token ids and back.
        model_info: the vocabulary, the context length and the EOS tokens of the model.
        config: see `EngineConfig`.
        clock: returns seconds; times in outputs and in the trace are counted from the engine's first request.

    Attributes:
        trace: what every row did in every iteration.
        steps: the number of iterations so far.
        block_manager: allocates the blocks of the KV cache; None if a sequence needs only a row.

    Raises:
        ValueError: a setting is outside its range, or it needs a feature that is missing.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer,
        model_info: ModelInfo,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner, self.tokenizer, self.model_info = runner, tokenizer, model_info
        self.config = config = config or EngineConfig()
        self.block_manager = None
        if runner.num_blocks is not None:
            self.block_manager = BlockManager(runner.num_blocks, runner.block_size, config.prefix_caching)
        self.scheduler = (config.scheduler_cls or Scheduler)(config, self.block_manager)
        self.outputs = OutputCollector()
        self.trace = Trace(config.max_batch_size, config.trace_length)
        self.steps, self._ids = 0, itertools.count()
        self._clock, self._start = clock, None
        self._is_busy, self._abandoned = False, []  # requests whose readers have left during an iteration
        self.validator = RequestValidator(tokenizer, config, model_info, self.block_manager)
        self.validator.features = attach_features(self)
        check_needs(config, self.validator.features)
        self.scheduler.features = tuple(feature for feature in self.validator.features if feature.in_all_requests)

    # --- one iteration ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one iteration.

        Returns:
            An output for every sequence that got a token or finished, unless `generate` or `stream` reads its request.
            If a forward pass fails, the sequences in that pass and in later ones finish with reason "error". All other
            sequences are unaffected.

        Raises:
            Exception: the policy failed. All requests finish with reason "error"; the next step delivers their outputs.
            KeyboardInterrupt: Ctrl-C was pressed. The iteration has ended, and the next step delivers its outputs.
        """
        self.iterate()
        return self.outputs.take_pending()

    def iterate(self) -> None:
        """Run one iteration and queue its outputs."""
        with self.undisturbed():
            self.steps += 1
            plan = None
            try:
                plan = self.scheduler.schedule()
                output = self.runner.run(plan, self.now)
                finished = self.scheduler.update(plan, output)
            except Exception as error:  # of the policy, or of a runner that raises instead of returning its error
                return self._fail(plan, error)
            record_iteration(self.trace, self.steps - 1, plan, output, finished)
            self.outputs.collect(plan, finished)

    def _fail(self, plan: Plan | None, error: Exception) -> None:
        """Finish the sequences of a failed iteration; all of them, and raise the error, if there is no plan."""
        failed = self.scheduler.unfinished if plan is None else plan.sequences
        self._end([sequence for sequence in failed if sequence.finish_reason is None], "error", error)
        if plan is None:
            raise error

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Defer interrupts, and requests whose readers leave: Python may close a dropped stream at any time."""
        with deferred():
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False
                while self._abandoned:
                    self.abandon_request(self._abandoned.pop())

    def _end(self, sequences: Iterable[Sequence], reason: str, error: Exception | None = None) -> None:
        """Finish sequences between two iterations, and queue their last outputs."""
        for sequence in list(sequences):
            self.scheduler.finish(sequence, reason, error)
            self.trace.free([sequence.label])
            self.outputs.put(sequence)

    def now(self) -> float:
        """Return the seconds since the first request arrived."""
        return 0.0 if self._start is None else self._clock() - self._start

    # --- requests arrive and leave ------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: Hashable = None,
        priority: int = 0,
        **options,
    ) -> Hashable:
        """Add a request to the queue.

        Args:
            prompt: text, or token ids.
            params: how to sample; if omitted, greedily and up to the model's context length.
            request_id: an id that is not in use; a number if omitted.
            priority: for the policy "priority"; a smaller number is more urgent.
            options: what features take beyond parameters, such as `generated` (`features/resumption.py`).

        Returns:
            The request's id.

        Raises:
            ValueError: the prompt is empty or has token ids outside the vocabulary, the request is too long, its
                priority is not an integer, its id is in use, or a feature refuses it.
        """
        request_id = self.new_id() if request_id is None else self._check_new(request_id)
        options = {name: value for name, value in options.items() if value is not None}
        token_ids, max_tokens = self.validator.validate(prompt, params := params or SamplingParams())
        if not isinstance(priority, Integral):
            raise ValueError(f"priority must be an integer, not {priority!r}.")
        if self._start is None:
            self._start = self._clock()
        request = EngineRequest(
            request_id, max_tokens, prompt, len(token_ids), params, priority, self.now(), options=options,
            end_token_ids=frozenset() if params.ignore_eos else self.model_info.eos_token_ids,
            features=self.validator.features_for(params, options),
        )  # fmt: skip
        for feature in request.features:
            feature.prepare(request)
        for index in request.indices:
            sequence = Sequence(request_id, list(token_ids), max_tokens, index, request)
            sequence.detokenizer = make_detokenizer(self.tokenizer, params.stop, params.min_tokens)
        for feature in request.features:
            feature.begin(request)
        with self.undisturbed():
            for sequence in request.sequences:
                self.outputs.add(sequence)
                self.scheduler.add(sequence)
            for feature in request.features:
                feature.joined(request)
        return request_id

    def new_id(self) -> int:
        """Return a number that is not in use; outputs that are not delivered yet must not be confused with new ones."""
        return next(id for id in self._ids if id not in self.scheduler.requests and not self.outputs.holds(id))

    def _check_new(self, request_id: Hashable) -> Hashable:
        """Return an id, or raise a ValueError if it is in use."""
        if request_id in self.scheduler.requests or self.outputs.has_subscriber(request_id):
            raise ValueError(
                f"There is an unfinished request {request_id!r}, or one whose stream has not been read to its end: "
                f"give this one another id, or none."
            )
        return request_id

    def abort_request(self, request_id: Hashable) -> bool:
        """Cancel a waiting or running request.

        Its rows and memory are freed at once. Its last outputs, with finish reason "abort", are delivered next.

        Returns:
            Whether an unfinished request has this id.
        """
        with self.undisturbed():
            sequences = list(self.scheduler.requests.get(request_id, ()))
            self._end(sequences, "abort")
            return bool(sequences)

    def abandon_request(self, request_id: Hashable) -> None:
        """Cancel a request whose reader has left, and drop its outputs."""
        if self._is_busy:
            self._abandoned.append(request_id)  # until the iteration has ended
            return
        with deferred():
            self.abort_request(request_id)
            self.outputs.unsubscribe(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have anything to compute or to deliver."""
        return bool(self.scheduler.unfinished or self.outputs.pending)

"""The engine: requests arrive and leave at any time, and `step()` runs one iteration for all of them.

    schedule    which sequences compute how many tokens    scheduler.py, policies.py, block_manager.py
    run         forward passes, tokens sampled             ../runners/ragged.py or padded.py, sampling.py
    update      tokens appended, outputs ended             scheduler.py, detokenizer.py, stop_conditions.py
    collect     what is new for each request               outputs.py

An iteration is one such step. It takes one forward pass, or several where a model cannot mix prefill and decode.

Whatever the policy, and whichever requests arrive, leave or are preempted, every greedy request gets the tokens that it
would get alone. `EngineCore` needs a runner; `helpers.Engine` is an `EngineCore` that chooses one for a model.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral

from ..trace import Trace
from .block_manager import BlockManager
from .config import EngineConfig
from .detokenizer import IncrementalDetokenizer
from .outputs import OutputCollector, RequestOutput
from .proposer import Proposer
from .recording import record
from .recovery import recover
from .resumption import check_indices, resume
from .run_to_end import run_to_end
from .runner import ModelInfo, Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .sequence import Prompt, Sequence
from .speculation import make_speculation
from .validation import RequestValidator


class EngineCore:
    """Runs requests, one iteration at a time.

    Args:
        runner: computes the planned iterations.
        tokenizer: turns text into token ids and back.
        model_info: the vocabulary, the context length and the EOS tokens of the model.
        config: see `EngineConfig`.
        clock: returns seconds; times in outputs and in the trace are counted from the engine's first request.
        proposer: proposes drafts if the config's `speculative` is "draft".

    Attributes:
        trace: what every row did in every iteration.
        steps: the number of iterations so far.
        block_manager: allocates the blocks of the KV cache; None if a sequence needs only a row.

    Raises:
        ValueError: a setting is outside its range.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer,
        model_info: ModelInfo,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        proposer: Proposer | None = None,
    ):
        self.runner, self.tokenizer = runner, tokenizer
        self.config = config = config or EngineConfig()
        self.block_manager = None
        if runner.num_blocks is not None:
            self.block_manager = BlockManager(runner.num_blocks, runner.block_size, config.prefix_caching)
        scheduler_cls = config.scheduler_cls or Scheduler
        self.scheduler = scheduler_cls(config, self.block_manager, model_info.eos_token_ids)
        if config.speculative is not None:
            self.scheduler.speculation = make_speculation(config, runner, model_info, proposer)
        self.validator = RequestValidator(tokenizer, config, model_info, self.block_manager)
        self.outputs = OutputCollector()
        self.trace = Trace(config.max_batch_size, config.trace_length)
        self.steps, self._ids = 0, itertools.count()
        self._clock, self._start = clock, None

    # --- one iteration ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one iteration.

        Returns:
            An output for every sequence that got a token or finished, unless `generate` or `stream` reads its request.
            If a forward pass fails, the sequences in that pass and in later ones finish with reason "error". All other
            sequences are unaffected.

        Raises:
            Exception: the policy failed. All requests finish with reason "error"; the next step delivers their outputs.
            BaseException: the iteration was interrupted, by Ctrl-C for example. No request is lost, and no token that
                it has: the next steps recompute the tokens of all sequences, and deliver all outputs.
        """
        self.iterate()
        return self.outputs.take_pending()

    def iterate(self) -> None:
        """Run one iteration and queue its outputs."""
        self.steps += 1
        plan = None
        try:
            plan = self.scheduler.schedule()
            output = self.runner.run(plan, self.now)
            finished = self.scheduler.update(plan, output)
            record(self.trace, self.steps - 1, plan, output, finished)
            self.outputs.collect(plan, finished)
        except Exception as error:  # of the policy, or of a runner that raises instead of returning its error
            for sequence in self.outputs.unfinished if plan is None else plan.sequences:
                if sequence.finish_reason is None:
                    sequence.end("error", error)
            self.recover()
            if plan is None:
                raise
        except BaseException:  # an interrupt
            self.recover()
            raise

    def recover(self) -> None:
        """Make the parts of the engine consistent after an interrupt (`recovery.py`)."""
        recover(self.scheduler, self.outputs, self.trace, self.tokenizer)

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
        generated: Mapping[int, Seq[int]] | None = None,
    ) -> Hashable:
        """Add a request to the queue.

        Args:
            prompt: text, or token ids.
            params: how to sample; if omitted, greedily and up to the model's context length.
            request_id: an id that is not in use; a number if omitted.
            priority: for the policy "priority"; a smaller number is more urgent.
            generated: for a request that another engine has begun: the tokens so far of each unfinished output, by
                index. Its outputs continue from there (`resumption.py`).

        Returns:
            The request's id.

        Raises:
            ValueError: the prompt is empty or has token ids outside the vocabulary, the request is too long, its
                priority is not an integer, its id is in use, or it cannot have generated these tokens.
        """
        if request_id is None:
            request_id = self.new_id()
        elif request_id in self.scheduler.requests or self.outputs.has_subscriber(request_id):
            raise ValueError(
                f"There is an unfinished request {request_id!r}, or one whose stream has not been read to its end: "
                f"give this one another id, or none."
            )
        return self.add_sequences(prompt, params or SamplingParams(), request_id, priority, generated=generated)

    def new_id(self) -> int:
        """Return a number that is not in use; outputs that are not delivered yet must not be confused with new ones."""
        return next(id for id in self._ids if id not in self.scheduler.requests and not self.outputs.holds(id))

    def add_sequences(
        self, prompt: Prompt, params: SamplingParams, request_id: Hashable, priority=0, beam_width=0, generated=None
    ) -> Hashable:
        """Add the sequences of a request with a new id: its outputs or, with a `beam_width`, its beams.

        The other arguments and the errors are those of `add_request`.
        """
        token_ids, max_tokens = self.validator.validate(prompt, params)
        if not isinstance(priority, Integral):
            raise ValueError(f"priority must be an integer, not {priority!r}.")
        if self._start is None:
            self._start = self._clock()
        token_rules, grammar = self.validator.token_rules.make(params), self.validator.grammar(params)
        arrival, sequences = self.now(), []
        for index in range(beam_width or params.n) if generated is None else check_indices(generated, params.n):
            sequence = Sequence(
                request_id, list(token_ids), max_tokens, index, priority, sequences[0] if sequences else None,
                prompt=prompt,
                params=params,
                is_beam=beam_width > 0,
                detokenizer=IncrementalDetokenizer(self.tokenizer, params.stop, params.min_tokens),
                arrival=arrival,
                token_rules=token_rules,
                grammar=grammar,
            )  # fmt: skip
            if generated is not None:
                resume(sequence, generated[index], self.scheduler, self.validator)
            sequences.append(sequence)
        try:
            self.outputs.add(sequences)
            for sequence in sequences:
                self.scheduler.add(sequence)
            return request_id
        except BaseException:  # an interrupt: without its id, the caller could not cancel the request
            self.outputs.discard(sequences)
            self.recover()
            raise

    def abort_request(self, request_id: Hashable) -> bool:
        """Cancel a waiting or running request.

        Its rows and memory are freed at once. Its last outputs, with finish reason "abort", are delivered next.

        Returns:
            Whether an unfinished request has this id.
        """
        sequences = list(self.scheduler.requests.get(request_id, []))
        try:
            for sequence in sequences:
                self.scheduler.finish(sequence, "abort")
                self.trace.free([sequence.label])
                self.outputs.put(sequence)
        except BaseException:  # an interrupt
            self.recover()
            raise
        return bool(sequences)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have anything to compute or to deliver."""
        return bool(self.scheduler.unfinished or self.outputs.pending)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without a row."""
        return len(self.scheduler.unfinished) - self.num_running

    @property
    def num_running(self) -> int:
        """The number of sequences with a row."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> list[Hashable]:
        """The labels, as in the trace, of the sequences without a row, in order of arrival."""
        return self.waiting_labels()

    @property
    def running(self) -> list[Hashable]:
        """The labels, as in the trace, of the sequences with a row, in the order in which they got it."""
        return [sequence.label for sequence in self.scheduler.running]

    def waiting_labels(self, limit: int | None = None) -> list[Hashable]:
        """Return the labels of the first `limit` sequences without a row, in order of arrival; None for all."""
        running = set(self.scheduler.running)
        waiting = (sequence.label for sequence in self.scheduler.unfinished if sequence not in running)
        return list(itertools.islice(waiting, limit))

    # --- for callers that want complete outputs, or a stream of them ----------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        arrivals: Seq[int] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Run requests until all are finished.

        Args:
            prompts: a text, or a list of texts and lists of token ids.
            params: one for all prompts, or one for each; greedy if omitted.
            arrivals: for each prompt, the iteration of this call before which its request arrives; 0 if omitted.
            progress: show a bar that counts finished outputs.

        Returns:
            The outputs in the order of the prompts, with the `n` outputs of a request next to each other. A failed
            output has finish reason "error" and causes a warning.

        Raises:
            ValueError: a request can never run, or the numbers of prompts, params and arrivals differ. No request has
                then been added.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(prompts)
        arrivals = [0] * len(prompts) if arrivals is None else list(arrivals)
        if not len(prompts) == len(params) == len(arrivals):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(params)} params and {len(arrivals)} arrivals: give one for each."
            )
        for prompt, one in zip(prompts, params, strict=True):
            self.validator.validate(prompt, one)
        outputs = run_to_end(self, prompts, params, arrivals, progress)
        failed = [output for output in outputs if output.error]
        if failed:
            warnings.warn(f"{len(failed)} of {len(outputs)} outputs failed: {failed[0].error}", stacklevel=2)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Run a request and yield an output after each iteration that adds to it, until it is finished.

        The request is added before the first output is read. Closing the iterator cancels it.
        """
        params = params or SamplingParams()
        request_id = self.new_id()

        def outputs() -> Iterator[RequestOutput]:
            unfinished = params.n
            try:
                undelivered = self.outputs.subscribe(request_id)
                self.add_sequences(prompt, params, request_id)
                yield None  # read below: closing a generator runs its `finally` only if it has started
                while unfinished:
                    if undelivered:
                        output = undelivered.popleft()
                        unfinished -= output.finish_reason is not None
                        yield output
                    else:
                        self.iterate()
            finally:
                self.leave(request_id)

        stream = outputs()
        next(stream)
        return stream

    def leave(self, request_id: Hashable) -> None:
        """Cancel a request whose reader has left, and drop its outputs."""
        self.abort_request(request_id)
        self.outputs.unsubscribe(request_id)

"""The engine: requests come and go at any time, and `step()` runs one iteration for all of them.

    schedule    the policy decides who takes part and how many tokens each one reads        scheduler.py
    execute     one forward pass, or a few where the model cannot mix prefill and decode    ragged.py, padded.py
    sample      a new token for everybody who has read all of theirs                        sampling.py
    retire      who is done leaves; everybody who moved gets a `RequestOutput`              outputs.py

The claim: whatever the policy, whoever comes, goes or is preempted meanwhile, every greedy request gets the very
tokens that it would get alone.
"""

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from .admission import Admission, Prompt
from .engine_config import EngineConfig
from .execution import make_execution
from .forward_pass import ForwardPass
from .models import default_pair, eos_token_ids
from .outputs import RequestOutput
from .sampling import Sampler, SamplingParams
from .scheduler import Budget, Plan, make_scheduler
from .sequence import Sequence
from .text_stream import TextStream
from .trace import Slot, Trace


@dataclass(eq=False)
class _Answer(Sequence):
    """A sequence with all that its answer needs: how to sample, what it says so far, when its tokens came."""

    prompt: Prompt = ""
    sampler: Sampler = None
    stream: TextStream = None
    label: Hashable = None  # its name in the trace
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    told: int = 0  # how many of its tokens have been put out
    shown: int = 0  # how many characters

    @property
    def ready(self) -> bool:
        first = self.parent
        return first is None or first.finish_reason is not None or first.computed >= self.prompt_tokens

    def output(self) -> RequestOutput:
        """Everything so far, and what is new since the last output."""
        generated, text = self.token_ids[self.prompt_tokens :], self.stream.text
        output = RequestOutput(
            self.request_id,
            self.prompt,
            text,
            generated,
            self.finish_reason,
            index=self.index,
            new_text=text[self.shown :],
            new_token_ids=generated[self.told :],
            logprobs=None if self.logprobs is None else list(self.logprobs),
            arrival=self.arrival,
            token_times=list(self.token_times),
            error=self.error,
        )
        self.told, self.shown = len(generated), len(text)
        return output


class Engine:
    """Runs requests on a model, one iteration at a time.

    Args:
        model, tokenizer: `load_model()`'s default pair if left out.
        config: see `EngineConfig`.
        clock: seconds; all times in outputs and trace are counted from the engine's first request.

    Attributes:
        trace: what every row did in every iteration.
        steps: how many there were.

    Raises:
        ValueError: a model that cannot be run exactly, or a setting that has no meaning.
    """

    def __init__(
        self,
        model=None,
        tokenizer=None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        model, self.tokenizer = default_pair(model, tokenizer)
        self.config = config = config or EngineConfig()
        if config.dtype is not None and config.dtype != model.dtype:
            model = copy.deepcopy(model).to(config.dtype)  # the caller's model stays as it is
        self.model = model
        self.execution = make_execution(model, self.tokenizer, config)
        self.scheduler = make_scheduler(config.policy, config.mixed_batches, config.chunked_prefill)
        chunked, blocks = getattr(self.scheduler, "chunked", True), getattr(self.execution, "blocks", None)
        self.admission = Admission(model, self.tokenizer, config, chunked, blocks)
        self.budget = Budget(config.max_batch_size, config.max_tokens_per_step, self.execution.memory)
        self.trace = Trace(config.max_batch_size, config.trace_length)
        self.eos = eos_token_ids(model, self.tokenizer)
        self._waiting: list[_Answer] = []  # in the order of arrival
        self._running: list[_Answer] = []  # in the order in which they got their rows
        self._unfinished: dict[Hashable, list[_Answer]] = {}  # by request
        self._untold: list[RequestOutput] = []  # outputs that the next step has to deliver
        self._clock, self._start = clock, None
        self.steps, self._ids = 0, itertools.count()

    # --- requests come and go ---------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: Hashable = None,
        priority: int = 0,
    ) -> Hashable:
        """Put a request into the queue, before any step. What can never run is refused here.

        Args:
            prompt: text, or token ids.
            params: greedy, up to the end of the context, if left out.
            request_id: a name that no unfinished request has; numbered if left out.
            priority: the smaller, the more urgent, for the policy "priority".

        Returns:
            The request's id.

        Raises:
            ValueError: an empty prompt, ids that the model does not know, a request that is too long, a taken id.
        """
        params = params or SamplingParams()
        token_ids, max_tokens = self.admission.check(prompt, params)
        if request_id is None:
            # Also not that of a request whose end is still to be told, or two requests' outputs could be mixed up.
            untold = {output.request_id for output in self._untold}
            request_id = next(id for id in self._ids if id not in self._unfinished and id not in untold)
        elif request_id in self._unfinished:
            raise ValueError(f"There is an unfinished request {request_id!r}: give this one another id, or none.")
        if self._start is None:
            self._start = self._clock()
        now, first = self._now(), None
        for index in range(params.n):
            answer = _Answer(
                request_id, list(token_ids), max_tokens, index, priority, first,
                prompt=prompt,
                sampler=Sampler(params, index),
                stream=TextStream(self.tokenizer, params.stop),
                label=request_id if params.n == 1 else (request_id, index),
                arrival=now,
                logprobs=None if params.logprobs is None else [],
            )  # fmt: skip
            first = first or answer
            self._waiting.append(answer)
            self._unfinished.setdefault(request_id, []).append(answer)
        return request_id

    def abort_request(self, request_id: Hashable) -> bool:
        """Take a request back, wherever it is; its row is free at once. Its last output comes with the next step.

        Returns:
            Whether there was such a request.
        """
        answers = list(self._unfinished.get(request_id, []))
        for answer in answers:
            self._retire(answer, "abort")
            self._untold.append(answer.output())
        return bool(answers)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to do, or to tell, in a step."""
        return bool(self._waiting or self._running or self._untold)

    @property
    def waiting(self) -> list[Hashable]:
        """The names, as in the trace, of the answers without a row, in the order of arrival."""
        return [answer.label for answer in self._waiting]

    @property
    def running(self) -> list[Hashable]:
        """The names, as in the trace, of the answers that hold a row."""
        return [answer.label for answer in self._running]

    # --- one iteration ----------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One iteration: schedule, execute, sample, retire.

        Returns:
            An output for every answer that moved, ended ones included. Whatever goes wrong in a forward pass ends the
            requests that were to take part in it or in a later one, with finish reason "error", and nobody else's.

        Raises:
            Exception: whatever the policy raises. It has planned for nobody then: all requests end with "error", which
                the next step tells.
        """
        outputs, self._untold = self._untold, []
        step, start = self.steps, self._now()
        self.steps += 1
        try:
            plan = self._schedule() if self._waiting or self._running else Plan()
        except Exception as error:
            self._untold = outputs + [self._fail(answer, error) for answer in self._waiting + self._running]
            raise
        taking_part = [chunk.sequence for chunk in plan.chunks]
        served: set[_Answer] = set()
        try:
            for done in self.execution.run(plan.chunks):
                self._take(done, start, step)
                served.update(chunk.sequence for chunk in done.chunks)
                start = self._now()
        except BaseException as error:
            for answer in taking_part:
                if answer.finish_reason is None and answer not in served:
                    self._retire(answer, "error", error)
            if not isinstance(error, Exception):  # somebody interrupts: what they interrupted has ended, too
                self._untold = outputs + [answer.output() for answer in taking_part if answer.finish_reason]
                raise
        return outputs + [one.output() for one in taking_part if one.generated > one.told or one.finish_reason]

    def _schedule(self) -> Plan:
        # Answers to one prompt can share its keys and values: the others wait until the first has read it.
        ready = [answer for answer in self._waiting if answer.ready]
        plan = self.scheduler.schedule(ready, self._running, self.budget)
        for answer in plan.preempted:
            self._running.remove(answer)
            self.trace.free([answer.label])
        joining = [chunk.sequence for chunk in plan.chunks if chunk.sequence not in self._running]
        self._running += joining
        # Whoever was preempted came before those who still wait.
        self._waiting = plan.preempted[::-1] + [answer for answer in self._waiting if answer not in joining]
        for answer in self._waiting:
            answer.waited += 1
        return plan

    def _take(self, done: ForwardPass, start: float, step: int) -> None:
        """After a forward pass: a new token for everybody who has read all of theirs; who is done leaves."""
        complete = [chunk.sequence for chunk in done.chunks if chunk.completes]
        slots = [
            Slot(
                work="decode" if chunk.sequence.decodes else "prefill",
                request_id=chunk.sequence.label,
                tokens=chunk.tokens,
                padding=padding,
                new_tokens=int(chunk.completes),
            )
            for chunk, padding in zip(done.chunks, done.padding, strict=True)
        ]
        for chunk in done.chunks:
            chunk.sequence.computed += chunk.tokens

        best = done.logits.float().argmax(dim=-1).tolist()  # all rows at once; slow on a CPU in bfloat16
        chosen = []
        for answer, token, logits in zip(complete, best, done.logits, strict=True):
            try:
                chosen.append(answer.sampler.choose(answer.token_ids, logits, token))
            except Exception as error:  # one request's settings are no other request's problem
                chosen.append(error)

        now = self._now()
        self.trace.add(slots, start, now - start, step)
        for answer, choice in zip(complete, chosen, strict=True):
            if isinstance(choice, Exception):
                self._retire(answer, "error", choice)
            else:
                self._append(answer, *choice, now)

    def _append(self, answer: _Answer, token: int, logprobs: dict[int, float] | None, now: float) -> None:
        answer.token_ids.append(token)
        answer.token_times.append(now)
        if answer.logprobs is not None:
            answer.logprobs.append(logprobs)
        ends = token in self.eos and not answer.sampler.params.ignore_eos
        if not ends:
            answer.stream.push(token)
        if ends or answer.stream.stopped:
            self._retire(answer, "stop")
        elif answer.generated == answer.max_tokens:
            self._retire(answer, "length")

    def _retire(self, answer: _Answer, reason: str, error: BaseException | None = None) -> None:
        answer.finish_reason = reason
        answer.error = error and f"{type(error).__name__}: {error}"
        answer.stream.finish()
        self._unfinished[answer.request_id].remove(answer)
        if not self._unfinished[answer.request_id]:
            del self._unfinished[answer.request_id]
        if answer in self._waiting:
            self._waiting.remove(answer)
        else:
            self._running.remove(answer)
            self.execution.memory.release(answer)
            self.trace.free([answer.label])

    def _fail(self, answer: _Answer, error: Exception) -> RequestOutput:
        """End an answer when nobody knows how far it came to be scheduled: it may have memory, but no row yet."""
        if answer in self._waiting:
            self.execution.memory.release(answer)
        self._retire(answer, "error", error)
        return answer.output()

    # --- the ways in which most people use it -------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        arrivals: Seq[int] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer some prompts, in any company that the engine has already.

        Args:
            prompts: texts or lists of token ids; or one text.
            params: for all of them, or one for each.
            arrivals: for each, how many steps of this call go by before it arrives; all come at once if left out.
            progress: show a bar that counts finished answers.

        Returns:
            The answers in the order of the prompts, those with `n` answers in a row. One that failed has the finish
            reason "error"; that is also a warning.

        Raises:
            ValueError: a request that can never run; then none of them has been started.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(prompts)
        arrivals = [0] * len(prompts) if arrivals is None else list(arrivals)
        if not len(prompts) == len(params) == len(arrivals):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(params)} params and {len(arrivals)} arrivals: give one for each."
            )
        for prompt, one in zip(prompts, params, strict=True):
            self.admission.check(prompt, one)

        to_come = sorted(range(len(prompts)), key=lambda place: arrivals[place])
        place_of: dict[Hashable, int] = {}
        ended: dict[tuple[int, int], RequestOutput] = {}
        expected = sum(one.n for one in params)
        try:
            with tqdm(total=expected, unit="answer", disable=not progress) as bar:
                for now in itertools.count():
                    while to_come and arrivals[to_come[0]] <= now:
                        place = to_come.pop(0)
                        place_of[self.add_request(prompts[place], params[place])] = place
                    if len(ended) == expected:
                        break
                    for output in self._step_for(place_of):
                        if output.finish_reason is not None:
                            ended[place_of[output.request_id], output.index] = output
                            bar.update()
        except BaseException:
            self._forget(place_of)
            raise
        failed = [output for output in ended.values() if output.error]
        if failed:
            warnings.warn(f"{len(failed)} of {expected} answers failed: {failed[0].error}", stacklevel=2)
        return [ended[place] for place in sorted(ended)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer a prompt piece by piece: an output after each iteration that got it on, the last one finished.

        Whoever stops listening takes the request back.
        """
        params = params or SamplingParams()
        request_id = self.add_request(prompt, params)

        def outputs() -> Iterator[RequestOutput]:
            unfinished = params.n
            try:
                yield None  # taken below: closing a generator that has begun runs its `finally`
                while unfinished and self._knows(request_id):  # else somebody's step() has told the end already
                    output = next((one for one in self._untold if one.request_id == request_id), None)
                    if output is None:
                        self._untold = self.step()
                    else:
                        self._untold.remove(output)
                        unfinished -= output.finish_reason is not None
                        yield output
            finally:
                self._forget({request_id})

        stream = outputs()
        next(stream)
        return stream

    def _step_for(self, request_ids) -> list[RequestOutput]:
        """One iteration and what it did for these requests; what it did for others, the next step tells them."""
        outputs = self.step()
        self._untold += [output for output in outputs if output.request_id not in request_ids]
        return [output for output in outputs if output.request_id in request_ids]

    def _knows(self, request_id: Hashable) -> bool:
        return request_id in self._unfinished or any(one.request_id == request_id for one in self._untold)

    def _forget(self, request_ids) -> None:
        """Nobody waits for these requests any more."""
        for request_id in list(request_ids):
            self.abort_request(request_id)
        self._untold = [output for output in self._untold if output.request_id not in request_ids]

    def _now(self) -> float:
        return 0.0 if self._start is None else self._clock() - self._start

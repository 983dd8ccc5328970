"""For callers that want complete outputs, or a stream of them: `generate` and `stream` drive an engine step by step."""

import itertools
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from .engine import EngineCore, Prompt, RequestOutput, SamplingParams
from .interrupts import deferred


class BaseEngine(EngineCore):
    """An engine core whose requests can be run to their end, or read as streams, beside all others.

    Arguments and attributes are those of `EngineCore`.
    """

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        arrivals: Seq[int] | None = None,
        progress: bool = False,
        **options,
    ) -> list[RequestOutput]:
        """Run requests until all are finished.

        Args:
            prompts: a text, or a list of texts and lists of token ids.
            params: one for all prompts, or one for each; greedy if omitted.
            arrivals: for each prompt, the iteration of this call before which its request arrives; 0 if omitted.
            progress: show a bar that counts finished outputs.
            options: what features take beyond parameters, such as `adapter`: one value for all prompts, or a list with
                one for each.

        Returns:
            The outputs in the order of the prompts, with the `n` outputs of a request next to each other. A failed
            output has finish reason "error" and causes a warning.

        Raises:
            ValueError: a request can never run, or the numbers of prompts, params, arrivals and options differ. No
                request has then been added.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(prompts)
        arrivals = [0] * len(prompts) if arrivals is None else list(arrivals)
        if not len(prompts) == len(params) == len(arrivals):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(params)} params and {len(arrivals)} arrivals: give one for each."
            )
        options = self._options_of_each(len(prompts), options)
        for prompt, its_params in zip(prompts, params, strict=True):
            self.validator.validate(prompt, its_params)
        outputs = self._run_to_end(prompts, params, arrivals, progress, options)
        failed = [output for output in outputs if output.error]
        if failed:
            warnings.warn(f"{len(failed)} of {len(outputs)} outputs failed: {failed[0].error}", stacklevel=2)
        return outputs

    def _options_of_each(self, count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the options of each of this many requests. Raise a ValueError if one can never run with its own."""
        lists = {name: value if isinstance(value, list | tuple) else [value] * count for name, value in options.items()}
        for name, values in lists.items():
            if len(values) != count:
                raise ValueError(f"{count} prompts, but {len(values)} values of {name}: give one for each, or for all.")
        shares = [
            {name: values[index] for name, values in lists.items() if values[index] is not None}
            for index in range(count)
        ]
        for share in shares:
            for feature in self.validator.features_for(SamplingParams(), share):
                feature.check_options(share)
        return shares

    def _run_to_end(self, prompts, params, arrivals, progress, options) -> list[RequestOutput]:
        from tqdm.auto import tqdm  # only here: an engine that steps needs nothing but Python, and runs in a browser

        arriving = deque(sorted(range(len(prompts)), key=arrivals.__getitem__))
        index_of: dict[Hashable, int] = {}
        undelivered: deque[RequestOutput] = deque()
        ended: dict[tuple[int, int], RequestOutput] = {}
        expected = sum(its_params.n for its_params in params)
        try:
            with tqdm(total=expected, unit="output", disable=not progress) as bar:
                for iteration in itertools.count():
                    while arriving and arrivals[arriving[0]] <= iteration:
                        index = arriving.popleft()
                        request_id = self.add_subscribed(undelivered, prompts[index], params[index], **options[index])
                        index_of[request_id] = index
                    if len(ended) == expected:
                        break
                    self.iterate()
                    while undelivered:
                        output = undelivered.popleft()
                        if output.finish_reason is not None:
                            ended[index_of[output.request_id], output.index] = output
                            bar.update()
        finally:
            try:
                self.abandon_all(undelivered)  # cancels unfinished ones, if an exception ends this call
            finally:
                self.abandon_all(undelivered)  # an interrupt may have ended the first call before it could defer it
        return [ended[key] for key in sorted(ended)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options) -> Iterator[RequestOutput]:
        """Run a request and yield an output after each iteration that adds to it, until it is finished.

        The request is added before the first output is read. Closing the iterator cancels it. The options are those of
        `add_request`.
        """
        params, undelivered = params or SamplingParams(), deque()

        def outputs() -> Iterator[RequestOutput]:
            unfinished = params.n
            try:
                self.add_subscribed(undelivered, prompt, params, **options)
                yield None  # read below: closing a generator runs its `finally` only if it has started
                while unfinished:
                    if undelivered:
                        output = undelivered.popleft()
                        unfinished -= output.finish_reason is not None
                        yield output
                    else:
                        self.iterate()
            finally:
                try:
                    self.abandon_all(undelivered)
                finally:
                    self.abandon_all(undelivered)  # as above

        stream = outputs()
        next(stream)
        return stream

    def abandon_all(self, queue: deque) -> None:
        """Cancel the requests whose outputs go to a queue; an interrupt waits until all are cancelled."""
        with deferred():
            for request_id in self.outputs.read_by(queue):
                self.abandon_request(request_id)

    def add_subscribed(self, queue: deque, prompt: Prompt, params: SamplingParams, **options) -> Hashable:
        """Add a request whose outputs go to a queue, and return its id."""
        with deferred():
            request_id = self.add_request(prompt, params, **options)
            self.outputs.subscribe(request_id, queue)
            return request_id

    # --- for those who look on ------------------------------------------------------------------------------------

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
        waiting = (sequence.label for sequence in list(self.scheduler.unfinished) if sequence not in running)
        return list(itertools.islice(waiting, limit))

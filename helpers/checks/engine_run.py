"""The capstone, the grader's side: a run of an engine on a workload, observed where the engine cannot reach.

A run owns the KV cache and the requests, and counts passes, tokens and rows. It lets requests arrive, refuses passes
that are impossible, and notes the first thing that makes a request's tokens wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

from ..engine import BlockManager, EngineConfig, ForwardPass, RunnerOutput, SampledToken, Scheduler, Sequence
from . import engine_faults as faults
from .comparing import kind
from .engine_calls import Row, drive
from .engine_faults import Served
from .engine_models import attended
from .exercise import Wrong

MEASURES = ("forward passes", "prompt tokens", "wasted slot-steps")


@dataclass(frozen=True)
class Workload:
    """Requests as (arrival in forward passes, prompt, max_new_tokens), and the limits of their engine."""

    name: str
    requests: list[tuple[int, list[int], int]]
    rows: int
    budget: int
    num_blocks: int
    block_size: int = 4


class Run:
    """A run of an engine on a workload; `serve` answers its calls, and `error` says what was wrong with them."""

    def __init__(self, workload: Workload, model):
        self.workload, self.model, self.error = workload, model, ""
        self.passes = self.idle = self.repeated = self.free_rows = self._skipped = 0
        self._last = -1  # pass count at the last step
        self.slots: dict[int, tuple[int, int, int, int]] = {}  # key, request, position, token
        self.requests: dict[int, Served] = {}
        for number, (arrival, prompt, most) in enumerate(workload.requests):
            output = model.alone(prompt, most)
            self.requests[number] = Served(number, arrival, prompt, most, output, model.keys_of(prompt + output))
        chunks = sum(
            -(-len(request.text) // workload.budget) + len(request.output) for request in self.requests.values()
        )
        self.max_passes = 100 + 4 * chunks

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.workload.num_blocks, self.workload.block_size, self.model.eos_id

    @property
    def unfinished(self) -> list[Served]:
        return [request for request in self.requests.values() if request.arrived and not request.finished]

    def serve(self, message: tuple):
        """Answer a call of the engine's process, which may send anything."""
        answers = {"arrivals": self._arrivals, "forward": self._forward, "finished": self._finish}
        try:
            if self.error:
                raise Wrong(self.error)
            name, *content = message
            return answers[name](*content)
        except Wrong as wrong:
            self.error = str(wrong)
        except Exception as error:
            self.error = f"sends the model something that it cannot read ({type(error).__name__}): rows are `Row`s"
        return self.error if message and message[0] == "forward" else None

    def _arrivals(self) -> list[tuple] | None:
        if all(request.finished for request in self.requests.values()):
            return None
        if not self.unfinished:  # idle: the clock goes on to the next arrival
            soonest = min(request.arrival for request in self.requests.values() if not request.arrived)
            self._skipped += max(0, soonest - self.passes - self._skipped)
        self.idle = self.idle + 1 if self._last == self.passes and self.unfinished else 0
        self._last = self.passes
        if self.idle > faults.MAX_IDLE:
            raise Wrong(faults.stuck(self))
        now = self.passes + self._skipped
        due = [request for request in self.requests.values() if not request.arrived and request.arrival <= now]
        for request in due:
            request.arrived = True
        return [(request.id, list(request.prompt), request.most) for request in due]

    def _forward(self, rows: list) -> list[int]:
        rows = [self._row(row) for row in rows]
        self._admit(rows)
        if not rows:
            return []
        if self.passes >= self.max_passes:
            left = f"has run {self.passes} passes, and {len(self.unfinished)} requests have not finished"
            raise Wrong(f"{left}. {faults.PREEMPT}")
        tokens = self.model.next_tokens(rows, [self._compute(row) for row in rows])
        for row in rows:
            self._note(row)
        waiting = sum(not request.rows for request in self.unfinished)
        self.free_rows += min(waiting, self.workload.rows - len(self.unfinished) + waiting)
        self.passes += 1
        return tokens

    def _row(self, row: tuple) -> Row:
        request, start, token_ids, table = row
        for number in (request, start, *token_ids):
            if not isinstance(number, Integral) or number < 0:
                raise Wrong(f"calls `forward` with {number!r}: ids, starts and tokens are numbers from 0")
        if len(table) > self.workload.num_blocks:
            raise Wrong(f"has a block table of {len(table)} blocks, and the model has {self.workload.num_blocks}")
        for block in table:
            if not isinstance(block, Integral) or not 0 <= block < self.workload.num_blocks:
                blocks = f"which has the blocks 0 to {self.workload.num_blocks - 1}"
                raise Wrong(f"names block {block!r} of a model {blocks}: there is no more memory")
        return Row(int(request), int(start), [int(token) for token in token_ids], [int(block) for block in table])

    def _admit(self, rows: list[Row]) -> None:
        work, ids = self.workload, [row.request_id for row in rows]
        total = sum(len(row.token_ids) for row in rows)
        if len(rows) > work.rows:
            raise Wrong(f"runs {len(rows)} rows in a pass: the server has memory and time for max_rows, {work.rows}")
        if total > work.budget:
            raise Wrong(
                f"computes {total} tokens in a pass, and max_tokens_per_step is {work.budget}. All tokens of a pass "
                "count, those of prompts and the one of each decode"
            )
        for row in rows:
            request, end = self.requests.get(row.request_id), row.start + len(row.token_ids)
            if request is None or not request.arrived:
                raise Wrong(f"computes a row of request {row.request_id}, which has not arrived")
            if ids.count(row.request_id) > 1:
                raise Wrong(f"has two rows of request {row.request_id} in a pass: a request has one row")
            if not row.token_ids:
                raise Wrong(
                    f"computes no token of request {row.request_id}. Even if all of its text is cached, the last "
                    "token is computed again: only a computed token tells which one follows"
                )
            if end > len(row.block_table) * work.block_size:
                raise Wrong(
                    faults.misplaced(request, row)
                    or f"computes request {row.request_id} up to position {end - 1}, for which a table of "
                    f"{len(row.block_table)} blocks has no slot. A token needs its slot before it is computed"
                )

    def slot(self, row: Row, position: int) -> int:
        size = self.workload.block_size
        return row.block_table[position // size] * size + position % size

    def _compute(self, row: Row) -> int:
        """Write the keys of a row, note what is wrong with them, and return the last one."""
        request, earlier = self.requests[row.request_id], 0
        request.suspect = request.suspect or faults.misplaced(request, row)
        for position in range(row.start):
            key, *written = self.slots.get(self.slot(row, position), (0,))
            earlier += attended(position, key)
            if position < len(request.keys) and key != request.keys[position] and not request.suspect:
                request.suspect = faults.misread(self, request, row, position, written)
        for position, token in enumerate(row.token_ids, row.start):
            key = self.model.key(earlier, position, token)
            self.slots[self.slot(row, position)] = key, request.id, position, token
            earlier += attended(position, key)
        return key

    def _note(self, row: Row) -> None:
        request, end = self.requests[row.request_id], row.start + len(row.token_ids)
        request.rows.append((row.start, len(row.token_ids)))
        self.repeated += len(row.token_ids) == 1 and len(request.prompt) < end < request.known
        if end == request.known and len(request.tokens_at) < len(request.output):
            request.tokens_at.append(self.passes)

    def _finish(self, outputs) -> None:
        if not isinstance(outputs, dict):
            raise Wrong(
                f"should return a dict from `step`, from the ids of the requests that finished to their generated "
                f"tokens, {{}} if none did. It returned {kind(outputs)}"
            )
        for number, output in outputs.items():
            request = self.requests.get(number)
            if request is None or not request.arrived:
                raise Wrong(f"returns an output of {number!r}, which is no request that has arrived")
            if request.finished:
                raise Wrong(f"returns the output of request {number} twice: it leaves with its last token")
            if not isinstance(output, list | tuple) or not all(isinstance(token, Integral) for token in output):
                raise Wrong(f"should return lists of token ids, but the output of request {number} is {kind(output)}")
            if list(output) != request.output or len(request.tokens_at) < len(request.output):
                raise Wrong(faults.wrong_output(self, request, list(output)))
            request.finished = True

    @property
    def measures(self) -> dict[str, int]:
        """What the run costs. A slot-step is one row in one pass; without a new token of an output it is wasted."""
        every = self.requests.values()
        tokens = sum(len(request.tokens_at) for request in every)
        pairs = [pair for request in every for pair in zip(request.tokens_at, request.tokens_at[1:], strict=False)]
        prompts = sum(max(0, min(s + n, len(request.prompt)) - s) for request in every for s, n in request.rows)
        return {
            "forward passes": self.passes,
            "prompt tokens": prompts,
            "wasted slot-steps": self.passes * self.workload.rows - tokens,
            "computed tokens": sum(n for request in every for _, n in request.rows),
            "stalls": sum(b - a - 1 for a, b in pairs),
            "tokens generated again": self.repeated,
            "free rows while requests waited": self.free_rows,
        }


class CourseEngine:
    """The course's scheduler and block manager, with the interface of the capstone and settings of `EngineConfig`."""

    def __init__(self, model, max_rows: int, max_tokens_per_step: int, **settings):
        config = EngineConfig(max_batch_size=max_rows, max_tokens_per_step=max_tokens_per_step, **settings)
        memory = BlockManager(model.num_blocks, model.block_size, config.prefix_caching)
        self.model, self.scheduler = model, Scheduler(config, memory)

    def add_request(self, request_id, prompt, max_new_tokens) -> None:
        ends = frozenset({self.model.eos_id})
        self.scheduler.add(Sequence(request_id, list(prompt), max_new_tokens, end_token_ids=ends))

    def step(self) -> dict[int, list[int]]:
        plan = self.scheduler.schedule()
        tokens = self.model.forward(
            [Row(c.sequence.request_id, c.start, c.token_ids, c.block_table) for c in plan.chunks]
        )
        pairs = zip(plan.chunks, tokens, strict=True)
        sampled = {chunk.sequence: [SampledToken(token)] for chunk, token in pairs if chunk.samples_token}
        forward_pass = ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, 0.0, 1.0)
        ended = self.scheduler.update(plan, RunnerOutput([forward_pass]))
        return {sequence.request_id: sequence.token_ids[sequence.prompt_tokens :] for sequence in ended}


def run_engine(engine_class: Callable, workload: Workload, model) -> Run:
    run = Run(workload, model)
    drive(engine_class, run.serve, run.shape, workload.rows, workload.budget)
    return run

"""The capstone, the grader's side: a run of an engine on a workload, observed where the engine cannot reach.

The model is a stand-in whose every token is a keyed hash of all that its row attends to: one wrong key in a block, one
wrong position, and the tokens are wrong. It takes microseconds, and unlike weights it can say which key was wrong. A
run counts passes, tokens and rows, lets requests arrive, and says in words what went wrong first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Integral

from ..engine import BlockManager, EngineConfig, ForwardPass, RunnerOutput, SampledToken, Scheduler, Sequence
from .comparing import kind
from .engine_calls import Row, drive
from .exercise import Wrong

VOCABULARY, EOS, EOS_SHARE = 90, 17, 16  # every 16th token is EOS
MAX_IDLE = 3  # steps in a row without a forward pass
CHUNK = "A chunk of a prompt yields no token: the prompt goes on after it, and only its last token tells what follows"
ORDER = (
    "`forward` returns a token for each row, in the order of the rows: each belongs to its row's request, and "
    "follows that row's last token"
)
LEAKS = (
    "Are all blocks of requests that finished or were preempted free again, can cached ones be evicted, and is what "
    "was preempted in the queue again"
)
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


class KeyedModel:
    """A stand-in for a language model.

    Args:
        secret: two models with different secrets generate different tokens.
    """

    eos_id = EOS

    def __init__(self, secret: str):
        self._secret = blake2b(secret.encode()).digest()

    def key(self, earlier: int, position: int, token: int) -> int:
        """Return the key of a token; `earlier` is what it attends to, see `attended`."""
        text = f"{earlier} {position} {token}".encode()
        return int.from_bytes(blake2b(text, key=self._secret, digest_size=8).digest())

    def next_tokens(self, rows: list[Row], keys: list[int]) -> list[int]:
        """Return the token after each row, whose last token has this key."""
        return [EOS if key % EOS_SHARE == 0 else (key // EOS_SHARE) % VOCABULARY for key in keys]

    def keys_of(self, text: list[int]) -> list[int]:
        """Return the keys of a text."""
        keys, earlier = [], 0
        for position, token in enumerate(text):
            keys.append(self.key(earlier, position, token))
            earlier += attended(position, keys[-1])
        return keys

    def alone(self, prompt: list[int], most: int) -> list[int]:
        """Return the tokens that a request gets alone."""
        output, keys = [], self.keys_of(prompt)
        earlier = sum(attended(position, key) for position, key in enumerate(keys))
        while len(output) < most and EOS not in output:
            output += self.next_tokens([], keys[-1:])
            keys.append(self.key(earlier, len(keys), output[-1]))
            earlier += attended(len(keys) - 1, keys[-1])
        return output


def attended(position: int, key: int) -> int:
    """Return what a key adds to what later tokens attend to: equal keys at two positions count differently."""
    return key * (2 * position + 1)


@dataclass
class _Request:
    """A request of a run, and what has become of it."""

    id: int
    arrival: int
    prompt: list[int]
    most: int
    output: list[int]
    keys: list[int]
    arrived: bool = False
    finished: bool = False
    computed: int = 0  # the highest position so far
    tokens_at: list[int] = field(default_factory=list)  # the pass of each token
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # (pass, start, tokens)
    came: list[tuple[int, int]] = field(default_factory=list)  # (end, the token that followed) of each row
    table: list[int] = field(default_factory=list)  # of the latest row
    stopped_short: bool = False  # the latest row ended before the text, for no visible reason
    suspect: str = ""  # the first thing that makes its tokens wrong

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def known(self) -> int:
        """The tokens of the text that the engine can know."""
        return len(self.prompt) + len(self.tokens_at)


class Run:
    """A run of an engine on a workload; `serve` answers the engine's calls.

    Attributes:
        error: what is wrong, in words; "" so far.
        measures: what the run costs.
    """

    def __init__(self, workload: Workload, model):
        self.workload, self.model, self.error, self.passes, self.idle, self._skipped = workload, model, "", 0, 0, 0
        self._last = -1  # pass count at the last step
        self.slots: dict[int, tuple[int, int, int, int]] = {}  # key, request, position, token
        self.requests: dict[int, _Request] = {}
        for number, (arrival, prompt, most) in enumerate(workload.requests):
            output = model.alone(prompt, most)
            self.requests[number] = _Request(number, arrival, prompt, most, output, model.keys_of(prompt + output))
        chunks = sum(-(-len(one.text) // workload.budget) + len(one.output) for one in self.requests.values())
        self.max_passes = 100 + 4 * chunks
        self.widest = self.reserved = self.left_free = self.after_end = self.restarts = self.repeated = 0
        self.cut = self.small = 0  # chunks that end inside a prompt, and those that could have been larger
        self.joined_late = True  # requests join only when none runs
        self.victims: list[bool] = []  # for each restart: whether the request was the oldest that ran

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.workload.num_blocks, self.workload.block_size, self.model.eos_id

    @property
    def unfinished(self) -> list[_Request]:
        return [one for one in self.requests.values() if one.arrived and not one.finished]

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
        except Exception as error:  # no engine that uses the model as it is sends such a message
            self.error = f"sends the model something that it cannot read ({type(error).__name__})"
        return self.error if message and message[0] == "forward" else None

    # --- arrivals -----------------------------------------------------------------------------------------------

    def _arrivals(self) -> list[tuple] | None:
        if all(one.finished for one in self.requests.values()):
            return None
        if not self.unfinished:  # idle: the clock goes on to the next arrival
            soonest = min(one.arrival for one in self.requests.values() if not one.arrived)
            self._skipped += max(0, soonest - self.passes - self._skipped)
        self.idle = self.idle + 1 if self._last == self.passes and self.unfinished else 0
        self._last = self.passes
        if self.idle > MAX_IDLE:
            raise Wrong(self._stuck())
        due = [one for one in self.requests.values() if not one.arrived and one.arrival <= self.passes + self._skipped]
        for one in due:
            one.arrived = True
        return [(one.id, list(one.prompt), one.most) for one in due]

    def _stuck(self) -> str:
        one = self.unfinished[0]
        if len(one.tokens_at) >= len(one.output):
            ends = "in its first pass" if len(one.output) == 1 else f"with its token {len(one.output)}"
            return (
                f"never returns the output of request {one.id}, which ends {ends}. Each request needs an output, "
                "in the step in which it ends"
            )
        twins = [other.id for other in self.requests.values() if other.finished and other.prompt == one.prompt]
        if twins and not one.rows:
            return (
                f"never runs request {one.id}, whose prompt is that of request {twins[0]}. Equal prompts are two "
                "requests all the same: know them by their ids"
            )
        what = f"computes nothing in {MAX_IDLE} steps although {len(self.unfinished)} requests wait or run"
        if len(one.prompt) > self.workload.budget and not one.rows and not self.cut:
            return (
                f"{what}. The prompt of request {one.id} has {len(one.prompt)} tokens, and a pass has room for "
                f"{self.workload.budget}: it is computed in chunks, over several passes"
            )
        total = self.workload.num_blocks
        held = {block for other in self.unfinished for block in other.table}
        if len(held) == total > max(len(other.table) for other in self.unfinished):
            return (
                f"{what}: each waits for a block of another. When no block is free, the newest running request is "
                "preempted: it gives its blocks back, and waits"
            )
        return self._without_memory(what)

    def _without_memory(self, what: str) -> str:
        if self.reserved == 1:
            return (
                f"{what}. A block is taken only when a token needs it: where memory is short, one that is taken as "
                "soon as the last one is full keeps another request waiting"
            )
        return f"{what}. {LEAKS}"

    # --- a forward pass -----------------------------------------------------------------------------------------

    def _forward(self, rows: list) -> list[int]:
        rows = [self._row(row) for row in rows]
        self._admit(rows)
        if not rows:
            return []
        if self.passes >= self.max_passes:
            left = f"has run {self.passes} passes, and {len(self.unfinished)} requests have not finished"
            raise Wrong(self._without_memory(left))
        tokens = self.model.next_tokens(rows, [self._compute(row) for row in rows])
        self._note(rows, tokens)
        self.passes += 1
        return tokens

    def _row(self, row) -> Row:
        if not isinstance(row, list | tuple) or len(row) != 4:
            raise Wrong(f"calls `forward` with {kind(row)}: each of its rows is a `Row`")
        request, start, token_ids, table = row
        if not isinstance(token_ids, list | tuple) or not isinstance(table, list | tuple):
            raise Wrong("calls `forward` with a row whose `token_ids` or `block_table` is no list")
        for name, value in [("request_id", request), ("start", start), *(("token", token) for token in token_ids)]:
            if not isinstance(value, Integral) or value < 0:
                raise Wrong(f"calls `forward` with {value!r} as a {name}, which is a number from 0")
        if len(table) > self.workload.num_blocks:
            raise Wrong(f"has a block table of {len(table)} blocks, and the model has {self.workload.num_blocks}")
        for block in table:
            if not isinstance(block, Integral) or not 0 <= block < self.workload.num_blocks:
                blocks = f"which has the blocks 0 to {self.workload.num_blocks - 1}"
                raise Wrong(f"names block {block!r} of a model {blocks}: there is no more memory")
        return Row(int(request), int(start), [int(token) for token in token_ids], [int(block) for block in table])

    def _admit(self, rows: list[Row]) -> None:
        """Refuse a pass that is impossible."""
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
            one, end = self.requests.get(row.request_id), row.start + len(row.token_ids)
            if one is None or not one.arrived:
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
                    self._too_far(one, row)
                    or f"computes request {row.request_id} up to position {end - 1}, for which a table of "
                    f"{len(row.block_table)} blocks has no slot. A token needs its slot before it is computed"
                )

    def _slot(self, row: Row, position: int) -> int:
        size = self.workload.block_size
        return row.block_table[position // size] * size + position % size

    def _compute(self, row: Row) -> int:
        """Write the keys of a row, note what is wrong with them, and return the last one."""
        one, earlier = self.requests[row.request_id], 0
        one.suspect = one.suspect or self._too_far(one, row)
        for position in range(row.start):
            key, *written = self.slots.get(self._slot(row, position), (0,))
            earlier += attended(position, key)
            if position < len(one.keys) and key != one.keys[position] and not one.suspect:
                one.suspect = self._misread(one, row, position, written)
        for position, token in enumerate(row.token_ids, row.start):
            if position < len(one.text) and token != one.text[position] and not one.suspect:
                one.suspect = self._misplaced(one, row, position, token)
            key = self.model.key(earlier, position, token)
            self.slots[self._slot(row, position)] = key, one.id, position, token
            earlier += attended(position, key)
        return key

    def _too_far(self, one: _Request, row: Row) -> str:
        """Say that a row computes positions that its request does not have yet; "" if it does not."""
        last = row.start + len(row.token_ids) - 1
        if last < one.known or len(one.tokens_at) == len(one.output):
            return ""
        return (
            f"computes position {last} of request {one.id}, which has {one.known} tokens so far. `start` is the place "
            "of the row's first token in the request's own text, counted from 0: the newest token comes last in it"
        )

    def _misread(self, one: _Request, row: Row, position: int, written: list) -> str:
        what = f"reads a wrong key for position {position} of request {one.id}:"
        if not written:
            if position >= one.computed:
                return (
                    f"{what} its token has not been computed yet, by any request. Only computed tokens have keys, "
                    "and the newest token has none before its own pass"
                )
            return f"{what} the block table has changed, and the keys are in the blocks that it had before"
        owner, place, _ = written
        size = self.workload.block_size
        first = position - position % size
        inside = [self.slots.get(self._slot(row, place), (0,))[-1] for place in range(first, first + size)]
        if owner != one.id and inside == one.text[first : first + size]:
            return (
                f"{what} the token is the same, but it was computed after another text, that of request {owner}. A "
                "token's key depends on everything before it, so a block is known by all tokens up to its end"
            )
        if owner != one.id:
            return (
                f"{what} request {owner} has written to that block. A block belongs to one request from when it is "
                "taken until it is given back, and to several only if they share a full block; without its blocks, a "
                "request has to be computed again"
            )
        return (
            f"{what} there is the key of its position {place}. Position p is in block p // block_size of the table, "
            "and each token is written once"
        )

    def _misplaced(self, one: _Request, row: Row, position: int, token: int) -> str:
        what = f"computes token {token} at position {position} of request {one.id}, whose text has"
        others = [i for i in range(len(one.text)) if one.text[i : i + len(row.token_ids)] == row.token_ids]
        if position < len(one.prompt):
            if others and others[0] != row.start:
                return (
                    f"{what} it at position {others[0] + position - row.start}. `start` is the place of the row's "
                    "first token in the request's own text, counted from 0"
                )
            return f"{what} {one.text[position]} there, in its prompt. {CHUNK}"
        if position < one.known:
            if others:
                return (
                    f"{what} it at position {others[-1] + position - row.start}. A token's position is its place in "
                    "the request's own text, and the first token of the output follows the prompt"
                )
            return f"{what} {one.text[position]} there. {ORDER}"
        return f"{what} no token there yet: it is computed before the model has chosen it"

    def _note(self, rows: list[Row], tokens: list[int]) -> None:
        """Count what a pass costs, and what it yields."""
        running = {one.id for one in self.unfinished if one.rows and one.computed}
        in_pass = {row.request_id for row in rows}
        waiting = [one for one in self.unfinished if one.id not in in_pass and not one.tokens_at]
        self.widest = max(self.widest, len(rows))
        self.left_free += min(len(waiting), self.workload.rows - len(rows))
        has_room = sum(len(row.token_ids) for row in rows) < self.workload.budget
        for row, token in zip(rows, tokens, strict=True):
            one, end = self.requests[row.request_id], row.start + len(row.token_ids)
            one.came.append((end, token))
            one.table = row.block_table
            if not one.rows and running - {row.request_id}:
                self.joined_late = False
            if one.rows and row.start < one.rows[-1][1] + one.rows[-1][2]:
                self.restarts += 1
                older = [other for other in self.unfinished if other.rows and other.rows[0] < one.rows[0]]
                self.victims.append(not older)
            due = one.known
            short = has_room and end < due and end % self.workload.block_size > 0
            self.repeated += one.stopped_short and len(row.token_ids) == 1
            one.stopped_short = short and end >= len(one.prompt)
            self.small += short and end < len(one.prompt)
            self.cut += end < len(one.prompt)
            self.reserved = max(self.reserved, len(row.block_table) - -(-end // self.workload.block_size))
            self.after_end += max(0, end - max(row.start, len(one.text) - 1))
            if end == due and len(one.tokens_at) < len(one.output):
                one.tokens_at.append(self.passes)
            one.rows.append((self.passes, row.start, len(row.token_ids)))
            one.computed = max(one.computed, end)

    # --- outputs ------------------------------------------------------------------------------------------------

    def _finish(self, outputs) -> None:
        if not isinstance(outputs, dict):
            raise Wrong(
                f"should return a dict from `step`, from the ids of the requests that finished to their generated "
                f"tokens, {{}} if none did. It returned {kind(outputs)}"
            )
        for number, output in outputs.items():
            one = self.requests.get(number)
            if one is None or not one.arrived:
                raise Wrong(f"returns an output of {number!r}, which is no request that has arrived")
            if one.finished:
                raise Wrong(f"returns the output of request {number} twice: it leaves with its last token")
            if not isinstance(output, list | tuple) or not all(isinstance(token, Integral) for token in output):
                raise Wrong(f"should return lists of token ids, but the output of request {number} is {kind(output)}")
            if list(output) != one.output or len(one.tokens_at) < len(one.output):
                raise Wrong(self._explain(one, list(output)))
            one.finished = True

    def _explain(self, one: _Request, got: list[int]) -> str:
        """Return what is wrong with an output."""
        right = one.output
        many = f"{len(got)} token{'s' * (len(got) != 1)}"
        what = f"returns {many} for request {one.id}, which gets {len(right)} alone:"
        if got == right:
            return f"{what} the model has given {len(one.tokens_at)} of them so far"
        if got == one.text:
            return f"{what} an output does not contain the prompt"
        if got[: len(right)] == right and right[-1] == self.model.eos_id:
            return f"{what} it goes on after EOS, with which an output ends even if more tokens were allowed"
        if got[: len(right)] == right:
            return f"{what} max_new_tokens is {one.most}, and the pass over the prompt yields the first of them"
        if right[:-1] == got and len(one.tokens_at) == len(right) and right[-1] == self.model.eos_id:
            return f"{what} EOS is missing. EOS is not text, but the model generated it"
        if right[: len(got)] == got:
            if len(got) == one.most - 1:
                return f"{what} max_new_tokens counts generated tokens, the first one of the prompt's pass included"
            return (
                f"{what} it ends before EOS and before max_new_tokens, {one.most}. Each request ends by itself, with "
                "its own EOS, whatever its prompt holds and whenever others end"
            )
        place = next((n for n, pair in enumerate(zip(got, right, strict=False)) if pair[0] != pair[1]), 0)
        what = f"{what} they differ from token {place} on"
        if place == 0 and any(end < len(one.prompt) and [token] == got[:1] for end, token in one.came):
            return f"{what}. {CHUNK}"
        at = one.tokens_at[place] if place < len(one.tokens_at) else -1
        given = [
            other.came[n][1] for other in self.requests.values() for n, row in enumerate(other.rows) if row[0] == at
        ]
        if not one.suspect and got[place : place + 1] and got[place] in given:
            return f"{what}. {ORDER}"
        if one.suspect:
            return one.suspect
        if others := [other.id for other in self.requests.values() if other.output == got and other.arrived]:
            return f"{what}: these are the tokens of request {others[0]}. Know outputs by their request's id"
        if any(start < end for (_, start, _), end in zip(one.rows[1:], (s + n for _, s, n in one.rows), strict=False)):
            return (
                f"{what}, after a preemption. The tokens generated before it are part of the request's text: they are "
                "computed again, and not generated again"
            )
        return f"{what}, although its rows were computed right. {ORDER}"

    @property
    def measures(self) -> dict[str, int]:
        """What the run costs. A slot-step is one row in one pass; without a new token of an output it is wasted."""
        every = self.requests.values()
        tokens = sum(len(one.tokens_at) for one in every)
        pairs = [pair for one in every for pair in zip(one.tokens_at, one.tokens_at[1:], strict=False)]
        prompts = sum(max(0, min(s + n, len(one.prompt)) - s) for one in every for _, s, n in one.rows)
        return {
            "forward passes": self.passes,
            "prompt tokens": prompts,
            "wasted slot-steps": self.passes * self.workload.rows - tokens,
            "computed tokens": sum(n for one in every for _, _, n in one.rows),
            "stalls": sum(b - a - 1 for a, b in pairs),
            "tokens generated again": self.repeated,
        }

    def first_stall(self) -> tuple[int, int]:
        """Return the request that first got no token in a pass after its first token, and the pass."""
        every = (
            (at + 1, one.id)
            for one in self.requests.values()
            for at in one.tokens_at[:-1]
            if at + 1 not in one.tokens_at
        )
        at, number = min(every)
        return number, at


# --- the course's own engine -----------------------------------------------------------------------------------------


class CourseEngine:
    """The course's scheduler and block manager, with the interface of the capstone.

    Args:
        settings: of `EngineConfig`.
    """

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
        done = ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, 0.0, 1.0)
        ended = self.scheduler.update(plan, RunnerOutput([done]))
        return {one.request_id: one.token_ids[one.prompt_tokens :] for one in ended}


def run_engine(engine_class: Callable, workload: Workload, model) -> Run:
    """Return the run of an engine in this process."""
    run = Run(workload, model)
    drive(engine_class, run.serve, run.shape, workload.rows, workload.budget)
    return run

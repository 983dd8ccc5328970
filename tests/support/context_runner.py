"""An engine without a model whose tokens show a wrong block or a stale row.

The runner writes token ids into the slots of the blocks, or into rows, and reads a sequence's context back from there.
"""

from collections import Counter

from conftest import letter_tokenizer

from helpers import EngineConfig, SamplingParams
from helpers.base_engine import BaseEngine
from helpers.engine import Chunk, EngineCore, ForwardPass, ModelInfo, Plan, RunnerOutput, SampledToken
from helpers.trace import num_matching

TOKENIZER = letter_tokenizer()
INFO = ModelInfo(vocab_size=10, context_length=100, eos_token_ids=frozenset([0]))


def next_token(context: list[int], index: int) -> int:
    """Return the token that follows a context, which every token and the order of the tokens decide."""
    return sum((position + 2) * token for position, token in enumerate(context, start=index)) * 7 % 11 % 10


def tokens_alone(prompt: list[int], max_tokens: int, index: int) -> list[int]:
    """Return the tokens that an output has without any other requests."""
    tokens = []
    while len(tokens) < max_tokens and 0 not in tokens:
        tokens.append(next_token(prompt + tokens, index))
    return tokens


class ContextRunner:
    """A `Runner` that chooses tokens by the context that it finds in the blocks, or in rows without blocks."""

    name, not_ragged_because = "context", None

    def __init__(self, num_blocks: int | None, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots: dict[int, int] = {}  # the token id in each slot
        self.rows: dict = {}  # the token ids of each sequence, without blocks

    def run(self, plan: Plan, clock) -> RunnerOutput:
        for sequence in plan.released:
            self.rows.pop(sequence, None)
        for source, destination in plan.block_copies:
            for offset in range(self.block_size):
                if source * self.block_size + offset in self.slots:
                    slot = self.slots[source * self.block_size + offset]
                    self.slots[destination * self.block_size + offset] = slot
        for chunk in plan.chunks:
            self.write(chunk)
        sampled = {chunk.sequence: self.sample(chunk) for chunk in plan.chunks if chunk.samples_token}
        return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, clock(), 0.0)])

    def sample(self, chunk: Chunk) -> list[SampledToken]:
        context, drafted, index = self.context(chunk), len(chunk.draft_token_ids), chunk.sequence.index
        ends = range(len(context) - drafted, len(context) + 1)
        tokens = [next_token(context[:end], index) for end in ends]
        return [SampledToken(token) for token in tokens[: num_matching(tokens, chunk.draft_token_ids) + 1]]

    def write(self, chunk: Chunk) -> None:
        if self.num_blocks is None:
            row = self.rows.setdefault(chunk.sequence, [])
            assert len(row) == chunk.start, "the row of a sequence that was released is still there"
            row += chunk.token_ids
        else:
            for position, token in enumerate(chunk.token_ids, start=chunk.start):
                self.slots[self.slot(chunk, position)] = token

    def context(self, chunk: Chunk) -> list[int]:
        if self.num_blocks is None:
            return self.rows[chunk.sequence]
        return [self.slots[self.slot(chunk, position)] for position in range(chunk.start + chunk.tokens)]

    def slot(self, chunk: Chunk, position: int) -> int:
        return chunk.block_table[position // self.block_size] * self.block_size + position % self.block_size


class Caller:
    """Adds, cancels and steps, and keeps what it is given. A call that is interrupted is made again."""

    def __init__(self, num_blocks: int | None = None, block_size: int = 2, **config):
        self.engine = BaseEngine(
            ContextRunner(num_blocks, block_size),
            TOKENIZER,
            INFO,
            EngineConfig(**{"max_batch_size": 3, "max_tokens_per_step": 12} | config),
        )
        self.requests: dict = {}  # prompt, max_tokens and n by id
        self.outputs: dict = {}  # the outputs by id and index
        self.aborted: set = set()

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        self.requests[name] = prompt, max_tokens, n
        if name not in self.engine.scheduler.requests:
            params = SamplingParams(max_tokens, n=n, temperature=float(n > 1), stop=("dcb",))
            self.engine.add_request(prompt, params, name)

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.engine.abort_request(name)

    def step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            self.outputs.setdefault((output.request_id, output.index), []).append(output)

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("a request was lost, and its caller waits for it")


def check_state(engine: EngineCore) -> None:
    """Check that queues, rows and blocks agree with one another."""
    scheduler, queue, blocks = engine.scheduler, engine.scheduler.waiting, engine.block_manager
    waiting, held = list(queue), [sequence for sequence in scheduler.held if sequence not in scheduler.running]
    queued = Counter([*waiting, *scheduler.running, *held])
    assert queued == Counter(list(scheduler.unfinished)), "a sequence is in no queue, or in two"
    assert [sequence for group in scheduler.requests.values() for sequence in group] == list(scheduler.unfinished)
    assert not any(sequence.finish_reason for sequence in scheduler.unfinished)
    assert set(queue._added_at) == set(scheduler.unfinished)
    assert waiting == sorted(waiting, key=lambda sequence: sequence.number)
    for attribute, groups in queue._groups.items():
        assert sorted(groups) == queue._values[attribute]
        assert Counter(sequence for group in groups.values() for sequence in group) == Counter(waiting)
    assert all(sequence.computed == 0 for sequence in [*waiting, *held])
    for sequence in scheduler.unfinished:
        assert len(sequence.token_times) == sequence.generated
    if blocks is not None:
        assert set(blocks.tables) == set(scheduler.running)
        assert Counter(block for table in blocks.tables.values() for block in table) == Counter(
            {block: count for block, count in enumerate(blocks.references) if count}
        )
        used = [block for block, count in enumerate(blocks.references) if count]
        all_blocks = sorted([*blocks._free, *used, *blocks._cached])
        assert all_blocks == list(range(blocks.num_blocks)), "a block is lost, or twice"
        assert not blocks.copies
        assert {block: digest for digest, block in blocks._block_of.items()} == blocks._hash_of
        assert set(blocks._cached) <= set(blocks._hash_of)


def check_outputs(caller: Caller) -> None:
    """Check that every output was delivered once, with the tokens that it has alone."""
    expected = {(name, index) for name, (_, _, n) in caller.requests.items() for index in range(n)}
    assert set(caller.outputs) == expected, "an output is missing"
    for (name, index), outputs in caller.outputs.items():
        prompt, max_tokens, _ = caller.requests[name]
        alone = tokens_alone(prompt, max_tokens, index)
        letters = "".join(" abcdefghi"[token] for token in alone if token)
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert tokens == outputs[-1].token_ids and len(outputs[-1].token_times) == len(tokens), "lost or repeated"
        text = "".join(output.new_text for output in outputs)
        assert text == outputs[-1].text
        if outputs[-1].finish_reason == "abort":
            assert name in caller.aborted and tokens == alone[: len(tokens)] and letters.startswith(text)
        elif "dcb" in letters:
            assert outputs[-1].finish_reason == "stop" and text == letters.partition("dcb")[0]
            assert tokens == alone[: len(tokens)]
        else:
            assert outputs[-1].finish_reason == ("stop" if 0 in alone else "length")
            assert tokens == alone and text == letters


def check_nothing_is_left(engine: EngineCore) -> None:
    scheduler, trace, runner = engine.scheduler, engine.trace, engine.runner
    assert not scheduler.unfinished and not scheduler.requests and not scheduler.running and not scheduler.waiting
    assert not scheduler.waiting._added_at and not scheduler.held and not engine.outputs._subscribers
    assert not engine.outputs._emitted and not engine.outputs.pending
    assert engine.block_manager is None or engine.block_manager.used == 0
    assert set(trace._holders) <= {None, *trace._done}, "a row of the trace has a request that has left"
    if engine.block_manager is None:  # in rows, which this runner and the padded one keep under other names
        kept = [*getattr(runner, "rows", ()), *getattr(runner, "_prefilling", ())]
        kept += (getattr(runner, "_decoding", None) or {"sequences": []})["sequences"]
        assert set(kept) <= set(scheduler._released), "the runner keeps a row that it was not told to drop"

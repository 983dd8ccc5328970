"""An interrupt (Ctrl-C, an asynchronous exception) may come between any two lines: the engine loses nothing.

Each scenario is a list of calls of an engine. One of these calls is interrupted at a line of `helpers/engine/` or of
the runner, once for every line that it executes. The interrupted call is made again, and the scenario goes on to its
end. Every block must then be free or owned as counted, and every output must hold exactly the tokens that it has alone.

The runner has no model. It writes token ids into the slots of the blocks, or into rows, and reads a sequence's context
back from there, so a wrong block or a stale row gives a wrong token.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROMPTS, letter_tokenizer, random_pair

import helpers.engine
import helpers.runners
from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import Chunk, EngineCore, ForwardPass, ModelInfo, Plan, RunnerOutput, SampledToken, accept_drafts

ENGINE, RUNNERS = str(Path(helpers.engine.__file__).parent), str(Path(helpers.runners.__file__).parent)
TOKENIZER = letter_tokenizer()
INFO = ModelInfo(vocab_size=10, context_length=100, eos_token_ids=frozenset([0]))


def next_token(context: list[int], index: int) -> int:
    """Return the token that follows a context, which every token and the order of the tokens decide."""
    return sum((place + 2) * token for place, token in enumerate(context, start=index)) * 7 % 11 % 10


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
            for place in range(self.block_size):
                if source * self.block_size + place in self.slots:
                    slot = self.slots[source * self.block_size + place]
                    self.slots[destination * self.block_size + place] = slot
        for chunk in plan.chunks:
            self.write(chunk)
        sampled = {chunk.sequence: self.sample(chunk) for chunk in plan.chunks if chunk.samples_token}
        return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, clock(), 0.0)])

    def sample(self, chunk: Chunk) -> list[SampledToken]:
        context, drafted, index = self.context(chunk), len(chunk.draft_token_ids), chunk.sequence.index
        ends = range(len(context) - drafted, len(context) + 1)
        return accept_drafts(
            chunk.draft_token_ids, lambda accepted: SampledToken(next_token(context[: ends[accepted]], index))
        )

    def write(self, chunk: Chunk) -> None:
        if self.num_blocks is None:
            row = self.rows.setdefault(chunk.sequence, [])
            assert len(row) == chunk.start, "the row of a sequence that was released is still there"
            row += chunk.token_ids
        else:
            for place, token in enumerate(chunk.token_ids, start=chunk.start):
                self.slots[self.slot(chunk, place)] = token

    def context(self, chunk: Chunk) -> list[int]:
        if self.num_blocks is None:
            return self.rows[chunk.sequence]
        return [self.slots[self.slot(chunk, place)] for place in range(chunk.start + chunk.tokens)]

    def slot(self, chunk: Chunk, place: int) -> int:
        return chunk.block_table[place // self.block_size] * self.block_size + place % self.block_size


class Caller:
    """Adds, cancels and steps, and keeps what it is given. A call that is interrupted is made again."""

    def __init__(self, num_blocks: int | None = None, block_size: int = 2, **config):
        self.engine = EngineCore(
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
    waiting, siblings = list(queue), [one for group in scheduler._siblings.values() for one in group]
    places = Counter([*waiting, *scheduler.running, *siblings, *scheduler._paused])
    assert places == Counter(list(scheduler.unfinished)), "a sequence is in no queue, or in two"
    assert [one for group in scheduler.requests.values() for one in group] == list(scheduler.unfinished)
    assert not any(sequence.finish_reason for sequence in scheduler.unfinished)
    assert set(queue._added_at) == set(scheduler.unfinished)
    assert waiting == sorted(waiting, key=lambda sequence: sequence.number)
    for attribute, groups in queue._groups.items():
        assert sorted(groups) == queue._values[attribute]
        assert Counter(one for group in groups.values() for one in group) == Counter(waiting)
    assert all(sequence.computed == 0 for sequence in [*waiting, *siblings, *scheduler._paused])
    for sequence in scheduler.unfinished:
        assert len(sequence.token_times) == sequence.generated
    if blocks is not None:
        assert set(blocks.tables) == set(scheduler.running)
        assert Counter(block for table in blocks.tables.values() for block in table) == Counter(
            {block: count for block, count in enumerate(blocks.references) if count}
        )
        gaps = blocks._free._end_of.items()
        free = [block for start, end in gaps for block in range(start, end)]
        used = [block for block, count in enumerate(blocks.references) if count]
        assert sorted([*free, *used, *blocks._cached]) == list(range(blocks.num_blocks)), "a block is lost, or twice"
        assert len(blocks._free) == len(free) and not blocks.copies
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
        assert [one.finish_reason is not None for one in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = [token for one in outputs for token in one.new_token_ids]
        assert tokens == outputs[-1].token_ids and len(outputs[-1].token_times) == len(tokens), "lost or repeated"
        text = "".join(one.new_text for one in outputs)
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
    assert not scheduler.waiting._added_at and not scheduler._siblings and not scheduler._paused
    assert not engine.outputs._emitted and not engine.outputs.pending
    assert engine.block_manager is None or engine.block_manager.used == 0
    assert set(trace._holders) <= {None, *trace._done}, "a row of the trace has a request that has left"
    assert set(runner.rows) <= set(scheduler._released), "the runner keeps a row that it was not told to drop"


def admission():
    caller = Caller(policy="longest_first")
    return caller, [
        lambda: caller.add("a", [1, 2, 3], 4),
        lambda: caller.add("b", [4], 2),
        lambda: caller.add("c", [5, 6], 6),
        lambda: caller.add("d", [7, 8, 9], 3),
        caller.step,
        caller.step,
        lambda: caller.add("e", [9, 1], 5),
        caller.step,
    ]


def chunked_prefill():
    caller = Caller(max_batch_size=2, max_tokens_per_step=3, mixed_batches=False, policy="priority")
    return caller, [
        lambda: caller.add("a", [1, 2, 3, 4, 5], 4),
        caller.step,
        lambda: caller.add("b", [6, 7, 8, 9], 3),
        caller.step,
        caller.step,
        caller.step,
    ]


def preemption():
    caller = Caller(num_blocks=7, prefix_caching=False)
    return caller, [
        lambda: caller.add("a", [1, 2, 3], 9),
        lambda: caller.add("b", [4, 5, 7], 9),
        lambda: caller.add("c", [7, 8], 4),
        caller.step,
        caller.step,
        caller.step,
        caller.step,
        caller.step,
    ]


def prefix_sharing():
    caller, prefix = Caller(num_blocks=10), [1, 2, 3, 4, 5]
    return caller, [
        lambda: caller.add("a", [*prefix, 6], 5),
        caller.step,
        lambda: caller.add("b", [*prefix, 7, 8], 5),
        lambda: caller.add("c", [*prefix, 9], 5),
        caller.step,
        caller.step,
        caller.step,
        caller.step,
    ]


def several_outputs():
    caller = Caller(num_blocks=9)
    return caller, [
        lambda: caller.add("a", [1, 2, 3], 4, n=3),
        caller.step,
        caller.step,
        lambda: caller.add("b", [1, 2, 3], 3, n=2),
        caller.step,
        caller.step,
        caller.step,
    ]


def cancelling():
    caller = Caller(num_blocks=10, max_batch_size=2)
    return caller, [
        lambda: caller.add("a", [1, 2, 3], 9, n=2),
        lambda: caller.add("b", [4, 5], 9),
        lambda: caller.add("c", [6, 7], 3),
        caller.step,
        lambda: caller.abort("b"),
        caller.step,
        lambda: caller.abort("a"),
        caller.step,
    ]


class HalfRight:
    """Proposes the right tokens at first and a wrong one at the end, by the contexts' own rule."""

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        drafts = []
        while len(drafts) < k:
            drafts.append(next_token(token_ids + drafts, 0))
        return [*drafts[:-1], drafts[-1] % 9 + 1]


def speculation():
    caller = Caller(num_blocks=9, speculative=HalfRight(), num_speculative_tokens=3)
    return caller, [
        lambda: caller.add("a", [1, 2, 3], 9),
        lambda: caller.add("b", [1, 2, 7], 6),
        caller.step,
        caller.step,
        caller.step,
    ]


SCENARIOS = [admission, chunked_prefill, preemption, prefix_sharing, several_outputs, cancelling, speculation]


def interrupted_at(call: Callable[[], object], place: int | None) -> int:
    """Make a call with an interrupt at the line with this number, or without one; return how many lines it executed."""
    lines = 0

    def on_line(frame, event, argument):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines - 1 == place:
                raise KeyboardInterrupt  # ends the tracing, too
        return on_line

    def on_call(frame, event, argument):
        code = frame.f_code
        if code.co_filename.startswith((ENGINE, RUNNERS)) or code.co_qualname.startswith("ContextRunner"):
            return on_line(frame, event, argument)

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        assert place is not None
    finally:
        sys.settrace(before)
    return lines


def run_scenario(scenario, interrupted: int, place: int | None = None) -> int:
    """Run a scenario, interrupt one of its calls, and return how many lines that call executed."""
    caller, calls = scenario()
    for number, call in enumerate(calls):
        if number == interrupted:
            lines = interrupted_at(call, place)
            if place is not None:
                check_state(caller.engine)
                call()
        else:
            call()
        if place is None or number >= interrupted:  # until then, it is as in the run without an interrupt
            check_state(caller.engine)
    caller.finish()
    check_outputs(caller)
    check_nothing_is_left(caller.engine)
    return lines


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_an_interrupt_at_any_line_loses_and_repeats_nothing(scenario):
    problems, interrupts = [], 0
    for number in range(len(scenario()[1])):
        for line in range(run_scenario(scenario, number)):
            interrupts += 1
            try:
                run_scenario(scenario, number, line)
            except Exception as error:
                problems.append(f"call {number}, line {line}: {type(error).__name__}: {error}")
    assert not problems, f"{len(problems)} of {interrupts} interrupts: {problems[:5]}"


@pytest.mark.parametrize("scenario", [admission, several_outputs, cancelling], ids=lambda scenario: scenario.__name__)
def test_a_second_interrupt_during_the_recovery_loses_and_repeats_nothing(scenario, monkeypatch):
    recover = helpers.engine.engine.recover

    def recovered_at(place: int, lines: list[int]) -> Callable:
        def interrupted_recover(*parts):
            lines.append(interrupted_at(lambda: recover(*parts), place))

        return interrupted_recover

    last = len(scenario()[1]) - 1
    for first in range(5, run_scenario(scenario, last), 40):
        lines, place = [4], 3  # the lines before are those that handle a further interrupt
        while place < lines[-1]:
            monkeypatch.setattr(helpers.engine.engine, "recover", recovered_at(place, lines))
            run_scenario(scenario, last, first)
            place += 5


@pytest.mark.parametrize("execution", ["padded", "ragged"])
@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_runner_draws_the_same_samples_again(execution):
    """One engine is interrupted many times, each time at another line, so nothing may add up either."""
    engine = Engine(*random_pair("llama"), EngineConfig(max_batch_size=3, execution=execution, max_tokens_per_step=40))
    greedy, seeded = SamplingParams(6), SamplingParams(6, temperature=1.0, seed=3, n=2)

    def outputs_with(place: int | None = None) -> tuple[list[tuple], int]:
        engine.add_request(PROMPTS[0], greedy, "greedy"), engine.add_request(PROMPTS[1], seeded, "seeded")
        outputs = engine.step() + engine.step()
        engine.add_request(PROMPTS[2], greedy, "late")
        lines = interrupted_at(lambda: outputs.extend(engine.step()), place)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        ended = [(one.request_id, one.index, one.token_ids, one.text) for one in outputs if one.finish_reason]
        return sorted(ended), lines

    expected, lines = outputs_with()
    assert len(expected) == 4
    for place in range(3, lines, lines // 60):
        assert outputs_with(place)[0] == expected, f"line {place} of {lines}"


def test_an_interrupted_generate_leaves_nothing_behind_and_loses_no_output_of_others():
    def generate(place: int | None = None) -> int:
        caller = Caller(num_blocks=12)
        caller.add("other", [1, 2], 5)
        lines = interrupted_at(lambda: caller.engine.generate([[3, 4], [5]], SamplingParams(2), arrivals=[0, 1]), place)
        check_state(caller.engine)
        caller.finish()
        check_outputs(caller)
        check_nothing_is_left(caller.engine)
        return lines

    for place in range(generate()):
        generate(place)


def test_an_interrupted_stream_leaves_nothing_behind_and_loses_no_output_of_others():
    def stream(place: int | None = None) -> int:
        caller = Caller(num_blocks=12)
        caller.add("other", [1, 2], 5)
        lines = interrupted_at(lambda: list(caller.engine.stream([3, 4], SamplingParams(3))), place)
        check_state(caller.engine)
        caller.finish()
        check_outputs(caller)
        check_nothing_is_left(caller.engine)
        return lines

    for place in range(stream()):
        stream(place)

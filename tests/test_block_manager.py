"""The block manager's accounts: small cases by hand, and a state machine that knows what is in every slot.

There is no model. What a slot holds is recorded as the tokens that were computed up to there, and every sequence must
find exactly its own in the slots that its block table names.
The order of evictions is test_eviction.py.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings, stateful
from hypothesis import strategies as st

from helpers.engine import BlockManager, Sequence
from helpers.engine.block_manager import FreeBlocks
from helpers.runners.kv_pool import slot_mapping
from tests.simulation import operations


def sequence_of(text: str) -> Sequence:
    """A sequence with a token for every letter."""
    return Sequence(text, [ord(letter) for letter in text], 10)


def compute(blocks: BlockManager, sequence: Sequence, tokens: int) -> None:
    assert blocks.allocate(sequence, tokens)
    sequence.computed += tokens


def slots(blocks: BlockManager, sequence: Sequence, start: int, end: int) -> list[int]:
    return slot_mapping(blocks.block_table(sequence), blocks.block_size, start, end)


def accounts(blocks: BlockManager):
    """Return all that a block manager can be asked."""
    tables = {sequence: list(table) for sequence, table in blocks.tables.items()}
    computed = {sequence: sequence.computed for sequence in tables}
    return tables, computed, list(blocks.references), list(blocks.copies), blocks.available, blocks.unused_tokens


# --- prefixes -------------------------------------------------------------------------------------------------------


def cached_after(text: str, earlier: str, blocks: int = 16, block_size: int = 4, prefix_caching: bool = True) -> int:
    """Return how many tokens of a text are cached after another sequence was computed and freed."""
    manager = BlockManager(blocks, block_size, prefix_caching)
    sequence = sequence_of(earlier)
    compute(manager, sequence, len(earlier))
    manager.free(sequence)
    return manager.cached_tokens(sequence_of(text))


@pytest.mark.parametrize(
    ("text", "earlier", "tokens"),
    [
        ("abcdefghijk", "abcdefghij", 8),  # two full blocks; the third was not full
        ("abcdefgh", "abcdefghij", 4),  # its last token must be computed, so the second block is not reused
        ("abcd", "abcd", 0),
        ("abcde", "abcd", 4),
        ("abcdexyz", "abcdefgh", 4),
        ("xxxxefghi", "abcdefgh", 0),  # the same second block behind another beginning
        ("efghi", "abcdefgh", 0),  # the same block at another place
    ],
)
def test_a_prefix_is_reused_in_full_blocks(text, earlier, tokens):
    assert cached_after(text, earlier) == tokens


def test_without_prefix_caching_no_prefix_is_reused_and_all_blocks_are_free():
    assert cached_after("abcdefghi", "abcdefghi", prefix_caching=False) == 0


def test_a_running_sequence_shares_its_prefix_as_soon_as_its_next_tokens_are_allocated():
    blocks, sequence, other = BlockManager(16, 4), sequence_of("abcdefghij"), sequence_of("abcdefghxyz")
    compute(blocks, sequence, 6)
    compute(blocks, sequence, 1)
    assert blocks.cached_tokens(other) == 4  # the second block is not full yet
    compute(blocks, sequence, 2)
    compute(blocks, sequence, 1)
    assert blocks.cached_tokens(other) == 8


# --- free blocks ------------------------------------------------------------------------------------------------------


def test_a_block_costs_no_more_among_a_hundred_thousand_than_among_a_thousand():
    def cost(count: int) -> int:
        blocks = FreeBlocks(count)
        for after in (None, *range(count - 1)):
            blocks.take(after)
        for block in range(0, count, 2):  # as many gaps as there can be
            blocks.add(block)

        def work():
            for block in range(1, 200, 2):
                blocks.add(count // 2 + block)  # closes the space between two gaps
            for _ in range(100):
                blocks.take()
            for block in range(1, 200, 2):
                blocks.take(after=block)

        return operations(work)

    assert cost(100_000) <= 1.1 * cost(1000)


# --- any actions, in any order ----------------------------------------------------------------------------------------

happened = Counter()  # what the machine has seen


def upto(most: int, least: int = 0):
    """Draw an integer. Those of `st.integers` would depend on the numbers in the modules that happen to be loaded."""
    return st.sampled_from(range(least, most + 1))


class Blocks(stateful.RuleBasedStateMachine):
    """Sequences over two letters in a tiny memory, and for every slot the tokens that were computed up to there.

    As in the engine, an iteration is planned first: memory is allocated to some sequences and freed for others. Then it
    runs: pending copies are made, then all planned sequences write. A run can fail before it has done anything.
    """

    @stateful.initialize(blocks=upto(16, 4), block_size=upto(4, 1), prefix_caching=st.booleans())
    def begin(self, blocks, block_size, prefix_caching):
        self.blocks = BlockManager(blocks, block_size, prefix_caching)
        self.contents: dict[int, tuple[int, ...]] = {}  # by slot
        self.sequences: list[Sequence] = []
        self.planned: dict[Sequence, int] = {}

    # --- what can happen ---

    @stateful.precondition(lambda self: len(self.sequences) < 4)
    @stateful.rule(zeros=upto(6), ones=upto(4, 1))
    def arrive(self, zeros, ones):
        self.sequences.append(Sequence("request", [0] * zeros + [1] * ones, 10))

    @stateful.precondition(lambda self: self.blocks.tables and len(self.sequences) < 6)
    @stateful.rule(which=upto(5), tokens=upto(12, 1))
    def add_a_sample(self, which, tokens):
        first = list(self.blocks.tables)[which % len(self.blocks.tables)]
        self.sequences.append(Sequence("sample", first.token_ids[: first.prompt_tokens], 10, request=first.request))
        self.plan_one(self.sequences[-1], tokens)

    @stateful.precondition(lambda self: len(self.planned) < len(self.sequences))
    @stateful.rule(chunks=st.lists(st.tuples(upto(5), upto(12, 1)), min_size=1, max_size=4))
    def plan(self, chunks):
        for which, tokens in chunks:
            free = [sequence for sequence in self.sequences if sequence not in self.planned]
            if free:
                self.plan_one(free[which % len(free)], tokens)

    def plan_one(self, sequence, tokens):
        joins = sequence not in self.blocks.tables
        cached = self.blocks.cached_tokens(sequence) if joins else sequence.computed
        assert 0 <= cached < len(sequence.token_ids)
        unread = len(sequence.token_ids) - cached
        tokens = min(tokens, unread)
        before, remembered, copies = accounts(self.blocks), self.remembered(), len(self.blocks.copies)
        if self.blocks.allocate(sequence, tokens):
            self.planned[sequence] = tokens
            assert sequence.computed == cached
            assert len(self.blocks.tables[sequence]) == self.blocks.blocks_for(cached + tokens)
            happened["a prefix was found"] += joins and cached > 0
            happened["a copy"] += len(self.blocks.copies) > copies
            happened["an eviction"] += sum(self.remembered()) < sum(remembered)
        else:
            happened["a refusal"] += 1
            assert accounts(self.blocks) == before and self.remembered() == remembered
            if not joins:
                missing = self.blocks.blocks_for(cached + tokens) - len(self.blocks.tables[sequence])
                assert missing > self.blocks.available, "there was enough memory"

    @stateful.precondition(lambda self: self.planned)
    @stateful.rule(new_tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6))
    def run(self, new_tokens):
        self.contents = self.after_copies()
        self.blocks.take_copies()
        assert self.blocks.copies == []
        for sequence, tokens in self.planned.items():
            for position in range(sequence.computed, sequence.computed + tokens):
                self.contents[self.slot(sequence, position)] = tuple(sequence.token_ids[: position + 1])
        for sequence, tokens in self.planned.items():
            self.finds_its_own(sequence, sequence.computed + tokens, self.contents)
            sequence.computed += tokens
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(new_tokens.pop())
        self.planned = {}

    @stateful.precondition(lambda self: self.sequences)
    @stateful.rule(which=upto(5), how=st.sampled_from(["preempt", "preempt", "end", "the run fails"]))
    def release(self, which, how):
        freed = list(self.planned) if how == "the run fails" else [self.sequences[which % len(self.sequences)]]
        for sequence in freed:
            happened[how] += sequence in self.blocks.tables and sequence.generated > 0
            self.planned.pop(sequence, None)
            self.blocks.free(sequence)
            assert sequence.computed == 0
            if how != "preempt":
                self.sequences.remove(sequence)

    def teardown(self):
        for sequence in self.sequences:
            self.blocks.free(sequence)
        assert (self.blocks.used, self.blocks.available) == (0, self.blocks.num_blocks)
        assert not self.blocks.tables and not any(self.blocks.references)

    # --- what must hold ---

    @stateful.invariant()
    def every_sequence_finds_its_own_tokens(self):
        contents = self.after_copies()
        for sequence in self.blocks.tables:
            self.finds_its_own(sequence, sequence.computed, contents)

    @stateful.invariant()
    def the_counts_are_right(self):
        tables = list(self.blocks.tables.values())
        owners = Counter(block for table in tables for block in table)
        assert all(len(set(table)) == len(table) for table in tables)
        assert self.blocks.references == [owners[block] for block in range(self.blocks.num_blocks)]
        assert (self.blocks.used, self.blocks.available) == (len(owners), self.blocks.num_blocks - len(owners))
        assert set(self.blocks.tables) <= set(self.sequences)

    @stateful.invariant()
    def no_sequence_writes_to_a_block_of_another(self):
        for sequence, tokens in self.planned.items():
            positions = range(sequence.computed, sequence.computed + tokens)
            written = {self.slot(sequence, position) // self.blocks.block_size for position in positions}
            assert all(self.blocks.references[block] == 1 for block in written)

    def finds_its_own(self, sequence, tokens, contents):
        for position in range(tokens):
            computed = contents.get(self.slot(sequence, position))
            assert computed == tuple(sequence.token_ids[: position + 1]), f"token {position}"

    # --- how ---

    def slot(self, sequence, position) -> int:
        (slot,) = slots(self.blocks, sequence, position, position + 1)
        index, offset = divmod(position, self.blocks.block_size)
        assert slot == self.blocks.tables[sequence][index] * self.blocks.block_size + offset
        return slot

    def after_copies(self) -> dict[int, tuple[int, ...]]:
        contents, size = dict(self.contents), self.blocks.block_size
        for old, new in self.blocks.copies:
            for offset in range(size):
                contents.pop(new * size + offset, None)
                if old * size + offset in contents:
                    contents[new * size + offset] = contents[old * size + offset]
        return contents

    def remembered(self) -> list[int]:
        """Return how much a new sequence would share that begins like each of them."""
        return [self.blocks.cached_tokens(Sequence("", [*sequence.token_ids, 2], 1)) for sequence in self.sequences]


def test_whatever_happens_every_sequence_finds_its_own_tokens_and_all_counts_are_right():
    happened.clear()
    events = ("a prefix was found", "a copy", "an eviction", "a refusal", "preempt", "end", "the run fails")
    often = settings(
        max_examples=120, stateful_step_count=50, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    for number in range(8):  # which examples a seed gives depends on what else is imported, and some have few evictions
        stateful.run_state_machine_as_test(seed(number)(Blocks), settings=often)
        if all(happened[event] > 5 for event in events):
            return
    raise AssertionError(happened)

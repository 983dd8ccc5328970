"""Padded execution: chunks become batches, to the pad; and what is special about model families, served in chunks.

The small cases run on the counting model, whose cache can be read like a text: the key of a token is its id.
"""

import random
from collections import Counter

import pytest
import transformers
from conftest import CountingModel, letter_tokenizer

from helpers import Engine, EngineConfig, SamplingParams
from helpers.padded import PaddedExecution
from helpers.scheduler import POLICIES, Chunk
from helpers.sequence import Sequence
from tests import families

pytestmark = pytest.mark.usefixtures("one_thread")


class Run:
    """An execution, and of every forward pass who read how much, beside how many pads."""

    def __init__(self, context=40):
        self.execution = PaddedExecution(CountingModel(context, 99), letter_tokenizer())

    def sequences(self, *prompts):
        ids = [[ord(letter) - ord("a") + 1 for letter in prompt] for prompt in prompts]
        return [Sequence(prompt, one, 9) for prompt, one in zip(prompts, ids, strict=True)]

    def __call__(self, *chunks):
        passes = []
        for done in self.execution.run([Chunk(*chunk) for chunk in chunks]):
            passes.append(
                [(c.sequence.request_id, c.tokens, n) for c, n in zip(done.chunks, done.padding, strict=True)]
            )
            complete = [chunk.sequence for chunk in done.chunks if chunk.tokens == chunk.sequence.unread]
            assert done.logits.shape == (len(complete), 10), "a row of logits for each that has read its last token"
            for chunk in done.chunks:
                chunk.sequence.computed += chunk.tokens
            for sequence, token in zip(complete, done.logits.argmax(dim=-1).tolist(), strict=True):
                assert token == (sequence.token_ids[-1] + 1) % 10, "the logits of another row"
                sequence.token_ids.append(token)
            self.check_caches()
        return passes

    def check_caches(self):
        """Whoever has read something is in one place, and what is in its cache is what it has read."""
        execution = self.execution
        batches = [execution._decoding, *execution._reading.values()]
        for batch in (batch for batch in batches if batch["request_ids"]):
            keys, mask = batch["past_key_values"].layers[0].keys[:, 0, :, 0], batch["attention_mask"]
            assert mask.shape == (keys.size(0), keys.size(1) + 1) and mask[:, -1].all()
            assert mask[:, 0].any(), "padding that all rows share"
            for row, sequence in enumerate(batch["request_ids"]):
                read = keys[row][mask[row, :-1].bool()].int().tolist()
                assert read == sequence.token_ids[: len(read)]
                assert len(read) == sequence.computed or sequence in execution._released

    def places(self):
        names = [
            {s.request_id for s in rows} for rows in (self.execution._decoding["request_ids"], self.execution._reading)
        ]
        return {"decoding": names[0], "reading": names[1]}


def test_a_plan_runs_as_decodes_then_newcomers_then_the_other_chunks():
    run = Run()
    a, b, c, d = run.sequences("abc", "abcdefgh", "abcde", "ef")
    # Those who begin share a pass, behind pads, wherever they stop.
    assert run((a, 3), (b, 5), (c, 2)) == [[("abc", 3, 2), ("abcdefgh", 5, 0), ("abcde", 2, 3)]]
    assert run.places() == {"decoding": {"abc"}, "reading": {"abcdefgh", "abcde"}}
    # Chunks in the middle have each a cache of its own length: a pass for each.
    assert run((a, 1), (b, 1), (c, 3), (d, 2)) == [
        [("abc", 1, 0)],
        [("ef", 2, 0)],
        [("abcdefgh", 1, 0)],
        [("abcde", 3, 0)],
    ]
    assert run.places() == {"decoding": {"abc", "ef", "abcde"}, "reading": {"abcdefgh"}}
    decodes = [("abc", 1, 0), ("ef", 1, 0), ("abcde", 1, 0)]
    assert run((a, 1), (d, 1), (c, 1), (b, 2)) == [decodes, [("abcdefgh", 2, 0)]]
    assert run.places() == {"decoding": {"abc", "ef", "abcde", "abcdefgh"}, "reading": set()}
    assert a.token_ids == [1, 2, 3, 4, 5, 6] and b.token_ids == list(range(1, 10))


def test_who_is_left_out_of_a_plan_stays_as_it_is():
    run = Run()
    a, b, c = run.sequences("abcdef", "ab", "abc")
    run((a, 6), (b, 2), (c, 3))
    assert run((b, 1)) == [[("ab", 1, 0)]]
    assert run((c, 1), (a, 1)) == [[("abcdef", 1, 0), ("abc", 1, 0)]]
    assert run((c, 1), (b, 1), (a, 1)) and [len(s.token_ids) for s in (a, b, c)] == [9, 5, 6]


def test_released_rows_leave_wherever_they_are_and_can_begin_anew():
    run = Run()
    a, b, c, d = run.sequences("abcdef", "ab", "abcd", "bcd")
    run((a, 4), (b, 2), (c, 3), (d, 3))
    for sequence in (a, b):  # one in the middle of its prompt, one that decodes
        run.execution.release(sequence)
        assert sequence.computed == 0
    assert run((d, 1), (c, 1)) == [[("bcd", 1, 0)], [("abcd", 1, 0)]]
    assert run.places() == {"decoding": {"bcd", "abcd"}, "reading": set()}
    # b has generated a token already: it reads that again, too.
    assert run((c, 1), (d, 1), (a, 6), (b, 3)) == [[("bcd", 1, 0), ("abcd", 1, 0)], [("abcdef", 6, 0), ("ab", 3, 3)]]
    assert b.token_ids == [1, 2, 3, 4]
    for sequence in (a, b, c, d):
        run.execution.release(sequence)
    assert run() == [] and run.places() == {"decoding": set(), "reading": set()}


def test_a_row_released_before_it_ever_ran_is_no_problem():
    run = Run()
    a, b = run.sequences("abc", "ab")
    run.execution.release(a)
    assert run((b, 2), (a, 2)) == [[("ab", 2, 0), ("abc", 2, 0)]]
    assert run.places() == {"decoding": {"ab"}, "reading": {"abc"}}


@pytest.mark.parametrize("fault", [0, 1, 2])
def test_a_pass_that_fails_changes_nothing(fault, monkeypatch):
    run = Run()
    a, b, c = run.sequences("ab", "abcdefgh", "cde")
    run((a, 2), (b, 3))
    passes, plain = iter(range(9)), CountingModel.forward

    def forward(self, input_ids, position_ids, attention_mask, past_key_values):
        output = plain(
            self, input_ids, position_ids, attention_mask, past_key_values
        )  # has grown the cache it was given
        if next(passes) == fault:
            raise RuntimeError("on purpose")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(CountingModel, "forward", forward)
        with pytest.raises(RuntimeError):
            run((a, 1), (b, 2), (c, 3))
    run.check_caches()
    assert run.places() == {"decoding": {"ab", "cde"} if fault == 2 else {"ab"}, "reading": {"abcdefgh"}}
    in_order_of_passes = [(a, 1), (c, 3), (b, 2)]
    run(*in_order_of_passes[fault:])  # those who missed their turn
    assert [sequence.token_ids for sequence in (a, c)] == [[1, 2, 3, 4], [3, 4, 5, 6]] and b.computed == 5


def test_random_plans_leave_every_cache_right():
    # Chunks of any length, rows left out, released and begun anew; `Run` checks caches and logits after every pass.
    for seed in range(25):
        draw, run = random.Random(seed), Run(context=64)
        texts = ("a", "abc", "bcdefgh", "cdefghi" * 3, "ab" * 6)
        everybody = [run.sequences(draw.choice(texts))[0] for _ in range(6)]
        released = 0
        for _ in range(30):
            chunks = []
            for sequence in draw.sample(everybody, draw.randint(1, 6)):
                if draw.random() < 0.08:
                    run.execution.release(sequence)
                    released += 1
                elif len(sequence.token_ids) < 60:
                    chunks.append((sequence, draw.randint(1, sequence.unread)))
            run(*chunks)
        assert released and any(sequence.generated > 5 for sequence in everybody)


# --- families -------------------------------------------------------------------------------------------------------

# What could go wrong when a prompt is read in pieces: a window that ends within a chunk, positions that come from the
# mask (OPT) or from distances (ALiBi), a context that no mask may outgrow (GPT-Neo, MPT), sinks.
SPECIAL = ["opt", "gpt_neo", "mpt", "bloom", "falcon (rw)", "mistral", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_is_special_about_a_family_prompts_can_be_read_in_chunks(name):
    family = next(family for family in families.FAMILIES if family.name == name)
    if not family.available:
        pytest.skip(f"transformers {transformers.__version__} does not know {name}")
    reference = families.reference(family)
    for seed in range(3):
        draw = random.Random(seed)
        config = EngineConfig(
            max_batch_size=draw.randint(2, 5),
            max_tokens_per_step=draw.randint(6, 20),  # prompts have up to 40 tokens, windows 8
            policy=draw.choice(sorted(POLICIES)),
            mixed_batches=draw.random() < 0.7,
            execution="padded",
        )
        engine = Engine(reference.model, families.tokenizer(), config)
        outputs = engine.generate(
            [request.prompt for request in reference.requests],
            [SamplingParams(request.max_tokens) for request in reference.requests],
            arrivals=[draw.randint(0, 12) for _ in reference.requests],
        )
        assert [output.token_ids for output in outputs] == reference.tokens
        prefills = [slot.request_id for it in engine.trace.iterations for slot in it.slots if slot.work == "prefill"]
        assert max(Counter(prefills).values()) >= 2, "no prompt was read in chunks"

"""The padded runner: chunks become batches, counted to the pad; and what is special about model families, in chunks.

The small cases run on the counting model, whose cache can be read like a text: the key of a token is its id.
"""

import random
from collections import Counter

import pytest
from conftest import CountingModel, letter_tokenizer

from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import POLICIES, Chunk, Plan, Sequence
from helpers.runners import PaddedRunner
from tests.support import families


class Run:
    """A padded runner whose caches are checked after every plan.

    Attributes:
        error: what went wrong in the last plan, if a forward pass failed.
    """

    def __init__(self, context=40):
        self.runner, self.error = PaddedRunner(CountingModel(context, 99), letter_tokenizer()), None
        self._released: list[Sequence] = []

    def sequences(self, *prompts):
        ids = [[ord(letter) - ord("a") + 1 for letter in prompt] for prompt in prompts]
        return [Sequence(prompt, token_ids, 9) for prompt, token_ids in zip(prompts, ids, strict=True)]

    def release(self, sequence):
        """Preempt a sequence: the next plan tells the runner."""
        sequence.computed = 0
        self._released.append(sequence)

    def __call__(self, *chunks):
        """Run a plan; return for each forward pass its chunks as (prompt, tokens, pads)."""
        plan = Plan([Chunk(*chunk) for chunk in chunks], released=self._released)
        self._released = []
        output = self.runner.run(plan, lambda: 0.0)
        self.error, passes = output.error, []
        for forward_pass in output.passes:
            pass_chunks = forward_pass.chunks
            padding = zip(pass_chunks, forward_pass.padding, strict=True)
            passes.append([(chunk.sequence.request_id, chunk.tokens, pads) for chunk, pads in padding])
            complete = [chunk.sequence for chunk in pass_chunks if chunk.tokens == chunk.sequence.num_uncomputed_tokens]
            assert list(forward_pass.sampled) == complete, "a token for each that has computed its last one"
            for chunk in pass_chunks:
                chunk.sequence.computed += chunk.tokens
            for sequence, (sampled,) in forward_pass.sampled.items():
                assert sampled.token_id == (sequence.token_ids[-1] + 1) % 10, "a token from the logits of another row"
                sequence.token_ids.append(sampled.token_id)
        self.check_caches()
        return passes

    def check_caches(self):
        """Every sequence is in at most one batch, and its cache holds exactly its computed tokens."""
        rows = []
        for batch in filter(None, [self.runner._decoding, *self.runner._prefilling.values()]):
            keys, mask = batch["past_key_values"].layers[0].keys[:, 0, :, 0], batch["attention_mask"]
            assert mask.shape == (keys.size(0), keys.size(1) + 1) and mask[:, -1].all()
            assert mask[:, 0].any(), "padding that all rows share"
            for row, sequence in enumerate(batch["sequences"]):
                cached = keys[row][mask[row, :-1].bool()].int().tolist()
                assert cached == sequence.token_ids[: len(cached)]
                assert len(cached) == sequence.computed
            rows += batch["sequences"]
        assert len(rows) == len(set(rows))


def test_a_plan_runs_as_decodes_then_beginning_prompts_then_the_other_chunks():
    run = Run()
    a, b, c, d = run.sequences("abc", "abcdefgh", "abcde", "ef")
    # Prompts that begin share a pass, behind pads, wherever they stop.
    assert run((a, 3), (b, 5), (c, 2)) == [[("abc", 3, 2), ("abcdefgh", 5, 0), ("abcde", 2, 3)]]
    # Each chunk in the middle of a prompt has a cache of its own length: a pass for each.
    assert run((a, 1), (b, 1), (c, 3), (d, 2)) == [
        [("abc", 1, 0)],
        [("ef", 2, 0)],
        [("abcdefgh", 1, 0)],
        [("abcde", 3, 0)],
    ]
    decodes = [("abc", 1, 0), ("ef", 1, 0), ("abcde", 1, 0)]
    assert run((a, 1), (d, 1), (c, 1), (b, 2)) == [decodes, [("abcdefgh", 2, 0)]]
    assert a.token_ids == [1, 2, 3, 4, 5, 6] and b.token_ids == list(range(1, 10))


def test_random_plans_leave_every_cache_right():
    # Chunks of any length, rows left out, released and begun anew; `Run` checks caches and tokens after every plan.
    for seed in range(15):
        draw, run = random.Random(seed), Run(context=64)
        texts = ("a", "abc", "bcdefgh", "cdefghi" * 3, "ab" * 6)
        sequences = [run.sequences(draw.choice(texts))[0] for _ in range(6)]
        released = 0
        for _ in range(30):
            chunks = []
            for sequence in draw.sample(sequences, draw.randint(1, 6)):
                if draw.random() < 0.08:
                    run.release(sequence)
                    released += 1
                elif len(sequence.token_ids) < 60:
                    chunks.append((sequence, draw.randint(1, sequence.num_uncomputed_tokens)))
            run(*chunks)
        assert released and any(sequence.generated > 5 for sequence in sequences)


# --- families -------------------------------------------------------------------------------------------------------

# What could go wrong when a prompt is computed in chunks: a window that ends within a chunk, positions that come from
# the mask (OPT) or from distances (ALiBi), a context that no mask may outgrow (GPT-Neo, MPT), sinks.
SPECIAL = ["opt", "gpt_neo", "mpt", "bloom", "falcon (rw)", "mistral", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_is_special_about_a_family_prompts_can_be_computed_in_chunks(name):
    families.skip_unless_known(family := families.by_name(name))
    reference = families.reference(family)
    draw = random.Random(name)
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
    row_steps = [row for iteration in engine.trace.passes for row in iteration.row_steps]
    prefills = Counter(row.request_id for row in row_steps if row.work == "prefill")
    assert max(prefills.values()) >= 2, "no prompt was computed in chunks"

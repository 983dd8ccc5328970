"""The draft model: a smaller model with the same tokenizer guesses what the large one will generate.

It runs as the large one does, on a ragged row with a KV cache of its own, and proposes its best tokens (Leviathan et
al., ICML 2023). All sequences draft together: the first pass computes what the large model has added since the last
call, and each further pass one more draft of every sequence. The keys of rejected drafts are overwritten.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from ...engine import BlockManager, Chunk, EngineConfig, Plan, Sequence
from ...models import EMBEDDED, context_length, load_model
from ...runners import RaggedRunner
from ...trace import num_matching
from .speculation import Context, as_context

EMBEDDED_DRAFT = EMBEDDED / "draft"


class DraftModelProposer:
    """Proposes the best tokens of a draft model; a `Proposer`.

    Args:
        runner: runs the draft model.
        max_sequences: of how many sequences keys and values are kept.
        max_tokens_per_pass: the most tokens that a pass of the draft model computes; at least `max_sequences`.
    """

    def __init__(self, runner: RaggedRunner, max_sequences: int, max_tokens_per_pass: int):
        self.runner, self.max_sequences, self.max_tokens_per_pass = runner, max_sequences, max_tokens_per_pass
        self.context_length = context_length(runner.model)
        self.blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_caching=False)
        self._kept: OrderedDict[Sequence, None] = OrderedDict()  # least recently used first

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return at most `k` ids that the draft model generates after `token_ids`."""
        return self.propose_batch([token_ids], [k])[0]

    def propose_batch(self, token_ids: Seq[list[int]], k: Seq[int]) -> list[list[int]]:
        """Return at most k[i] ids after token_ids[i] for each i.

        A sequence gets no drafts while its keys and values do not fit into the cache or into the draft model's context,
        or while a long prompt is being computed.
        """
        sequences = [self._sequence(as_context(ids)) for ids in token_ids]
        self._generate(sequences, k)
        return [sequence.token_ids[len(ids) :] for sequence, ids in zip(sequences, token_ids, strict=True)]

    def _sequence(self, context: Context) -> Sequence:
        """Return the sequence in which the draft model continues a context."""
        sequence = context.notes.get(self)
        if sequence not in self._kept:
            sequence = context.notes[self] = Sequence("draft", list(context), 1)
            if len(self._kept) == self.max_sequences:
                self._drop(next(iter(self._kept)))
        self._kept[sequence] = None
        self._kept.move_to_end(sequence)
        known = sequence.prompt_tokens  # the context at the last call; drafts follow
        same = known + num_matching(sequence.token_ids[known:], context[known:])
        sequence.token_ids[same:] = context[same:]
        sequence.request.prompt_tokens = len(context)
        sequence.computed = min(sequence.computed, same, len(context) - 1)
        return sequence

    def _generate(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Append the draft model's best tokens to each sequence, as many as asked for or as fit."""
        drafting = dict(zip(sequences, counts, strict=True))
        while chunks := self._chunks(drafting):
            logits = self.runner.forward(Plan(chunks))
            drafting = {chunk.sequence: drafting[chunk.sequence] for chunk in chunks if chunk.samples_token}
            for chunk in chunks:
                chunk.sequence.computed = chunk.end
            for sequence, token_id in zip(drafting, logits.float().argmax(dim=-1).tolist(), strict=True):
                sequence.token_ids.append(token_id)

    def _chunks(self, drafting: dict[Sequence, int]) -> list[Chunk]:
        """Return the chunks of a pass over the sequences that have fewer drafts than this."""
        chunks, left = [], self.max_tokens_per_pass
        for sequence, count in drafting.items():
            fits = self.context_length is None or len(sequence.token_ids) <= self.context_length
            tokens = min(sequence.num_uncomputed_tokens, left)
            if sequence.generated < count and fits and tokens and self._allocate(sequence, tokens, drafting):
                chunks.append(Chunk(sequence, tokens, self.blocks.block_table(sequence)))
                left -= tokens
        return chunks

    def _allocate(self, sequence: Sequence, tokens: int, drafting: dict[Sequence, int]) -> bool:
        while not self.blocks.allocate(sequence, tokens):
            unused = next((kept for kept in self._kept if kept not in drafting), None)
            if unused is None:
                return False
            self._drop(unused)
        return True

    def _drop(self, sequence: Sequence) -> None:
        del self._kept[sequence]
        self.blocks.free(sequence)


def make_draft_proposer(model, tokenizer, config: EngineConfig, make_runner: Callable) -> DraftModelProposer:
    """Return a proposer that runs the draft model of a config.

    Args:
        model, tokenizer: the large model, and its tokenizer.
        config: the engine's settings; the draft model is run by the same ones.
        make_runner: makes the runner of the draft model, as `Engine.make_runner` does.

    Raises:
        ValueError: no draft model is named, and the embedded one has another tokenizer; the named one has; it cannot be
            loaded; or it does not run ragged.
    """
    draft = config.draft_model
    if draft is None or isinstance(draft, str | os.PathLike):
        draft, its_tokenizer = load_model(draft or EMBEDDED_DRAFT, str(model.device), model.dtype)
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            subject = f"draft model {str(config.draft_model)!r}" if config.draft_model else "embedded draft model"
            raise ValueError(
                f"The {subject} has another tokenizer than the model, so its token ids mean other texts: set "
                f"draft_model to a smaller model with the same tokenizer."
            )
    changes = {"execution": "ragged", "num_blocks": None, "batch_invariant": False}
    runner = make_runner(
        draft, tokenizer, replace(config, **changes, speculative=None, draft_model=None, tensor_parallel_size=1)
    )
    return DraftModelProposer(runner, config.max_batch_size, config.max_tokens_per_step)

"""Recovery from an interrupt (Ctrl-C, an asynchronous exception), which may come between any two lines of an iteration.

Two facts about a sequence are trusted: a token counts once it is in `token_ids`, and an end once `finish_reason` is
set. Each of them is a single change, so no interrupt can come in its middle. Everything else is derived from them
again. All sequences wait, their tokens are recomputed, and the prefix cache is empty. Nothing has to be undone, so an
iteration that is not interrupted pays nothing.
"""

from ..trace import Trace
from .detokenizer import IncrementalDetokenizer
from .outputs import OutputCollector
from .scheduler import Scheduler
from .sequence import Sequence


def recover(scheduler: Scheduler, outputs: OutputCollector, trace: Trace, tokenizer) -> None:
    """Make the parts of an engine consistent. If that is interrupted, too, it starts again."""
    while True:
        try:
            return _derive(scheduler, outputs, trace, tokenizer)
        except KeyboardInterrupt:
            continue


def _derive(scheduler: Scheduler, outputs: OutputCollector, trace: Trace, tokenizer) -> None:
    sequences = outputs.unfinished
    for sequence in sequences:
        del sequence.token_times[sequence.generated :]
        if sequence.logprobs is not None:
            del sequence.logprobs[sequence.generated :]
        if sequence.generated or sequence.finish_reason:
            sequence.detokenizer = IncrementalDetokenizer(tokenizer, sequence.params.stop, sequence.params.min_tokens)
            _detokenize_again(sequence, scheduler)
    scheduler.recover(sequence for sequence in sequences if sequence.finish_reason is None)
    trace.free(sequence.label for sequence in sequences)
    outputs.recover()


def _detokenize_again(sequence: Sequence, scheduler: Scheduler) -> None:
    """Make the text of a sequence from the start, and end the sequence if its newest token does."""
    reason = None
    try:
        for token_id in sequence.token_ids[sequence.prompt_tokens :]:
            reason = scheduler.detokenize(sequence, token_id)
        if sequence.finish_reason is not None:
            sequence.detokenizer.finish()
        elif reason is not None:
            sequence.end(reason)
    except Exception as error:  # a token that the tokenizer cannot decode
        sequence.end("error", error)

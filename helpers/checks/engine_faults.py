"""The capstone, its messages: what an engine whose tokens are wrong, or that stands still, has missed."""

from dataclasses import dataclass, field

from .engine_calls import Row

MAX_IDLE = 3  # steps in a row without a forward pass
CHUNK = "A chunk of a prompt yields no token: the prompt goes on after it, and only its last token tells what follows"
ORDER = (
    "`forward` returns a token for each row, in the order of the rows: each belongs to its row's request, and "
    "follows that row's last token"
)
START = "`start` is the place of the row's first token in the request's own text, counted from 0"
PREEMPT = (
    "A block is taken only when a token needs it. If none is free, the newest running request is preempted: it gives "
    "its blocks back, and is in the queue again. Blocks of requests that finished are free again, and cached ones can "
    "be evicted"
)


@dataclass
class Served:
    """A request of a run, and what has become of it."""

    id: int
    arrival: int
    prompt: list[int]
    most: int
    output: list[int]
    keys: list[int]
    arrived: bool = False
    finished: bool = False
    tokens_at: list[int] = field(default_factory=list)  # the pass of each token
    rows: list[tuple[int, int]] = field(default_factory=list)  # (start, tokens)
    suspect: str = ""  # the first thing that makes its tokens wrong

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output

    @property
    def known(self) -> int:
        """The tokens of the text that the engine can know."""
        return len(self.prompt) + len(self.tokens_at)


def stuck(run) -> str:
    """Say what a request waits for, when steps compute nothing."""
    request = run.unfinished[0]
    if len(request.tokens_at) >= len(request.output):
        return (
            f"never returns the output of request {request.id}, which ends with its token {len(request.output)}. Each "
            "request needs an output, in the step in which it ends"
        )
    twins = [other.id for other in run.requests.values() if other.finished and other.prompt == request.prompt]
    if twins and not request.rows:
        return (
            f"never runs request {request.id}, whose prompt is that of request {twins[0]}. Equal prompts are two "
            "requests all the same: know them by their ids"
        )
    what = f"computes nothing in {MAX_IDLE} steps although {len(run.unfinished)} requests wait or run"
    if len(request.prompt) > run.workload.budget and not request.rows:
        return (
            f"{what}. The prompt of request {request.id} has {len(request.prompt)} tokens, and a pass has room for "
            f"{run.workload.budget}: it is computed in chunks, over several passes"
        )
    return f"{what}. {PREEMPT}"


def misplaced(request: Served, row: Row) -> str:
    """Say which tokens of a row are not those of its request's text at their positions; "" if all are."""
    end = row.start + len(row.token_ids)
    if len(request.tokens_at) == len(request.output):  # whatever is computed after the end is only a cost
        return ""
    if end > request.known:
        what = f"computes position {end - 1} of request {request.id}, which has {request.known} tokens so far"
        is_after_chunk = request.rows and sum(request.rows[-1]) < len(request.prompt)
        return f"{what}. {CHUNK}" if is_after_chunk else f"{what}. {START}: the newest token comes last in it"
    right = request.text[row.start : end]
    if right == row.token_ids:
        return ""
    at = next(n for n, pair in enumerate(zip(right, row.token_ids, strict=True)) if pair[0] != pair[1])
    what = (
        f"computes token {row.token_ids[at]} at position {row.start + at} of request {request.id}, whose text has "
        f"{right[at]} there"
    )
    starts = range(request.known) if len(right) > 1 else [request.known - 1]  # one token may be in a text by chance
    if any(request.text[start : start + len(right)] == row.token_ids for start in starts):
        return f"{what}. {START}"
    return f"{what}. {CHUNK if row.start + at < len(request.prompt) else ORDER}"


def misread(run, request: Served, row: Row, position: int, written: list) -> str:
    """Say whose key a row reads; `written` is (request, position, token), or empty."""
    what = f"reads a wrong key for position {position} of request {request.id}:"
    if not written:
        return (
            f"{what} no token has been computed in that place. The newest token has no key before its own pass, and "
            "earlier keys stay in the blocks that the table had then"
        )
    owner, written_position, _ = written
    size = run.workload.block_size
    first = position - position % size
    inside = [run.slots.get(run.slot(row, index), (0,))[-1] for index in range(first, first + size)]
    if owner != request.id and inside == request.text[first : first + size]:
        return (
            f"{what} the token is the same, but it was computed after another text, that of request {owner}. A "
            "token's key depends on everything before it, so a block is known by all tokens up to its end"
        )
    if owner != request.id:
        return (
            f"{what} request {owner} has written to that block. A block belongs to one request from when it is "
            "taken until it is given back, and to several only if they share a full block; without its blocks, a "
            "request has to be computed again"
        )
    return (
        f"{what} there is the key of its position {written_position}. Position p is in block p // block_size of the "
        "table, and each token is written once"
    )


def wrong_output(run, request: Served, got: list[int]) -> str:
    """Say how an output differs from the one that the request gets alone."""
    right = request.output
    what = f"returns {len(got)} token{'s' * (len(got) != 1)} for request {request.id}, which gets {len(right)} alone:"
    if got == right:
        return f"{what} the model has given {len(request.tokens_at)} of them so far"
    if got == request.text:
        return f"{what} an output does not contain the prompt"
    if got[: len(right)] == right and right[-1] == run.model.eos_id:
        return f"{what} it goes on after EOS, with which an output ends even if more tokens were allowed"
    if got[: len(right)] == right:
        return f"{what} max_new_tokens is {request.most}, and the pass over the prompt yields the first of them"
    if right[:-1] == got and right[-1] == run.model.eos_id and len(request.tokens_at) == len(right):
        return f"{what} EOS is missing. EOS is not text, but the model generated it"
    if right[: len(got)] == got:
        return (
            f"{what} it ends before EOS and before max_new_tokens, {request.most}, which counts generated tokens. Each "
            "request ends by itself, with its own EOS, whatever its prompt holds and whenever others end"
        )
    index = next((n for n, pair in enumerate(zip(got, right, strict=False)) if pair[0] != pair[1]), 0)
    if request.suspect:
        return request.suspect
    what, ends = f"{what} they differ from token {index} on", [start + tokens for start, tokens in request.rows]
    if ends != sorted(ends):
        return f"{what}. The tokens from before a preemption are part of the output"
    return f"{what}. {CHUNK if ends and ends[0] < len(request.prompt) else ORDER}"

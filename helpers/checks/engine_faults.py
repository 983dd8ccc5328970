"""The capstone, its messages: what an engine that is wrong or costs too much has missed, as its run shows."""

from dataclasses import dataclass, field

from .engine_calls import Row

MAX_IDLE = 3  # steps in a row without a forward pass
CHUNK = "A chunk of a prompt yields no token: the prompt goes on after it, and only its last token tells what follows"
ORDER = (
    "`forward` returns a token for each row, in the order of the rows: each belongs to its row's request, and "
    "follows that row's last token"
)
TOO_SOON = (
    "A block is taken only when a token needs it: where memory is short, one that is taken as soon as the last one is "
    "full keeps another request waiting"
)
LEAKS = (
    "Are all blocks of requests that finished or were preempted free again, can cached ones be evicted, and is what "
    "was preempted in the queue again"
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


def stuck(run) -> str:
    one = run.unfinished[0]
    if len(one.tokens_at) >= len(one.output):
        ends = "in its first pass" if len(one.output) == 1 else f"with its token {len(one.output)}"
        return (
            f"never returns the output of request {one.id}, which ends {ends}. Each request needs an output, "
            "in the step in which it ends"
        )
    twins = [other.id for other in run.requests.values() if other.finished and other.prompt == one.prompt]
    if twins and not one.rows:
        return (
            f"never runs request {one.id}, whose prompt is that of request {twins[0]}. Equal prompts are two "
            "requests all the same: know them by their ids"
        )
    what = f"computes nothing in {MAX_IDLE} steps although {len(run.unfinished)} requests wait or run"
    if len(one.prompt) > run.workload.budget and not one.rows and not run.cut:
        return (
            f"{what}. The prompt of request {one.id} has {len(one.prompt)} tokens, and a pass has room for "
            f"{run.workload.budget}: it is computed in chunks, over several passes"
        )
    total = run.workload.num_blocks
    held = {block for other in run.unfinished for block in other.table}
    if len(held) == total > max(len(other.table) for other in run.unfinished):
        return (
            f"{what}: each waits for a block of another. When no block is free, the newest running request is "
            "preempted: it gives its blocks back, and waits"
        )
    return without_memory(run, what)


def without_memory(run, what: str) -> str:
    """Name what keeps blocks from requests that need them."""
    return f"{what}. {TOO_SOON if run.reserved == 1 else LEAKS}"


def too_far(one: Served, row: Row) -> str:
    """Say that a row computes positions that its request does not have yet; "" if it does not."""
    last = row.start + len(row.token_ids) - 1
    if last < one.known or len(one.tokens_at) == len(one.output):
        return ""
    return (
        f"computes position {last} of request {one.id}, which has {one.known} tokens so far. `start` is the place "
        "of the row's first token in the request's own text, counted from 0: the newest token comes last in it"
    )


def misread(run, one: Served, row: Row, position: int, written: list) -> str:
    """Say whose key a row reads; `written` is (request, position, token), or empty."""
    what = f"reads a wrong key for position {position} of request {one.id}:"
    if not written:
        if position >= one.computed:
            return (
                f"{what} its token has not been computed yet, by any request. Only computed tokens have keys, "
                "and the newest token has none before its own pass"
            )
        return f"{what} the block table has changed, and the keys are in the blocks that it had before"
    owner, place, _ = written
    size = run.workload.block_size
    first = position - position % size
    inside = [run.slots.get(run.slot(row, place), (0,))[-1] for place in range(first, first + size)]
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


def misplaced(one: Served, row: Row, position: int, token: int) -> str:
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


def wrong_output(run, one: Served, got: list[int]) -> str:
    right = one.output
    many = f"{len(got)} token{'s' * (len(got) != 1)}"
    what = f"returns {many} for request {one.id}, which gets {len(right)} alone:"
    if got == right:
        return f"{what} the model has given {len(one.tokens_at)} of them so far"
    if got == one.text:
        return f"{what} an output does not contain the prompt"
    if got[: len(right)] == right and right[-1] == run.model.eos_id:
        return f"{what} it goes on after EOS, with which an output ends even if more tokens were allowed"
    if got[: len(right)] == right:
        return f"{what} max_new_tokens is {one.most}, and the pass over the prompt yields the first of them"
    if right[:-1] == got and len(one.tokens_at) == len(right) and right[-1] == run.model.eos_id:
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
    given = [other.came[n][1] for other in run.requests.values() for n, row in enumerate(other.rows) if row[0] == at]
    if not one.suspect and got[place : place + 1] and got[place] in given:
        return f"{what}. {ORDER}"
    if one.suspect:
        return one.suspect
    if others := [other.id for other in run.requests.values() if other.output == got and other.arrived]:
        return f"{what}: these are the tokens of request {others[0]}. Know outputs by their request's id"
    if any(start < end for (_, start, _), end in zip(one.rows[1:], (s + n for _, s, n in one.rows), strict=False)):
        return (
            f"{what}, after a preemption. The tokens generated before it are part of the request's text: they are "
            "computed again, and not generated again"
        )
    return f"{what}, although its rows were computed right. {ORDER}"


def too_expensive(milestone: str, measure: str, run, what: str) -> str:
    """Return the idea that a run which costs too much has missed; `what` says what it costs."""
    requests, rows = run.requests.values(), run.workload.rows
    if measure == "stalls":
        stalls = ((at + 1, one.id) for one in requests for at in one.tokens_at[:-1] if at + 1 not in one.tokens_at)
        at, number = min(stalls)
        return (
            f"lets request {number} wait in pass {at}, although it has begun its output and a decode needs one token. "
            "Decodes come first in every pass, and prompts are computed in what is left of max_tokens_per_step"
        )
    of_prompts, is_paged = measure == "prompt tokens", milestone == "engine_paged"
    return next(why for applies, why in [
        (of_prompts and not any(one.rows[0][1] for one in requests), "computes every prompt from its first token: "
         f"{what}. Full blocks that begin alike hold the same keys"),
        (of_prompts, f"shares too little: {what}. A block stays cached after its request has finished, until memory is "
         "needed, and what was used longest ago goes first"),
        (run.after_end, f"computes rows of requests that have finished: {what}. Their outputs are complete, so they "
         "leave the batch, even if the other rows go on"),
        (run.widest == 1 < rows, f"runs one request at a time: {what}. Rows share a pass, which takes hardly longer "
         f"with {rows} of them"),
        (run.reserved > 1 and is_paged, f"takes blocks before they are needed: {what}. A reserved slot is empty for as "
         "long as its token does not exist, and an output may end long before max_new_tokens"),
        (run.restarts and not is_paged, f"computes tokens again whose keys are in the cache: {what}. Once the prompt "
         "is computed, each pass needs only the newest token"),
        (measure == "tokens generated again", f"generates tokens again after a preemption: {what}. They are known, "
         "part of the request's text, and are computed together with the prompt"),
        (any(run.victims), f"preempts requests that have run longest: {what}. The oldest has computed the most, all of "
         "which is computed again; the newest loses the least"),
        (milestone == "engine_continuous" and run.joined_late and run.left_free, "waits until all rows have finished: "
         f"{what}. A free row can go to a waiting request before the next pass"),
        (run.small > 1, f"computes smaller chunks of prompts than fit: {what}. A pass has room for max_tokens_per_step "
         "tokens, and what its decodes leave is for prompts"),
        (True, f"leaves rows free in its passes while requests wait, {run.left_free} in all: {what}. All that fits "
         "into a pass runs in it, prompts beside one another and beside decodes"),
    ] if applies)  # fmt: skip

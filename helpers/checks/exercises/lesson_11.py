"""Lesson 11, many replicas: reports of caches, streams that are resumed and delivered once, a contest of routers."""

from collections.abc import Callable
from random import Random

from ..exercise import Exercise, JudgedExercise, Passed
from ..routing import SIGNATURE, baselines, score_route, standing

# --- cached_on ------------------------------------------------------------------------------------------------------

cached_on = Exercise(
    "cached_on(reports, hashes, replicas)",
    "a chain of hashes tells how much of a prompt each replica has, up to the first block that is missing",
)


@cached_on.cases
def _(random):
    for reports, hashes, replicas in [
        ([(0, "a", True), (0, "b", True), (1, "a", True), (0, "b", False)], ["a", "b"], 2),
        ([], ["a", "b"], 3),
        ([(0, "b", True), (0, "c", True), (1, "a", True), (1, "c", True)], ["a", "b", "c"], 2),
        ([(1, "a", True), (1, "b", True), (0, "a", True), (1, "a", False)], ["a", "b"], 2),
        ([(0, "a", True), (0, "a", False), (0, "b", True), (0, "a", True)], ["a", "b", "c"], 1),
        ([(0, "a", True), (1, "x", True), (1, "y", True), (0, "y", True)], ["a", "b"], 2),
        ([(2, "a", True), (2, "b", True), (2, "c", True), (0, "a", True), (0, "c", True)], ["a", "b", "c"], 3),
        _drawn_reports(random),
        _drawn_reports(random),
    ]:
        given = f"reports {reports}, the prompt's hashes {hashes}, {replicas} replicas"
        yield (reports, hashes, replicas), given


def _drawn_reports(random: Random) -> tuple[list, list[str], int]:
    reports = [(random.randrange(3), random.choice("abcd"), random.random() < 0.7) for _ in range(14)]
    return reports, list("abcd"), 3


def by_order(reports):
    known = {}
    for replica, digest, is_cached in reports:
        known[replica, digest] = is_cached
    return {pair for pair, is_cached in known.items() if is_cached}


def until_the_first_missing(present):
    return present.index(False) if False in present else len(present)


@cached_on.reference
def leading_blocks(
    reports, hashes, replicas, known=by_order, measure=until_the_first_missing, of=lambda replica: {replica}
):
    """Count blocks, with replaceable parts: what is known, how blocks are counted, and whose reports count."""
    pairs = known(reports)
    return [
        measure([any((one, digest) in pairs for one in of(replica)) for digest in hashes])
        for replica in range(replicas)
    ]


cached_on.add_misconceptions({
    "drops a block for good once it has been evicted: it can be cached again, so its last report counts.":
        {"known": lambda reports: {one[:2] for one in reports} - {one[:2] for one in reports if not one[2]}},
    "counts blocks after a missing one. Keys and values depend on everything before them, and the prompt is computed "
    "from the first missing block on.": {"measure": sum},
    "counts a prompt only if all of its blocks are cached: a replica that has the first ones need not compute those.":
        {"measure": lambda present: len(present) * all(present)},
    "counts blocks of other replicas: a block in one replica's memory helps no other replica.":
        {"of": lambda replica: range(9)},
    "counts missing blocks, if a later one is cached: a replica can use only the blocks before the first gap.":
        {"measure": lambda present: max((place + 1 for place, one in enumerate(present) if one), default=0)},
    "counts the blocks that are missing instead of those that are cached.":
        {"measure": lambda present: len(present) - until_the_first_missing(present)},
})  # fmt: skip
for _counts in (lambda report: report[2], lambda report: True):
    cached_on.misconception(
        "ignores that blocks are evicted: a report with False takes a block away.",
        lambda *case, counts=_counts: leading_blocks(
            *case, known=lambda reports: {r[:2] for r in reports if counts(r)}
        ),
    )

# --- resume ---------------------------------------------------------------------------------------------------------

resume = Exercise(
    "resume(prompt, outputs, max_tokens)",
    "an output continues from its tokens alone, and what counts tokens or draws goes on counting",
)


@resume.cases
def _(random):
    drawn = [([random.randint(10, 40) for _ in range(random.randint(1, 6))], random.random() < 0.3) for _ in range(4)]
    for prompt, outputs, max_tokens in [
        ([5, 6], [([7], False), ([8, 9], True)], 4),
        ([5, 6, 7], [([8, 9], False)], 10),
        ([5], [([], False)], 3),
        ([5, 6], [([1, 2, 3], True), ([4, 5], False), ([6], False)], 8),
        ([9, 8, 7, 6], [([1, 2], False), ([3], False)], 3),
        ([3, 4], [([1, 2], True), ([5], True)], 6),
        ([random.randint(10, 40) for _ in range(random.randint(2, 7))], drawn, 9),
    ]:
        given = f"the prompt {prompt}, (tokens, finished) of each output {outputs}, max_tokens {max_tokens}"
        yield (prompt, outputs, max_tokens), given


@resume.reference
def from_tokens(
    prompt,
    outputs,
    max_tokens,
    names=lambda unfinished: [index for index, _ in unfinished],
    text=lambda prompt, tokens: prompt + tokens,
    left=lambda prompt, tokens, most: most - len(tokens),
    skip=lambda prompt, tokens, outputs: len(tokens),
    all_outputs=False,
):
    """Resume outputs, with replaceable parts: their numbers, the text, the tokens left, the draws to skip."""
    kept = [(index, tokens) for index, (tokens, finished) in enumerate(outputs) if all_outputs or not finished]
    return [
        (name, text(prompt, tokens), left(prompt, tokens, max_tokens), skip(prompt, tokens, outputs))
        for name, (_, tokens) in zip(names(kept), kept, strict=True)
    ]


resume.add_misconceptions({
    "resumes outputs that have finished: their clients would get more tokens than the model generated.":
        {"all_outputs": True},
    "numbers the outputs anew: the client knows them by their numbers, and the seed of each depends on its number.":
        {"names": lambda unfinished: list(range(len(unfinished)))},
    "computes the prompt only: the model would generate the delivered tokens again, and the client would get them "
    "twice.":
        {"text": lambda prompt, tokens: prompt},
    "leaves out the prompt: every token depends on it.": {"text": lambda prompt, tokens: tokens},
    "leaves out the last delivered token. It has no keys and values yet, but it is part of the text.":
        {"text": lambda prompt, tokens: prompt + tokens[:-1]},
    "puts the output before the prompt.": {"text": lambda prompt, tokens: tokens + prompt},
    "allows max_tokens further tokens: those that were delivered count, too.": {"left": lambda p, t, most: most},
    "counts the prompt's tokens against max_tokens, which limits the output.":
        {"left": lambda p, t, most: most - len(p) - len(t)},
    "allows one token less than is left.": {"left": lambda p, t, most: most - len(t) - 1},
    "allows one token more than is left.": {"left": lambda p, t, most: most - len(t) + 1},
    "begins with the first draw again. The delivered tokens have used one draw each, and the next token needs the "
    "draw after them.": {"skip": lambda p, t, o: 0},
    "skips a draw for each token of the prompt, too: only generated tokens are drawn.":
        {"skip": lambda p, t, o: len(p) + len(t)},
    "skips one draw too many: with n tokens delivered, n draws were used.": {"skip": lambda p, t, o: len(t) + 1},
    "skips one draw too few: the draw of the last delivered token would be used again.":
        {"skip": lambda p, t, o: max(0, len(t) - 1)},
    "skips the draws of all outputs: each output has a random generator of its own.":
        {"skip": lambda p, t, o: sum(len(tokens) for tokens, _ in o)},
})  # fmt: skip

# --- deliver --------------------------------------------------------------------------------------------------------

deliver = Exercise(
    "deliver(events)",
    "tokens count only if the sender still has the request, so none is delivered twice",
)


@deliver.cases
def _(random):
    for events in [
        [("assign", "x", "A"), ("tokens", "A", "x", [5, 6]), ("lost", "A"), ("assign", "x", "B"),
         ("tokens", "A", "x", [7]), ("tokens", "B", "x", [7, 8])],
        [("assign", "x", "A"), ("assign", "y", "B"), ("tokens", "B", "y", [1]), ("tokens", "A", "x", [2]),
         ("tokens", "B", "y", [3])],
        [("assign", "x", "A"), ("tokens", "A", "x", [4]), ("lost", "A"), ("tokens", "A", "x", [5]),
         ("assign", "x", "B"), ("tokens", "B", "x", [5, 6])],
        [("assign", "x", "A"), ("assign", "y", "A"), ("tokens", "A", "y", [3, 4]), ("lost", "A"),
         ("assign", "x", "B"), ("assign", "y", "C"), ("tokens", "B", "y", [5]), ("tokens", "C", "y", [5]),
         ("tokens", "C", "x", [9])],
        [("assign", "x", "A"), ("lost", "B"), ("tokens", "A", "x", [1, 2]), ("tokens", "A", "x", [3])],
        [("assign", "x", "A"), ("tokens", "A", "x", [1]), ("lost", "A"), ("assign", "x", "B"),
         ("tokens", "B", "x", [2]), ("lost", "B"), ("assign", "x", "C"), ("tokens", "A", "x", [2]),
         ("tokens", "C", "x", [3]), ("tokens", "B", "x", [3])],
        [("assign", "x", "A"), ("tokens", "A", "x", [1]), ("assign", "x", "B"), ("tokens", "A", "x", [2]),
         ("tokens", "B", "x", [2]), ("assign", "y", "B")],
        [("assign", "x", "A"), ("assign", "y", "B"), ("assign", "z", "C"), ("tokens", "C", "z", [4]),
         ("assign", "z", "B"), ("tokens", "B", "z", [5]), ("tokens", "C", "z", [5, 6])],
        _drawn_events(random),
    ]:  # fmt: skip
        yield (events,), f"events {events}"


def _drawn_events(random: Random) -> list[tuple]:
    """Return three requests whose replicas A and B are lost one after the other, with late outputs."""
    events, owner = [("assign", request, "A") for request in "xyz"], dict.fromkeys("xyz", "A")
    for lost, heir in (("A", "B"), ("B", "C")):
        for _ in range(4):
            request = random.choice("xyz")
            events.append(("tokens", owner[request], request, [random.randint(1, 9)]))
        events.append(("lost", lost))
        events.append(("tokens", lost, random.choice("xyz"), [random.randint(1, 9)]))
        for request in "xyz":
            events.append(("assign", request, heir))
            owner[request] = heir
        events.append(("tokens", lost, random.choice("xyz"), [random.randint(1, 9)]))
        events.append(("tokens", heir, random.choice("xyz"), [random.randint(1, 9)]))
    return events


@deliver.reference
def by_owner(
    events,
    accepts=lambda owner, sender, had, lost: owner == sender,
    loses=True,
    assigned=lambda old, new: new,
    restarts=False,
    empty=True,
):
    """Deliver tokens, with replaceable parts: whose tokens count, what a loss and an assignment change."""
    owner, had, streams, lost = {}, {}, {}, set()
    for kind, *rest in events:
        if kind == "assign":
            request, replica = rest
            owner[request] = assigned(owner.get(request), replica)
            had.setdefault(request, set()).add(replica)
            if restarts or request not in streams:
                streams[request] = []
        elif kind == "lost":
            lost.add(rest[0])
            for request, replica in owner.items():
                if loses and replica == rest[0]:
                    owner[request] = None
        elif accepts(owner[rest[1]], rest[0], had[rest[1]], lost):
            streams[rest[1]] = streams[rest[1]] + rest[2]
    return {request: tokens for request, tokens in streams.items() if empty or tokens}


deliver.add_misconceptions({
    "delivers tokens from any replica, even from one that no longer has the request. The next replica computes these "
    "tokens again, so the client gets them twice.": {"accepts": lambda owner, sender, had, lost: True},
    "delivers late tokens: a replica that once had the request may still send some after the request has moved.":
        {"accepts": lambda owner, sender, had, lost: sender in had},
    "delivers tokens of a lost replica until the request is assigned again. The next replica continues after what was "
    "delivered before the loss.": {"loses": False},
    "drops only the tokens of lost replicas: a request can also move away from a replica that is still running.":
        {"accepts": lambda owner, sender, had, lost: sender not in lost},
    "delivers tokens of a request's first replica only: once the request has moved, those of the next one count.":
        {"assigned": lambda old, new: old or new, "loses": False},
    "begins the stream anew when the request moves. The client has the earlier tokens, and the next replica sends only "
    "new ones.": {"restarts": True},
    "leaves out requests without tokens: their streams are empty lists.": {"empty": False},
})  # fmt: skip

# --- recomputed -----------------------------------------------------------------------------------------------------

recomputed = Exercise(
    "recomputed(requests, shared, block_size)",
    "a lost replica costs a prefill of prompts and outputs, less the blocks that the next replica has cached",
)


@recomputed.cases
def _(random):
    for requests, shared, size in [
        ([(10, 3)], 0, 4),
        ([(10, 3)], 9, 4),
        ([(130, 10), (130, 10)], 128, 16),
        ([(130, 10), (60, 5), (129, 1)], 70, 16),
        ([(8, 4)], 12, 4),
        ([(8, 4), (9, 9)], 30, 4),
        ([(8, 5), (20, 1)], 13, 4),
        ([(7, 2), (5, 1)], 3, 4),
        ([(random.randint(20, 60), random.randint(1, 30)) for _ in range(4)], random.randint(17, 70), 8),
    ]:
        given = f"(prompt, output) tokens {requests}, the first {shared} of each text shared, blocks of {size}"
        yield (requests, shared, size), given


@recomputed.reference
def prefill_again(
    requests,
    shared,
    size,
    text=lambda prompt, output: prompt + output,
    most=lambda tokens, prompt: tokens - 1,
    whole=lambda tokens, size: tokens // size * size,
    times=lambda place: 1,
):
    """Count tokens, with replaceable parts: the text, what can be cached of it, full blocks, and for which requests."""
    return sum(
        text(prompt, output) - times(place) * whole(min(shared, most(text(prompt, output), prompt)), size)
        for place, (prompt, output) in enumerate(requests)
    )


recomputed.add_misconceptions({
    "counts the prompts only: the keys and values of the outputs are lost, too.":
        {"text": lambda prompt, output: prompt},
    "counts the outputs only: the keys and values of the prompts are lost, too.":
        {"text": lambda prompt, output: output},
    "counts all tokens: full blocks that the next replica has cached are not computed again.":
        {"whole": lambda tokens, size: 0},
    "counts tokens of a block that is not full as cached: only full blocks have a hash and can be shared.":
        {"whole": lambda tokens, size: tokens},
    "counts a block as cached although only a part of it is shared.":
        {"whole": lambda tokens, size: -(-tokens // size) * size},
    "computes nothing for a text that is cached as a whole: its last token is computed for the logits of the next one.":
        {"most": lambda tokens, prompt: tokens},
    "counts the shared blocks for one request only: each request finds them in the cache.":
        {"times": lambda place: place == 0},
    "leaves out the last token of each text. It was delivered, but its keys and values are still to be computed.":
        {"text": lambda prompt, output: prompt + output - 1},
})  # fmt: skip
for _last in (0, 1):  # with and without the last token of the prompt
    recomputed.misconception(
        "looks for shared blocks in the prompts only: the delivered tokens are part of the texts.",
        lambda *case, last=_last: prefill_again(*case, most=lambda tokens, prompt: min(prompt - last, tokens - 1)),
    )

# --- route ----------------------------------------------------------------------------------------------------------

MOST_TOKENS = {"even": 0.7, "popular": 0.9, "long": 0.6}  # of those that the least loaded replica computes
MOST_LATE = 5  # iterations, the p95 of TTFT


def _judge(route: Callable, seed: int) -> str | Passed:
    stands = []
    for workload, share in MOST_TOKENS.items():
        score, known = score_route(route, workload, seed), baselines(workload, seed)["least outstanding tokens"]
        stands.append(standing(score, workload, seed))
        if score.late > MOST_LATE:
            return (
                f"lets requests wait: the p95 of TTFT is {score.late:.1f} iterations on {workload!r}, and at most "
                f"{MOST_LATE} are allowed. Does a replica with a long queue still get requests?"
            )
        if score.prompt_tokens > share * known.prompt_tokens:
            return (
                f"computes {score.prompt_tokens:,} prompt tokens on {workload!r}. The least loaded replica for each "
                f"request computes {known.prompt_tokens:,}, and at most {share:.0%} of that are allowed. Which replica "
                "has most of the prompt cached, and would the request have to wait there?"
            )
    return Passed("\n  ".join(["Your function:", *stands]))


route = JudgedExercise(
    SIGNATURE, "the cache saves tokens, and a request goes elsewhere only where it would have to wait", _judge
)

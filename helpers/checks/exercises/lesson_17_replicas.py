"""Lesson 17, many replicas: reports of caches, streams that are resumed and delivered once, a contest of routers."""

from collections.abc import Callable
from random import Random

from ..exercise import Exercise, JudgedExercise, Passed
from ..routing import SIGNATURE, baselines, score_route, standing

cached_on = Exercise(
    "cached_on(reports, hashes, replicas)",
    "a chain of hashes tells how much of a prompt each replica has, up to the first block that is missing",
)


cached_on.table(
    [
        ([(0, "a", True), (0, "b", True), (1, "a", True), (0, "b", False)], ["a", "b"], 2), ([], ["a", "b"], 3),
        ([(0, "b", True), (0, "c", True), (1, "a", True), (1, "c", True)], ["a", "b", "c"], 2),
        ([(1, "a", True), (1, "b", True), (0, "a", True), (1, "a", False)], ["a", "b"], 2),
        ([(0, "a", True), (0, "a", False), (0, "b", True), (0, "a", True)], ["a", "b", "c"], 1),
        ([(0, "a", True), (1, "x", True), (1, "y", True), (0, "y", True)], ["a", "b"], 2),
        ([(2, "a", True), (2, "b", True), (2, "c", True), (0, "a", True), (0, "c", True)], ["a", "b", "c"], 3),
        ([(0, "b", True), (0, "a", True), (1, "a", False), (1, "a", True)], ["b", "a"], 2),
        ([(0, "a", True), (0, "a", True), (0, "a", False), (1, "a", True), (1, "a", True)], ["a"], 2),
        ([(0, "a", True)], [], 2),
    ],
    lambda random: [
        ([(random.randrange(3), random.choice("abcd"), random.random() < 0.7) for _ in range(14)], list("abcd"), 3)
    ],
    given="reports {}, the prompt's hashes {}, {} replicas",
)  # fmt: skip


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

resume = Exercise(
    "resume(prompt, outputs, max_tokens)",
    "an output continues from its tokens alone, and what counts tokens or draws goes on counting",
)


resume.table(
    [
        ([5, 6], [([7], False), ([8, 9], True)], 4), ([5, 6, 7], [([8, 9], False)], 10), ([5], [([], False)], 3),
        ([5, 6], [([1, 2, 3], True), ([4, 5], False), ([6], False)], 8),
        ([9, 8, 7, 6], [([1, 2], False), ([3], False)], 3), ([3, 4], [([1, 2], True), ([5], True)], 6),
        ([0, 300], [([0, 0], False), ([], False), ([0, 0], False)], 5),
    ],
    lambda random: [([25, 40, 12], [(random.choices(range(40), k=n), random.random() < 0.3) for n in (3, 1, 6)], 9)],
    given="the prompt {}, (tokens, finished) of each output {}, max_tokens {}",
)  # fmt: skip


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

deliver = Exercise(
    "deliver(events)",
    "tokens count only if the sender still has the request, so none is delivered twice",
)


@deliver.cases
def _(random):
    for what, story in [
        ("a late replica", "x:A A>x56 lost:A x:B A>x7 B>x78"), ("two requests", "x:A y:B B>y1 A>x2 B>y3"),
        ("tokens after the loss", "x:A A>x4 lost:A A>x5 x:B B>x56"),
        ("two requests of a lost replica", "x:A y:A A>y34 lost:A x:B y:C B>y5 C>y5 C>x9"),
        ("another replica is lost", "x:A lost:B A>x12 A>x3"),
        ("two losses", "x:A A>x1 lost:A x:B B>x2 lost:B x:C A>x2 C>x3 B>x3"),
        ("a move without a loss", "x:A A>x1 x:B A>x2 B>x2 y:B"),
        ("a move to a busy replica", "x:A y:B z:C C>z4 z:B B>z5 C>z56"),
        ("a replica that comes back", "x:A A>x1 lost:A x:B B>x2 x:A B>x3 A>x3"),
        ("a replica that comes back with its request", "x:A A>x12 lost:A A>x9 x:A A>x3 A>x3"),
        ("equal tokens, one after the other", "x:A y:A A>x5 A>x5 A>x555 A>y5 lost:A x:B B>x5 B>x5"),
        ("a token of id 0, and no tokens", "x:A A>x0 A>x lost:A x:B B>x00"),
    ]:  # fmt: skip
        yield ([_event(text) for text in story.split()],), f"{what}: {story}"
    yield (_drawn_events(random),), "three requests, and two losses"


def _event(text: str) -> tuple:
    """Return an event: "x:A" assigns x to A, "A>x56" are A's tokens 5 and 6 for x, "lost:A" is a loss."""
    name, colon, replica = text.partition(":")
    if colon:
        return ("lost", replica) if name == "lost" else ("assign", name, replica)
    replica, _, tokens = text.partition(">")
    return "tokens", replica, tokens[0], list(map(int, tokens[1:]))


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
    "drops tokens that the stream has already. A text may contain a token several times: compare the senders, not the "
    "tokens.": lambda events: {name: list(dict.fromkeys(tokens)) for name, tokens in by_owner(events).items()},
    "drops all tokens of a replica that was once lost: it can come back, and get the request again.":
        {"accepts": lambda owner, sender, had, lost: owner == sender and sender not in lost},
    "drops only the tokens of lost replicas: a request can also move away from a replica that is still running.":
        {"accepts": lambda owner, sender, had, lost: sender not in lost},
    "delivers tokens of a request's first replica only: once the request has moved, those of the next one count.":
        {"assigned": lambda old, new: old or new, "loses": False},
    "begins the stream anew when the request moves. The client has the earlier tokens, and the next replica sends only "
    "new ones.": {"restarts": True},
    "leaves out requests without tokens: their streams are empty lists.": {"empty": False},
})  # fmt: skip

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

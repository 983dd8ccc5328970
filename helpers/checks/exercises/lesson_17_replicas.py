"""Lesson 17, many replicas: streams that are resumed and delivered once, a contest of routers."""

from collections.abc import Callable

from ..exercise import Exercise, JudgedExercise, Passed
from ..routing import SIGNATURE, baselines, score_route, standing


@Exercise.declare("an output continues from its tokens alone, and what counts tokens or draws goes on counting")
def resume(prompt, outputs, max_tokens):
    return [
        (index, prompt + tokens, max_tokens - len(tokens), len(tokens))
        for index, (tokens, finished) in enumerate(outputs)
        if not finished
    ]


resume.table([
    ([5, 6], [([7], False), ([8, 9], True)], 4), ([5, 6, 7], [([8, 9], False)], 10), ([5], [([], False)], 3),
    ([5, 6], [([1, 2, 3], True), ([4, 5], False), ([6], False)], 8), ([9, 8, 7, 6], [([1, 2], False), ([3], False)], 3),
    ([3, 4], [([1, 2], True), ([5], True)], 6), ([0, 300], [([0, 0], False), ([], False), ([0, 0], False)], 5),
], lambda random: [([25, 40, 12], [(random.choices(range(40), k=n), random.random() < 0.3) for n in (3, 1, 6)], 9)],
   given="the prompt {}, (tokens, finished) of each output {}, max_tokens {}")  # fmt: skip

resume.add_misconceptions({
    "resumes outputs that have finished: clients would get more tokens than they should.": "if not finished -> ",
    "computes the prompt only: the model would generate the delivered tokens again, and the client would get them "
    "twice.": "prompt + tokens -> prompt",
    "leaves out the last delivered token. It has no keys and values yet, but it is part of the text.":
        "prompt + tokens -> prompt + tokens[:-1]",
    "allows max_tokens further tokens: those that were delivered count, too.": "max_tokens - len(tokens) -> max_tokens",
    "numbers the outputs anew: the client knows them by their numbers, and the seed of each depends on its number.":
        "enumerate(outputs) -> enumerate([output for output in outputs if not output[1]])",
    "begins with the first draw again. The delivered tokens have used one draw each, and the next token needs the "
    "draw after them.": ", len(tokens)) -> , 0)",
    "skips draws of the prompt or of other outputs: each output has a random generator of its own.": [
        f", len(tokens)) -> , {skips})" for skips in ("len(prompt + tokens)", "sum(len(ids) for ids, _ in outputs)")],
})  # fmt: skip


@Exercise.declare("tokens count only if the sender still has the request, so none is delivered twice")
def deliver(events):
    owner, streams = {}, {}
    for event in events:
        match event:
            case "assign", request, replica:
                owner[request] = replica
                streams.setdefault(request, [])
            case "lost", replica:
                owner = {request: own for request, own in owner.items() if own != replica}
            case "tokens", sender, request, tokens:
                if owner.get(request) == sender:
                    streams[request] += tokens
    return streams


def _event(text: str) -> tuple:
    """Return an event: "x:A" assigns x to A, "A>x56" are A's tokens 5 and 6 for x, "lost:A" is a loss."""
    name, colon, replica = text.partition(":")
    if colon:
        return ("lost", replica) if name == "lost" else ("assign", name, replica)
    replica, _, tokens = text.partition(">")
    return "tokens", replica, tokens[0], list(map(int, tokens[1:]))


def _drawn_story(random):
    def sent(replicas):
        drawn = [(random.choice(replicas), random.choice("xyz"), random.randint(1, 9)) for _ in range(5)]
        return " ".join(f"{replica}>{request}{token}" for replica, request, token in drawn)

    first = f"x:A y:A z:A {sent('A')} lost:A {sent('A')}"
    return f"{first} x:B y:B z:B {sent('AB')} lost:B {sent('AB')} x:C y:C z:C {sent('ABC')}"


deliver.table([
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
], lambda random: [("three requests, and two losses", _drawn_story(random))], given="{}",
   build=lambda random, story: [[_event(text) for text in story.split()]])  # fmt: skip

NO_LOSS = "own != replica -> True"
NOTES_LOST = "owner, streams = -> lost, owner, streams = set(),", "owner = { -> lost.add(replica); owner = {"
deliver.add_misconceptions({
    "delivers tokens from any replica, even from one that no longer has the request. The next replica computes these "
    "tokens again, so the client gets them twice.": "owner.get(request) == sender -> True",
    "delivers late tokens: a replica that once had the request may still send some after the request has moved.":
        (NO_LOSS, "owner[request] -> owner[request, replica]", "owner.get(request) -> owner.get((request, sender))"),
    "delivers tokens of a lost replica until the request is assigned again. The next replica continues after what was "
    "delivered before the loss.": NO_LOSS,
    "drops tokens that the stream has already. A text may contain a token several times: compare the senders, not the "
    "tokens.": "return streams -> return {name: list(dict.fromkeys(tokens)) for name, tokens in streams.items()}",
    "drops all tokens of a replica that was once lost: it can come back, and get the request again.":
        (*NOTES_LOST, "== sender -> == sender and sender not in lost"),
    "drops only the tokens of lost replicas: a request can also move away from a replica that is still running.":
        (*NOTES_LOST, "owner.get(request) == sender -> sender not in lost"),
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

"""Lesson 3: the student's own four verbs together, because two wrong verbs can agree with each other."""

from ..exercise import Exercise
from ..watch import LETTERS, outputs_on_model
from .lesson_3_joining import merge_batches
from .lesson_3_leaving import filter_batch
from .lesson_3_one_step import generate_next_token, init_batch

VERBS = "init_batch", "generate_next_token", "merge_batches", "filter_batch"
OUTPUTS = "the list of outputs"


@Exercise.declare(
    "your four verbs together give every request the tokens that it gets alone",
    observe=outputs_on_model,
    forbidden=[f"helpers.batching:{verb}" for verb in VERBS],
)
def join_and_leave(first, second, model, tokenizer):
    """The second group joins after the first one's first decode step."""
    pair, step = (model, tokenizer), generate_next_token.solution
    running = step(step(init_batch.solution(first, *pair), *pair), *pair)
    joining = step(init_batch.solution(second, *pair), *pair)
    joining["request_ids"] = list(range(len(first), len(first + second)))
    running = merge_batches.solution(running, joining)
    outputs = {}
    while running["request_ids"]:
        outputs |= dict(zip(running["request_ids"], running["token_ids"], strict=True))
        running, _ = filter_batch.solution(running)
        running = step(running, *pair) if running["request_ids"] else running
    return [outputs[number] for number in range(len(outputs))]


join_and_leave.add_misconceptions({
    "loses the outputs of the requests that join: record a request's tokens before its row leaves.":
        "range(len(outputs)) -> range(len(first))",
    "loses the last token of each output: record a request's tokens before its row leaves.":
        "[outputs[number] for -> [outputs[number][:-1] for",
})  # fmt: skip
join_and_leave.ignoring(lambda result, arguments: {OUTPUTS: result[OUTPUTS]})


def _drawn(random):
    texts = ["".join(random.choices(LETTERS, k=random.randint(1, 9))) for _ in range(3)]
    return [(text, random.choices(range(20), k=n % 3), n + random.randint(1, 6)) for n, text in enumerate(texts)]


join_and_leave.table([
    ("course", [("The rain in Spain", [], 2), ("Look", [], 9), ("Many hands make", [], 1)], [("What goes", [], 5)]),
    ("course", [("Look", [], 7)], [("Once upon a time, a brave", [], 3), ("Look", [], 4), ("Many", [8, 3], 9)]),
    ("other", [("a pad<pad>", [0], 7), ("<eos>an EOS", [], 3), ("abc", [], 12)], [("abc", [7], 9), ("a", [], 1)]),
    ("other", [("a", [], 1)], [("long text", [], 6), ("ab", [0, 0], 5)]),
], lambda random: [("other", _drawn(random), _drawn(random))],
   given="on the {} model, first {}, second {}", build=lambda random, name, *groups: (*groups, name, name))  # fmt: skip


@join_and_leave.rule
def every_output_is_right(arguments, outcome, right):
    got, wanted = outcome.result[OUTPUTS], right.result[OUTPUTS]
    if len(got) != len(wanted):
        return f"returns {len(got)} outputs for {len(wanted)} request{'s' * (len(wanted) != 1)}"
    for number, (output, due) in enumerate(zip(got, wanted, strict=True)):
        if output != due:
            return (
                f"gives request {number} the tokens {output}, and alone it gets {due}. Each verb has passed its own "
                "check, so two of them agree on something wrong: compare the mask and the positions after each verb"
            )
    came, due = outcome.result["rows"], right.result["rows"]
    if max(came, default=0) < 2:
        return "runs one row at a time: the requests share a batch"
    if came[0] > due[0]:
        return f"begins with {came[0]} rows: `first` has {due[0]}, and the second group joins after a decode step"
    if len(came) > len(due):
        return f"runs {len(came)} forward passes, and {len(due)} are enough: once merged, both groups share each pass"
    if came[-1] > max(due[-2:]):
        return f"computes {came[-1]} rows in its last pass: those whose outputs are complete leave"
    return None

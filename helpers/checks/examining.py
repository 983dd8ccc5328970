"""Examine a function: ask all questions, compare with the reference, and find the message that explains the results.

The first of these that applies is reported: a function that is not written yet or does not end, a misconception that
explains all results, an exception, a changed argument, a result of the wrong kind, a broken invariant, the first
difference.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .calling import Outcome, Question
from .comparing import NO_RETURN, Difference, Grids, difference, first_line
from .exercise import Exercise, JudgedExercise, Passed, Wrong

PURE = "Return a new object and leave the arguments unchanged: otherwise, a cell that runs twice gives two results."


@dataclass(frozen=True)
class Verdict:
    """Whether a function passed, the message, what to draw beside it, and its standing in a contest."""

    passed: bool
    message: str
    grids: Grids | None = None
    score: Mapping[str, tuple[int, int]] | None = None


def examine(exercise: Exercise | JudgedExercise, ask: Callable[[Question], Outcome], seed: int = 0) -> Verdict:
    """Examine a function.

    Args:
        exercise: what the function should do.
        ask: puts a question to the function, here or in another process.
        seed: of the cases.
    """
    idea = f"passed. {exercise.idea[0].upper()}{exercise.idea[1:]}."
    if isinstance(exercise, JudgedExercise):
        judged = _judge(exercise, ask, seed)
        if isinstance(judged, str):
            return Verdict(False, judged)
        return Verdict(True, f"{idea} {judged.details}", score=judged.score) if judged else Verdict(True, idea)
    asked = []
    for question, right in exercise.questions(seed):
        outcome = ask(question)
        if outcome.failure and outcome.failure.is_final:
            return Verdict(False, outcome.failure.message)
        asked.append((question, outcome, right))
    try:
        none_is_a_result = any(right.result is None for _, _, right in asked)
        trials = [_Trial(exercise, *each, none_is_a_result) for each in asked]
        return _explain(exercise, trials, [trial for trial in trials if trial.first]) or Verdict(True, idea)
    except Exception as error:  # raised by methods of the result
        what = f"{type(error).__name__}: {first_line(str(error))}"
        return Verdict(False, f"returns something that cannot be compared ({what}).")


def _explain(exercise: Exercise, trials: list["_Trial"], wrong: list["_Trial"]) -> Verdict | None:
    for misconception in exercise.misconceptions if wrong else ():
        if all(trial.is_explained_by(misconception.function) for trial in trials):
            return wrong[0].verdict(misconception.message)
    for trial in wrong:
        if trial.outcome.failure:
            return trial.verdict(trial.outcome.failure.message)
        if trial.first.is_of_kind or trial.first.path[0] != "result":
            return trial.verdict(trial.first.message)
    for trial in trials:
        if message := trial.broken_rule():
            return trial.verdict(message)
    return wrong[0].verdict(wrong[0].first.message) if wrong else None


def _judge(exercise: JudgedExercise, ask: Callable[[Question], Outcome], seed: int) -> str | Passed | None:
    def function(*arguments, given: str = "", **observed):
        outcome = ask(Question(exercise.signature, arguments, given, **observed))
        if outcome.failure:
            raise Wrong(f"{outcome.failure.message} (given: {given})" if given else outcome.failure.message)
        return outcome.result

    try:
        return exercise.judge(function, seed)
    except Wrong as wrong:
        return str(wrong)


class _Trial:
    def __init__(
        self, exercise: Exercise, question: Question, outcome: Outcome, right: Outcome, none_is_a_result: bool
    ):
        self.exercise, self.question, self.outcome, self.right = exercise, question, outcome, right
        self.first = self._difference(outcome, right)
        if self.first and none_is_a_result:  # a `return` need not be missing
            self.first = replace(self.first, message=self.first.message.replace(NO_RETURN, ""))

    def verdict(self, message: str) -> Verdict:
        given = f" (given: {self.question.given})" if self.question.given else ""
        first = self.first
        return Verdict(False, f"{message.rstrip('.')}{given}." if given else message, first and first.grids)

    def is_explained_by(self, function: Callable) -> bool:
        """Return whether another implementation does the same here."""
        other = self.exercise.outcome_of(function, self.question)
        return self._difference(self.outcome, other, strict=False) is None

    def broken_rule(self) -> str | None:
        for rule in self.exercise.rules:
            try:
                if message := rule(self.question.arguments, self.outcome, self.right):
                    return message
            except Exception:
                if self.first is None:  # otherwise, the result is so different that the difference says more
                    raise
        return None

    def _relevant(self, outcome: Outcome):
        try:
            return self.exercise.ignore(outcome.result, self.question.arguments)
        except Exception:  # the result is so different that nothing can be blanked out of it
            return outcome.result

    def _difference(self, outcome: Outcome, other: Outcome, strict: bool = True) -> Difference | None:
        if outcome.failure or other.failure:
            same = outcome.failure and other.failure and _kind_of(outcome) == _kind_of(other)
            return None if same else Difference(("failure",), "")
        for name, argument, before, after in zip(
            self.exercise.parameters, outcome.arguments, self.question.arguments, other.arguments, strict=False
        ):
            if strict and difference(after, before, strict=False) is None:
                if changed := difference(argument, before, name=f"`{name}`"):
                    what = f"changed its argument: {changed.what} is no longer what it was. {PURE}"
                    return Difference((name,), what, changed.grids)
            elif changed := difference(argument, after, name=f"`{name}`", strict=strict):
                return Difference((name,), changed.message, changed.grids)
        found = difference(self._relevant(outcome), self._relevant(other), self.exercise.names, strict=strict)
        return found and replace(found, path=("result", *found.path))


def _kind_of(outcome: Outcome) -> tuple[str, str]:
    """Return an exception's type and text, without its numbers and names."""
    return outcome.failure.error, re.sub(r"\d+|'.*?'", "#", outcome.failure.said)

"""The declaration of an exercise: a reference implementation, cases, and misconceptions as edits of it.

    @Exercise.declare("twice the number")
    def double(number):
        return number + number

    double.table([(3,), ("an even number", 4)], lambda random: [(random.randrange(100),)])
    double.add_misconceptions({
        "squares the number: twice 3 is 6, not 9.": "number + number -> number * number",
    })

The claim: a right answer passes however it is written. A wrong answer gets the message of a misconception if
that explains all its results; otherwise, the message describes the first difference.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from .calling import Outcome, Question, answer, call
from .edits import Edit, edited


@dataclass(frozen=True)
class Misconception:
    """A plausible wrong implementation, and the message for students whose function does the same."""

    message: str
    function: Callable


class Exercise:
    """A task for a student.

    Args:
        signature: how the function is called, such as "left_pad(rows, pad_id)".
        idea: what a student who passes has understood; it follows "passed." in the message.
        names: the names of the parts of a result that is a tuple.
        observe, forbidden: see `Question`.
    """

    def __init__(
        self,
        signature: str,
        idea: str,
        *,
        names: tuple[str, ...] = (),
        observe: Callable = call,
        forbidden: Iterable[str] = (),
    ):
        self.signature, self.idea, self.names = signature, idea, names
        self.name, _, parameters = signature.rstrip(")").partition("(")
        self.parameters = tuple(parameters.split(", "))
        self.misconceptions: list[Misconception] = []
        self.rules: list[Callable] = []
        self.ignore: Callable = lambda result, arguments: result
        self._observe, self._forbidden = observe, tuple(forbidden)
        self._cases: Callable[[Random], Iterable[tuple[tuple, str]]]
        self.solution: Callable
        # A student checks a function many times, and each time it is compared with all misconceptions.
        self.questions = lru_cache(4)(self._questions)
        self.outcome_of = lru_cache(2048)(lambda function, question: answer(replace(question, forbidden=()), function))

    @classmethod
    def declare(cls, idea: str, **settings) -> Callable[[Callable], "Exercise"]:
        """Return a decorator that turns a reference implementation into the exercise of its name.

        The task has the function's parameters, except for those with defaults: they replace parts of it.
        """

        def declared(function: Callable) -> Exercise:
            parameters = inspect.signature(function).parameters.values()
            names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
            exercise = cls(f"{function.__name__}({', '.join(names)})", idea, **settings)
            exercise.reference(function)
            return exercise

        return declared

    def cases(self, function: Callable) -> Callable:
        """Take a function that yields (arguments, the case in words), some of them drawn from a `Random`."""
        self._cases = function
        return function

    def table(
        self,
        rows: Iterable[tuple],
        drawn: Callable[[Random], Iterable[tuple]] = lambda random: (),
        given: str = "",
        build: Callable[..., Iterable] = lambda random, *row: row,
    ) -> None:
        """Take cases as tuples, with a text before them if the case has a name.

        Args:
            rows: the cases that decide, the same for all seeds.
            drawn: returns further cases, so that no function can know all results.
            given: a format for a row in words, with a {} for each value; by default, all parameters with their values.
            build: makes the arguments of a tuple, such as tensors of lists, with a `Random` before it.
        """
        width = given.count("{") or len(self.parameters)

        def cases(random: Random) -> Iterable[tuple[tuple, str]]:
            for row in [*rows, *drawn(random)]:
                *name, values = ("", row) if len(row) == width else (row[0], row[1:])
                texts = [text if len(text := str(value)) <= 200 else f"{text[:197]}..." for value in values]
                named = map(" ".join, zip(self.parameters, texts, strict=True))
                words = given.format(*texts) if given else ", ".join(named)
                yield tuple(build(random, *values)), ": ".join(filter(None, [*name, words]))

        self._cases = cases

    def reference(self, function: Callable) -> Callable:
        """Take the reference implementation."""
        self.solution = function
        return function

    def add_misconceptions(self, wrong: Mapping[str, Edit | Callable | list[Edit | Callable]]) -> None:
        """Take wrong implementations by their messages. The first that explains all results is reported.

        Args:
            wrong: from messages to edits of the reference, as `edited` takes them, or to functions. A list has variants
                that get the same message.
        """
        for message, given in wrong.items():
            for variant in given if isinstance(given, list) else [given]:
                function = variant if callable(variant) else edited(self.solution, variant)
                self.misconceptions.append(Misconception(message, function))

    def rule(self, function: Callable) -> Callable:
        """Take an invariant, for results that cannot be compared by value.

        It is called with (arguments, outcome, the reference's outcome) and returns what is wrong in words, or None.
        """
        self.rules.append(function)
        return function

    def ignoring(self, function: Callable) -> Callable:
        """Take a function of (result, arguments) that blanks out what makes no difference, such as the keys of pads."""
        self.ignore = function
        return function

    def _questions(self, seed: int = 0) -> list[tuple[Question, Outcome]]:
        """Return the questions and the right outcomes. Students get seed 0, and grades use other seeds.

        Raises:
            RuntimeError: the reference fails.
        """
        pairs = []
        for arguments, given in self._cases(Random(seed)):
            question = Question(self.signature, arguments, given, self._observe, self._forbidden)
            right = self.outcome_of(self.solution, question)
            if right.failure:
                raise RuntimeError(f"the reference of {self.name} failed: {right.failure.message} ({given})")
            pairs.append((question, right))
        return pairs


class JudgedExercise:
    """A task in which each question depends on the previous answers, such as a schedule that drives an engine.

    Args:
        signature, idea: as in `Exercise`.
        judge: called with a function that behaves like the student's and with a seed; returns what is wrong in words,
            or else None or `Passed`. It may raise `Wrong`.
    """

    def __init__(
        self, signature: str, idea: str, judge: Callable[[Callable, int], "str | Passed | None"], name: str = ""
    ):
        self.signature, self.idea, self.judge = signature, idea, judge
        self.name = name or signature.partition("(")[0]


@dataclass(frozen=True)
class Passed:
    """A judge's words on a function that passed, such as where it stands in a contest.

    Attributes:
        details: in words.
        score: for a leaderboard, by measure: the function's own value, and the course's.
    """

    details: str
    score: Mapping[str, tuple[int, int]] | None = None


class Wrong(Exception):
    """A student's function is wrong; the text is the message."""

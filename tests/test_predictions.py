"""A lesson compares a reader's guess with what it measures: always in one sentence, never with an exception."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.checks import compare_guess

ROOT = Path(__file__).parents[1]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def measured(answer, verdict):
    return f"Answer: {answer} tokens. Your guess of {verdict}."


@pytest.mark.parametrize(
    "guess, answer, sentence",
    [
        (400, 400, measured(400, "400 is exact")),
        (400.0, 400, measured(400, "400 is exact")),
        (361, 400, measured(400, "361 is within 10%")),
        (500, 400, measured(400, "500 is 1.25 times the answer")),
        (1000, 400, measured(400, "1,000 is 2.5 times the answer")),
        (100, 400, measured(400, "100 is 0.25 times the answer")),
        (0, 400, measured(400, "0 is too low by 400 tokens")),
        (5, 0, measured(0, "5 is too high by 5 tokens")),
        (0.03, 0.0312345, measured("0.0312", "0.03 is within 10%")),
        (torch.tensor(4), torch.tensor(4), measured(4, "4 is exact")),
        (" Static", "static", "Answer: static. Your guess is right."),
        ("continuous", "static", "Answer: static. You guessed continuous."),
        (("A", "b"), ["a", "b"], "Answer: a, b. Your guess is right."),
        (["b", "a"], ["a", "b"], "Answer: a, b. You guessed b, a."),
        ("400", 400, "Answer: 400 tokens. Your guess cannot be compared: write a number"),
    ],
)
def test_a_guess_is_compared_in_one_sentence(guess, answer, sentence):
    assert compare_guess(guess, answer, "tokens").startswith(sentence)


@pytest.mark.parametrize("answer, kind", [(400, "a number"), ("static", "text in quotes"), ([1, 2], "a list")])
def test_without_a_guess_or_with_one_of_another_kind_the_sentence_says_what_to_write(answer, kind):
    assert compare_guess(..., answer).endswith(f" You have not guessed yet: write {kind} in the cell above.")
    for guess in (None, float("nan"), {}, 3j, len, Unprintable(), 10**5000, torch.zeros(2)):
        assert f"cannot be compared: write {kind}" in compare_guess(guess, answer)


SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in sys.argv[1:]:
    shell.run_cell(cell, store_history=True)
"""


def test_a_reader_who_skips_a_question_is_not_told_about_the_guess_at_an_earlier_one():
    imports, guess = "from helpers.checks import compare_guess", "guess = 4  # rows"
    first, second = "print(compare_guess(guess, 4))", "print(compare_guess(guess, 5))"
    cells = [imports, guess, first, first, second, guess, second, f"guess = 5\n{second}"]
    command = [sys.executable, "-c", SHELL, *cells]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    verdicts = [line.partition(". ")[2] for line in result.stdout.splitlines()]
    exact, skipped = "Your guess of 4 is exact.", "You have not guessed yet: write a number in the cell above."
    assert verdicts == [exact, exact, skipped, "Your guess of 4 is 0.8 times the answer.", "Your guess of 5 is exact."]

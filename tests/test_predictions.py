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


@pytest.mark.parametrize(
    "guess, answer, sentence",
    [
        (400, 400, "Measured: 400 tokens. Your guess of 400 is exact."),
        (400.0, 400, "Measured: 400 tokens. Your guess of 400 is exact."),
        (361, 400, "Measured: 400 tokens. Your guess of 361 is within 10%."),
        (500, 400, "Measured: 400 tokens. Your guess of 500 is 25% too high."),
        (300, 400, "Measured: 400 tokens. Your guess of 300 is 25% too low."),
        (1000, 400, "Measured: 400 tokens. Your guess of 1,000 is 2.5 times the measured value."),
        (100, 400, "Measured: 400 tokens. Your guess of 100 is low: the measured value is 4 times as large."),
        (0, 400, "Measured: 400 tokens. Your guess of 0 is too low by 400 tokens."),
        (5, 0, "Measured: 0 tokens. Your guess of 5 is too high by 5 tokens."),
        (-4, 4, "Measured: 4 tokens. Your guess of -4 is too low by 8 tokens."),
        (0.03, 0.0312345, "Measured: 0.0312 tokens. Your guess of 0.03 is within 10%."),
        (torch.tensor(4), torch.tensor(4), "Measured: 4 tokens. Your guess of 4 is exact."),
    ],
)
def test_a_guessed_number_is_told_how_far_it_is_from_the_measured_one(guess, answer, sentence):
    assert compare_guess(guess, answer, "tokens") == sentence


@pytest.mark.parametrize(
    "guess, answer, sentence",
    [
        (True, True, "Answer: True. Your guess is right."),
        (False, True, "Answer: True. You guessed False."),
        (" Static", "static", "Answer: static. Your guess is right."),
        ("continuous", "static", "Answer: static. You guessed continuous."),
        (("A", "b"), ["a", "b"], "Answer: a, b. Your guess is right."),
        (["b", "a"], ["a", "b"], "Answer: a, b. You guessed b, a."),
    ],
)
def test_a_choice_is_right_or_it_is_said_what_was_guessed(guess, answer, sentence):
    assert compare_guess(guess, answer) == sentence


@pytest.mark.parametrize(
    "answer, kind", [(400, "a number"), (True, "True or False"), ("static", "text in quotes"), ([1, 2], "a list")]
)
@pytest.mark.parametrize("guess", [..., None])
def test_without_a_guess_the_sentence_says_what_to_write_and_where(guess, answer, kind):
    assert compare_guess(guess, answer).endswith(f" You have not guessed yet: write {kind} in the cell above.")


@pytest.mark.parametrize(
    "answer, kind", [(400, "a number"), (True, "True or False"), ("static", "text"), ([1], "list")]
)
@pytest.mark.parametrize(
    "guess",
    [float("nan"), {}, 3j, len, Unprintable(), 10**5000, torch.zeros(2)],
    ids=lambda guess: type(guess).__name__,
)
def test_a_guess_of_another_kind_gets_a_sentence_that_says_what_to_write(guess, answer, kind):
    sentence = compare_guess(guess, answer)
    assert "cannot be compared: write" in sentence and kind in sentence and len(sentence) < 150


def test_a_number_in_quotes_is_asked_for_without_them():
    assert "Your guess '400' cannot be compared: write a number without quotes" in compare_guess("400", 400)
    assert "Your guess True cannot be compared" in compare_guess(True, 1)


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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    verdicts = [line.partition(". ")[2] for line in done.stdout.splitlines()]
    exact, skipped = "Your guess of 4 is exact.", "You have not guessed yet: write a number in the cell above."
    assert verdicts == [exact, exact, skipped, "Your guess of 4 is 20% too low.", "Your guess of 5 is exact."]


def test_comparing_a_guess_loads_no_torch():
    code = "import sys; from helpers.checks import compare_guess; compare_guess(..., 3); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

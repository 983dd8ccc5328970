"""Misconceptions as edits: what an edit replaces, what it may use, and that an edit of nothing is an error."""

import pytest

from helpers.checks.edits import edited
from helpers.checks.exercise import Exercise


def longest(rows):
    width = max(map(len, rows))
    return [row for row in rows if len(row) == width]


class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


def test_an_edit_replaces_a_piece_wherever_it_is_and_leaves_the_function_as_it_was():
    rows = ["a", "bcd", "ef"]
    assert edited(longest, "max( -> min(")(rows) == ["a"]
    assert edited(longest, ("max( -> min(", "return [row for -> return [len(row) for"))(rows) == [1]
    assert edited(longest, "len -> ord")("abc") == ["c"]
    assert longest(rows) == ["bcd"]


def test_an_edit_may_use_names_that_the_reference_does_not():
    assert edited(longest, "max(map(len, rows)) -> statistics.mode(map(len, rows))")(["a", "b", "cd"]) == ["a", "b"]
    assert edited(longest, "max(map(len, rows)) -> math.floor(np.mean(list(map(len, rows))))")(["a", "bcd"]) == []


def test_a_class_can_be_edited():
    counter = edited(Counter, "+= 1 -> += 2")()
    assert (counter.add(), counter.add(), Counter().add()) == (2, 4, 1)


def test_an_edit_of_what_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="longest contains no 'minimum'"):
        edited(longest, "minimum -> maximum")


def test_variants_of_a_misconception_share_its_message_and_functions_are_taken_as_they_are():
    exercise = Exercise("longest(rows)", "the longest rows")
    exercise.reference(longest)
    exercise.add_misconceptions({"one": ["max( -> min(", ("== -> <", "max -> max")], "two": sorted})
    assert [each.message for each in exercise.misconceptions] == ["one", "one", "two"]
    assert [each.function(["bc", "a"]) for each in exercise.misconceptions] == [["a"], ["a"], ["a", "bc"]]

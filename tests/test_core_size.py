"""The measure of how much code a reader has to read, on a file whose lines can be counted by hand."""

import importlib.util

from tests.support.core_size import calls_of, lines_of_code

SOURCE = '''"""A docstring
of two lines."""

import functools  # code, with a comment


def called(x):
    """No code."""
    # no code either
    text = """a text
of two lines"""

    def inner():
        return text

    return inner() * x


class Class:
    """No code."""

    @functools.cache
    def method(self):
        return called(1)

    def not_called(self):
        return 2
'''


def test_lines_of_code_and_of_the_functions_that_a_call_runs_are_counted(tmp_path):
    path = tmp_path / "counted.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("counted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls = calls_of(lambda: module.Class().method(), tmp_path)
    assert len(lines_of_code(path)) == calls.lines_of_files == 13
    assert (calls.num_functions, calls.lines_of_functions) == (2, 9)  # inner() is a part of called()
    assert list(calls.lines) == [path]

"""The table of published figures is up to date, and the systems that it compares behave as their papers say."""

from pathlib import Path

import pytest

from benchmarks.figures import __main__ as program
from benchmarks.figures.replica import make_sequences, serve
from helpers.engine import EngineConfig

README = Path(program.__file__).with_name("README.md")


@pytest.mark.parametrize("paper", program.PAPERS)
def test_the_readme_has_the_figures_of_a_new_run(paper):
    lines = program.table({paper: program.PAPERS[paper].figures()}).splitlines()
    assert "\n".join(lines[2:]) in README.read_text(encoding="utf-8")
    assert all(line in README.read_text(encoding="utf-8") for line in lines[:2])


# --- a replica in simulated time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "arrivals", "times"),
    [
        ([3, 1], [0.0, 1.5], [[1.0, 2.0, 3.0], [3.0]]),  # the first iteration after its arrival
        ([1, 1], [0.0, 10.0], [[1.0], [11.0]]),  # an idle replica waits
    ],
)
def test_a_request_is_scheduled_in_the_first_iteration_after_its_arrival(outputs, arrivals, times):
    served = serve(make_sequences([3, 3], outputs, arrivals), EngineConfig(max_batch_size=2))
    assert [timed.token_times for timed in served] == times

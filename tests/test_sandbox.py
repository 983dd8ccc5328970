"""Grading as a whole: honest submissions get what they deserve, hostile ones nothing for what they did not do.

All are graded once, by what `make grade` runs, in the sandbox: starting PyTorch for each is what takes the time.
"""

import csv
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grade
import psutil
import pytest
import yaml
from grading import sandbox
from grading.examiners import Options
from grading.submissions import ASSIGNMENTS
from grading.worker_process import Limits, WorkerLostError, WorkerProcess
from handing_in import CAPSTONE, EVICTION, MEMO, ONE, ROOT, SOURCE, THREE, TWO, answers_of, hand_in, notebook, points_of
from handing_in import read as read_notebook

from helpers.checks.calling import Question

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("bwrap") and "CI_SANDBOX" not in os.environ, reason="needs bubblewrap"),
]
LIMITS = Limits(seconds=40, memory=2 * 2**30)
LISTENER = socket.create_server(("127.0.0.1", 0))

TEXT = Path(__file__).with_name("support").joinpath("attacks.yaml").read_text("utf-8")
PLACES = {"ROOT": str(ROOT), "HOME": str(Path.home()), "PORT": str(LISTENER.getsockname()[1])}
HOSTILE = yaml.safe_load(re.sub(r"\b(ROOT|HOME|PORT)\b", lambda found: PLACES[found[0]], TEXT))
ATTACKS, EARLY, CHEATS = HOSTILE["attacks"], HOSTILE["early"], HOSTILE["cheats"]
SPOIL_THEIR_OWN_PROCESS = ("rewrites_the_checks_in_memory", "sends_a_pickle")
UNTOUCHED = (ONE, EVICTION, MEMO)


def table_of(out):
    with open(out / "grades.csv", newline="", encoding="utf-8") as file:
        return {(row["student"], row["assignment"]): row for row in csv.DictReader(file)}


def state_of_the_checkout():
    """A hash of what a submission could want to change: the package and the exercises."""
    folders = [ROOT / "helpers", ROOT / "notebooks" / "exercises"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The table's rows, and the folder with the pages."""
    folder, out = tmp_path_factory.mktemp("submitted"), tmp_path_factory.mktemp("grades")
    before, right = state_of_the_checkout(), answers_of(ONE)
    for name, attack in ATTACKS.items():
        hand_in(folder / name / f"{ONE}.ipynb", notebook(ONE, right | {"stop": attack["code"]}))
    for name, attack in EARLY.items():
        hand_in(folder / name / f"{ONE}.ipynb", notebook(ONE, {"greedy_step": attack}))
    for assignment in ASSIGNMENTS:
        hand_in(folder / "zoe" / f"{assignment}.ipynb", notebook(assignment, answers_of(assignment)))
    for assignment in UNTOUCHED:
        hand_in(folder / "untouched" / f"{assignment}.ipynb", notebook(assignment, {}))
    for name, cheat in CHEATS.items():
        source = answers_of(CAPSTONE)["MyEngine"] + "\n" + cheat
        hand_in(folder / name / f"{CAPSTONE}.ipynb", notebook(CAPSTONE, {"MyEngine": source}))
    half = {task: answer for task, answer in answers_of(TWO).items() if task == "left_pad"}
    hand_in(folder / "half" / f"{TWO}.ipynb", notebook(TWO, half))
    verbs = ["generate_next_token", "merge_batches", "filter_batch", "init_batch"]
    own = {verb: f"from helpers.batching import {verb}" for verb in verbs}
    hand_in(folder / "verbs" / f"{THREE}.ipynb", notebook(THREE, own))
    grade.grade(folder, out, Options(LIMITS, "7"), jobs=2)
    assert state_of_the_checkout() == before
    return table_of(out), out


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing_for_its_task_and_costs_no_other(graded, name):
    row = graded[0][name, ONE]
    earned = {"greedy_step": "1/1", "kv_cache_bytes": "1/1", "stop": "0/2", "cached_loop": "4/4"}
    if name in SPOIL_THEIR_OWN_PROCESS:
        earned["cached_loop"] = "0/4"
    assert dict(part.split() for part in row["tasks"].split(", ")) == earned
    assert row["note"].startswith(ATTACKS[name]["note"])


@pytest.mark.parametrize("name", CHEATS)
def test_an_engine_that_cheats_passes_no_milestone_and_is_not_on_the_leaderboard(graded, name):
    row = graded[0][name, CAPSTONE]
    assert row["score"] == "0" and row["tasks"].count("0/2") == 6
    lines = (graded[1] / "leaderboard.csv").read_text().splitlines()
    assert len(lines) == 2 and lines[1].startswith(f"1,zoe,,{CAPSTONE},6,")


@pytest.mark.parametrize("name", EARLY)
def test_what_a_notebook_says_of_itself_does_not_count(graded, name):
    row = graded[0][name, ONE]
    assert row["score"] == "0"
    assert "stop: " in row["note"]


def test_a_submission_sees_no_solution_no_other_submission_and_no_network(graded):
    page = (graded[1] / "feedback" / "looks_for_solutions" / f"{ONE}.html").read_text()
    assert "FOUND []\nREST []" in page
    page = (graded[1] / "feedback" / "opens_sockets" / f"{ONE}.html").read_text()
    assert re.search(r"<samp>\w+Error\n\w*Error</samp>", page), "neither connection was made"
    LISTENER.setblocking(False)
    with pytest.raises(BlockingIOError):
        LISTENER.accept()


def test_a_submission_leaves_nothing_behind(graded):
    assert not Path("/tmp/bombed-by-a-submission").exists()
    page = (graded[1] / "feedback" / "rewrites_the_checks_on_disk" / f"{ONE}.html").read_text()
    assert page.count("WRITABLE") == 1  # in the code
    written = "feedback grades.csv ignored.csv leaderboard.csv leaderboard.html memos.csv"
    assert sorted(path.name for path in graded[1].iterdir()) == written.split()
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "grading.worker" in command]


def test_pages_hold_no_student_s_html_and_are_bounded(graded):
    pages = list(graded[1].glob("feedback/**/*.html"))
    assert len(pages) == len(graded[0])
    for page in pages:
        text = page.read_text()
        assert len(text) < 500_000 and "<script" not in text
    assert "[The rest is cut.]" in (graded[1] / "feedback" / "prints_200_MB" / f"{ONE}.html").read_text()
    assert "&lt;script&gt;" in (graded[1] / "feedback" / "forges_scores" / f"{ONE}.html").read_text()


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_solutions_score_full_marks_beside_the_attacks(graded, assignment):
    row = graded[0]["zoe", assignment]
    assert float(row["score"]) == float(row["max_score"]) == sum(points_of(read_notebook(SOURCE, assignment)).values())
    assert row["note"] == "" and row["seed"] == "7"


@pytest.mark.parametrize("assignment", UNTOUCHED)
def test_an_untouched_release_scores_zero(graded, assignment):
    row = graded[0]["untouched", assignment]
    assert float(row["score"]) == 0 < float(row["max_score"])
    assert row["note"].count("is not written yet") == row["tasks"].count("/")


def test_a_half_right_submission_gets_its_half_and_the_course_s_own_verbs_earn_nothing(graded):
    half, verbs = graded[0]["half", TWO], graded[0]["verbs", THREE]
    assert 2 * float(half["score"]) == float(half["max_score"]) > 0
    assert verbs["score"] == "0" and verbs["note"].count("calls the course's own") == 4


def test_without_the_sandbox_a_process_that_dies_still_costs_its_own_task_only(tmp_path):
    answers = answers_of(ONE) | {"stop": "import os\nos._exit(1)"}
    hand_in(tmp_path / f"dan_{ONE}.ipynb", notebook(ONE, answers))
    command = [sys.executable, grade.__file__, "grade", "--no-sandbox", "--out", tmp_path / "out", tmp_path]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "6 of 8  stop: A cell ended the process" in result.stdout
    assert "To repeat the grades: --seed " in result.stdout


def test_the_kernel_limits_the_number_of_processes_whoever_runs_the_grader():
    """The watch is too slow for a process that forks without end: the limit has to be the kernel's."""
    worker = WorkerProcess(replace(LIMITS, processes=20, memory=16 * 2**30), True, float("inf"))
    try:
        printed = worker.run(ATTACKS["forks"]["code"])
    except WorkerLostError as lost:
        printed = str(lost)
    finally:
        worker.close()
    assert "BlockingIOError" in printed and int(re.search(r"STARTED (\d+)", printed)[1]) <= 20


ALLOCATE = "def allocate(kept=()):\n    while True: kept = [*kept, bytes(10**8)]"  # pages that are not used


def test_a_cell_that_fails_for_lack_of_memory_ends_its_process_and_a_function_that_does_frees_what_it_had():
    worker = WorkerProcess(LIMITS, True, float("inf"))
    try:
        worker.run(ALLOCATE)
        outcome = worker.ask(Question("allocate()", ()), "allocate", 60)
        assert outcome.failure.error == "MemoryError"
        assert worker.run("import torch; print(torch.ones(2 * 10**8).numel())") == "200000000\n"
        with pytest.raises(WorkerLostError, match="used more than 2 GB of memory"):
            worker.run("allocate()")
    finally:
        worker.close()


def test_the_sandbox_shows_what_it_should_and_no_more():
    code = "import os; print(sorted(os.listdir('/')), os.listdir(os.environ['HOME']), os.cpu_count() > 0, *os.environ)"
    command = sandbox.sandboxed([*sandbox.python_command(), "-c", code])
    shown = subprocess.run(command, env=sandbox.environment(1), stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "'home'" not in shown and "'var'" not in shown and "'usr'" in shown
    assert "TOKEN" not in shown and "SSH" not in shown

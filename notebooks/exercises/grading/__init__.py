"""Grading: a submission runs in a sandbox, and its tasks are examined outside, where it cannot reach.

finding.py       which notebooks were handed in, and by whom: whatever they are called, with or without a roster
archives.py      the notebooks in folders and in archives
roster.py        who takes the course
tables.py        tables that are read and written; plain.py makes the text of strangers harmless
submissions.py   one notebook: put the release's own cells back into it
worker.py        the program inside the sandbox: it runs cells, and calls the student's functions
encoding.py      what the worker sends back, as JSON
sandbox.py       what the worker can see and use, with bubblewrap
worker_process.py   the worker seen from outside: time, memory, processes and output are limited
examination.py   one submission: its cells in order, its tasks examined, the worker replaced when it is lost
feedback.py      the page for the student
examiners.py     many submissions at once, each in a process that the others do not share
gradebook.py     grades from one run to the next, and the points given by hand
leaderboard.py   the standings of a contest
release.py       the student notebooks, with nbgrader
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the package `helpers`, which need not be installed

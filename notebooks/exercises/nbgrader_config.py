"""How nbgrader treats the exercises: read by grade.py, and by nbgrader's own commands when they run in this folder."""

c = get_config()  # noqa: F821, nbgrader defines it

c.CourseDirectory.course_id = "continuous-batching"
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError"}

# Importing torch takes seconds, on a busy machine many. It happens before the first cell, so that the time limit of a
# cell is about what the student wrote.
c.Execute.extra_arguments = [
    '--IPKernelApp.exec_lines=["import helpers.checks as _checks", "del _checks"]',
    "--log-level=CRITICAL",
]
c.ExecutePreprocessor.startup_timeout = 180

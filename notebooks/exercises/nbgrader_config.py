"""How nbgrader writes the releases: read by grading/release.py, and by nbgrader's own commands in this folder."""

c = get_config()  # noqa: F821, nbgrader defines it

c.CourseDirectory.course_id = "continuous-batching"
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError"}

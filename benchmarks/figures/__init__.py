"""Published figures in miniature: what a paper's comparison gives with this course's scheduler. Nothing here needs a model.

`python -m benchmarks.figures` prints the table. Each of the other files repeats one paper's comparison.
"""

"""Published figures in miniature: what a paper compares, counted with this course's scheduler and without a model.

`python -m benchmarks.figures` prints the table. Each of the other files repeats the comparison of one paper.
"""

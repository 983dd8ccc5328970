"""The same requests on every engine, in one run: `python -m benchmarks`.

Speed is compared only between engines that give the same tokens. The engines take turns, so a minute in which the
machine is slow affects all of them. The report gives ratios with their spread.
"""

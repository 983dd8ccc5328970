"""The same requests on every engine, in one run: `python -m benchmarks`.

Speed is only compared where the answers are the same, engines take turns so that a slow minute of the machine is
everybody's, and what is reported are ratios with their spread.
"""

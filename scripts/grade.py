#!/usr/bin/env python3
"""Grade a project of the course: run a student's code on ranks, and write points and reasons.

python scripts/grade.py data_parallel DIR        DIR holds data_parallel.py
python scripts/grade.py pipeline DIR --json points.json --page points.md

What it runs is the student's code: let it run where that may do no harm, such as in a container.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

if __name__ == "__main__":
    sys.exit(run(lambda: module("parallel.command.grade").main()))

"""Classify image files with a trained network.

python scripts/predict.py runs/MINE photo.png [--top 3] [--fit crop|pad|stretch] [--invert]
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

if __name__ == "__main__":
    sys.exit(run(lambda: module("parallel.command.predict").main()))

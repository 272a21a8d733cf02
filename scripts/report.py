"""Write one HTML page about several runs, to be opened in a browser.

python scripts/report.py runs/ONE [runs/OTHER ...] [--out FILE.html]
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

if __name__ == "__main__":
    sys.exit(run(lambda: module("parallel.command.report").main()))

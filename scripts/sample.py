"""Generate text with a trained transformer or LSTM.

python scripts/train.py --model transformer:128,4,4 --data tinyshakespeare ...
python scripts/sample.py runs/MINE --prompt "ROMEO:" --temperature 0.8 --top-k 40 --seed 1
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves it out
from entry_point import module, run

if __name__ == "__main__":
    sys.exit(run(lambda: module("parallel.command.sample").main()))

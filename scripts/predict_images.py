"""What a trained network sees in image files.

python scripts/predict_images.py runs/MINE photo.png [--top 3] [--fit crop|pad|stretch] [--invert]
"""

import sys

from door import module

if __name__ == "__main__":
    sys.exit(module("parallel.command.predict_images").main())

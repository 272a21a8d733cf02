"""Hit training runs at random moments, continue them, and compare their ends with that of an undisturbed run.

    python scripts/chaos.py --kills 100 -- --model mlp:64,16,10 --epochs 12 --checkpoint-steps 100 --ranks 2
    python scripts/chaos.py --kills 10 --only "kill a rank,damage" --json chaos.json -- --ranks 2 --watch 5

What comes after -- are options of scripts/train.py. What a run gets is drawn from the seed and its number, so with
--json FILE a later call goes on where this one has ended, until there were --kills in all; the undisturbed run is made
by the first one alone, so begin another file where the program has changed. Where ranks come in the place of others
(--elastic respawn) a run gets its faults one after the other, as it goes on.

Ends with exit status 1 at the first run whose parameters, steps or epochs differ, that cannot be continued, or of which
a process or a temporary file is left; what it had is kept.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    mine, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="chaos.py",
        usage="%(prog)s [options] -- OPTIONS OF train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=100, help="faults in all (default: 100)")
    parser.add_argument("--most", type=int, default=3, help="faults that one run gets at most (default: 3)")
    parser.add_argument("--only", help="kinds of faults, with commas between (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write what happened there; go on from what is there already")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults, and end")
    asked = parser.parse_args(mine)
    import numpy as np

    from parallel.elastic.chaos import FAULTS, Broken, Chaos

    if asked.list:
        print("\n".join(f"{kind:20} {what}" for kind, what in FAULTS.items()))
        return 0
    if asked.kills < 1 or asked.most < 1:
        parser.error(f"--kills and --most must be at least 1, given {asked.kills} and {asked.most}")
    before = json.loads(Path(asked.json).read_text()) if asked.json and Path(asked.json).exists() else {}
    if before and (before["seed"], before["options"], before["most"]) != (asked.seed, options, asked.most):
        parser.error(f"{asked.json}: has other options, --seed or --most: give another file")
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    kinds = asked.only.split(",") if asked.only else tuple(FAULTS)
    try:
        program, say = [sys.executable, str(Path(__file__).with_name("train.py"))], partial(print, flush=True)
        chaos = Chaos([*options, "--no-pictures"], directory, asked.seed, kinds, program=program, say=say)
    except ValueError as error:
        directory.rmdir()
        parser.error(str(error))
    begin, runs, broken = time.monotonic(), before.get("runs", 0), ""
    chaos.injected.update(before.get("hits", {}))
    chaos.missed.update(before.get("too late", {}))
    if before:
        chaos.ends, chaos.want = before["undisturbed"].pop("ends"), before["undisturbed"]

    def found() -> dict:
        return {
            "seed": asked.seed,
            "most": asked.most,
            "options": options,
            "undisturbed": chaos.want | {"ends": chaos.ends},
            "runs": runs,
            "hits": dict(chaos.injected),
            "too late": dict(chaos.missed),
            "seconds until all had ended, at most": round(max(chaos.recovery, default=0.0), 2),
            **seconds_until_trained(chaos.resumed),
            "seconds": round(before.get("seconds", 0.0) + time.monotonic() - begin, 1),
            "broken": broken,
        }

    def write() -> None:
        if asked.json:
            Path(asked.json).write_text(json.dumps(found(), indent=1) + "\n")

    try:
        if not chaos.want:
            chaos.undisturbed()
        chaos.say(f"undisturbed: {chaos.ends[-1]:.1f} s, {chaos.want['parameters_sha256'][:12]}, in {directory}")
        while chaos.injected.total() < asked.kills:
            chaos.run(runs, int(np.random.default_rng((asked.seed, runs)).integers(1, asked.most + 1)))
            runs += 1
            write()
    except Broken as error:
        broken = str(error)
    write()
    if not broken:
        shutil.rmtree(directory)
    told = {name: what for name, what in found().items() if name != "undisturbed"}
    print(json.dumps(told, indent=1) if not broken else f"error: run {runs} of seed {asked.seed}: {broken}")
    return int(bool(broken))


def seconds_until_trained(seconds: list[float]) -> dict[str, list]:
    """How long ranks took to go on after a death, where they did."""
    if not seconds:
        return {}
    return {"times gone on, seconds: median, worst": [len(seconds), statistics.median(seconds), max(seconds)]}


if __name__ == "__main__":
    sys.exit(main())

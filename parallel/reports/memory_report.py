"""The report of --memory: bytes that every rank allocates and sends, measured, beside the formulas.

A parameter takes s bytes, its gradient s, and its moments k s (Adam: k = 2). Of Psi parameters each of N ranks keeps,
by what its strategy shards (Rajbhandari et al. 2020):

    nothing (2 + k) s Psi; moments 2 s Psi + k s Psi/N; and gradients s Psi + (1 + k) s Psi/N; and parameters all /N

A worker keeps 2 s Psi, one of n parameter servers (2 + k) s Psi/n, a rank that is both the sum.

What is whole for a moment only, the unit of layers in use, is listed as "in transit". Activations are in the
resident memory of the process, and in no formula.
"""

from __future__ import annotations

from parallel.reports.breakdown import wrap
from parallel.run_trainer import RunTrainer

KINDS = ("parameters", "gradients", "moments")


def resident() -> int:
    """Return the resident bytes of this process; pages that ranks share count for each of them."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


class MemoryReport:
    """Measure one trainer on every rank.

    Parameters
    ----------
    trainer : RunTrainer
    traffic : Traffic or None
        What the trainer communicates through; None for one process.
    before : int
        `resident()` before the trainer was made.
    """

    def __init__(self, trainer: RunTrainer, traffic, before: int):
        self.trainer, self.traffic, self.before = trainer, traffic, before
        self.sent = self.steps = 0
        if traffic:
            wrap(trainer, "step", self._counting)

    def _counting(self, method):
        def counted(*arguments):
            start = self.traffic.total
            loss = method(*arguments)
            self.sent += self.traffic.total - start
            self.steps += 1
            return loss

        return counted

    def report(self) -> str:
        """Return the table on rank 0 (collective)."""
        trainer = self.trainer
        mine = trainer.memory() | {"resident": resident() - self.before, "formula": trainer.formula()}
        mine["sent"] = self.sent / max(1, self.steps)
        everyone = self.traffic.gather(mine) if self.traffic else [mine]
        if not everyone:
            return ""
        ranks, psi = len(everyone), trainer.network.layout.count
        unit, word = (2**20, "MiB") if sum(mine[kind] for kind in KINDS) >= 2**20 else (2**10, "KiB")
        row = lambda title, sizes: f"{title:<11}" + "".join(f"  {size / unit:9.2f}" for size in sizes)
        lines = [
            f"memory of each rank in {word}, {trainer.name}, Psi = {psi:,} parameters, N = {ranks}",
            "rank       " + "".join(f"{name:>11}" for name in (*KINDS, "sum", "in transit", "resident")),
        ]
        for rank, found in enumerate(everyone):
            sizes = [found[kind] for kind in KINDS]
            lines.append(row(rank, [*sizes, sum(sizes), found["in transit"], found["resident"]]))
        formulas = [tuple(found["formula"][kind] for kind in KINDS) for found in everyone]
        if len(set(formulas)) == 1:
            lines.append(row("formula", [*formulas[0], sum(formulas[0])]))
        else:
            lines += [row(f"formula, {rank}", [*sizes, sum(sizes)]) for rank, sizes in enumerate(formulas)]
        if self.traffic:
            lines += ["arrays of rank 0:", trainer.table.describe()]
        lines.append("resident: growth of the process since before the trainer was made, activations included")
        if trainer.notes:
            lines.append(trainer.notes)
        if self.traffic and self.steps:
            sends = trainer.sends
            vector = psi * trainer.network.dtype.itemsize * (max(1, ranks - 1) / ranks if sends else 1)
            times = ", ".join(f"{found['sent'] / vector:.2f}" for found in everyone)
            line = f"sent in a step by each rank: {times} Psi"
            lines.append(f"{line} (N-1)/N elements; the formula says {sends}" if sends else f"{line} elements")
        return "\n".join(lines)

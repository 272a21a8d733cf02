"""What every strategy can: one table, from which combinations are refused and README's matrix is written.

Nothing is imported here, so that wrong options are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP_NOTHING = ("none", "fp16", "qsgd", "terngrad")
ALONE = (*KEEP_NOTHING, "onebit", "signsgd", "topk", "threshold", "dgc")  # messages of single ranks
ALL = (*ALONE, "powersgd")


@dataclass(frozen=True)
class Capabilities:
    """What one strategy can.

    Attributes
    ----------
    axes : tuple of str
        Of the mesh, along which it cuts the work.
    parts : bool
        Whether a step may be computed in parts (--accumulate).
    synchronized : bool
        Whether layers may take statistics over all ranks (--sync-batch-norm).
    compress : tuple of str
        The methods with which gradients may travel.
    not_compressed : str
        Why not with the others.
    reproducible : bool
        Whether there are virtual shards.
    mixed : bool
        Whether a step that overflows float16 is skipped on all ranks alike (--dtype mixed).
    norms : str
        Where virtual shards do without norms of whole tensors, in words.
    """

    axes: tuple[str, ...] = ("data",)
    parts: bool = True
    synchronized: bool = True
    compress: tuple[str, ...] = ALL
    not_compressed: str = ""
    reproducible: bool = True
    mixed: bool = False
    norms: str = ""


SHARDED = Capabilities(
    mixed=True,
    compress=KEEP_NOTHING,
    not_compressed="what a method keeps of all parameters on every rank is what shards are to save",
    norms="no LARS, LAMB or clipping by norms",
)
CAPABILITIES = {
    "ddp": Capabilities(mixed=True),
    "zero1": SHARDED,
    "zero2": SHARDED,
    "fsdp": SHARDED,
    "ps": Capabilities(
        mixed=True,
        compress=ALONE,
        not_compressed="powersgd: its factors are sums over all ranks; use --strategy ddp, or another method",
        norms="on several servers no LARS, LAMB or clipping by norms",
    ),
    "dp": Capabilities(mixed=True, compress=(), not_compressed="the master gets one sum, made on its way by all ranks"),
}

# What does not go together under any strategy.
APART = {
    ("accumulate", "reproducible"): "virtual shards are micro-batches: use more of them",
    ("compress", "reproducible"): "what a rank leaves out depends on how many there are",
    (
        "reproducible",
        "sync_batch_norm",
    ): "virtual shards are computed one after another, and statistics need all at once",
}
OPTIONS = ("accumulate", "sync_batch_norm", "compress", "reproducible")


def why_not(strategy: str, method: str | None = None, *options: str) -> str:
    """Why a strategy does not go with a method of compression and these of OPTIONS; '' where it does."""
    can = CAPABILITIES[strategy]
    asked = (*options, *(["compress"] if method else []))
    for pair, why in APART.items():
        if set(pair) <= set(asked):
            return why
    if ("accumulate" in asked and not can.parts) or ("sync_batch_norm" in asked and not can.synchronized):
        return "its steps cannot be cut so"
    if "reproducible" in asked and not can.reproducible:
        return "it has no virtual shards"
    return can.not_compressed if method and method.partition(":")[0] not in can.compress else ""


def matrix() -> str:
    """A row for each strategy, a column for each option; then why the others are refused."""
    flags = [*(f"`--{name.replace('_', '-')}`" for name in OPTIONS), "`--dtype mixed`"]
    lines = [f"| `--strategy` | {' | '.join(flags)} |", "|---|" + "---|" * len(flags)]
    whys: dict[str, list[str]] = {}
    for strategy, can in CAPABILITIES.items():
        methods = "all methods" if can.compress == ALL else ", ".join(can.compress) if can.compress else "no"
        if can.not_compressed:
            whys.setdefault(can.not_compressed, []).append(f"`{strategy}`")
        shards = "yes" + f"; {can.norms}" * bool(can.norms) if can.reproducible else "no"
        yes = [("no", "yes")[ability] for ability in (can.parts, can.synchronized)]
        lines.append(f"| `{strategy}` | {' | '.join([*yes, methods, shards, ('no', 'yes')[can.mixed]])} |")
    reasons = [f"`--compress` with {', '.join(names)}: {why}" for why, names in whys.items()]
    reasons += [f"`--{a}` with `--{b}`: {why}".replace("_", "-") for (a, b), why in APART.items()]
    return "\n".join([*lines, "", "What is refused, and why: " + "; ".join(reasons) + "."]) + "\n"

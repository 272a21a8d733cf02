"""What every strategy can: one table, from which combinations are refused and README's matrix is written.

Nothing is imported here, so that wrong options are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    not_parts : str
        Why not.
    synchronized : bool
        Whether layers may take statistics over all ranks (--sync-batch-norm).
    compress : tuple of str
        The methods with which gradients may travel.
    not_compressed : str
        Why not with the others.
    not_reproducible : str
        Why there are no virtual shards; empty where there are.
    norms : str
        Where virtual shards do without norms of whole tensors, in words.
    """

    axes: tuple[str, ...] = ("data",)
    parts: bool = True
    not_parts: str = ""
    synchronized: bool = True
    compress: tuple[str, ...] = ALL
    not_compressed: str = ""
    not_reproducible: str = ""
    norms: str = ""


BOTH = ("data", "pipeline")
SHARDED = Capabilities(
    compress=KEEP_NOTHING,
    not_compressed="what a method keeps of all parameters on every rank is what shards are to save",
    norms="no LARS, LAMB or clipping by norms",
)
SUMS = "layers sum over the ranks, and how that rounds depends on how many there are"
CAPABILITIES = {
    "ddp": Capabilities(axes=(*BOTH, "tensor")),
    "zero1": replace(SHARDED, axes=BOTH),
    "zero2": SHARDED,
    "fsdp": SHARDED,
    "ps": Capabilities(
        compress=ALONE,
        not_compressed="powersgd: its factors are sums over all ranks; use --strategy ddp, or another method",
        norms="on several servers no LARS, LAMB or clipping by norms",
    ),
    "dp": Capabilities(compress=(), not_compressed="the master gets one sum, made on its way by all ranks"),
    # Also what ddp and zero1 can where the mesh has an axis "pipeline".
    "pipeline": Capabilities(
        axes=BOTH,
        parts=False,
        not_parts="a pipeline cuts every batch into micro-batches of its own: say how many by --pipeline NAME:micro=N",
        compress=(),
        not_compressed="the gradients of every stage travel by themselves, as they are",
        not_reproducible="stages have no virtual shards",
    ),
    # Also what they can where it has an axis "tensor".
    "tensor": Capabilities(
        axes=("data", "tensor"),
        compress=(),
        not_compressed="of what a rank has of every layer, the gradients travel as they are",
        not_reproducible=SUMS,
    ),
    "owt": Capabilities(
        axes=(),
        compress=(),
        not_compressed="few gradients travel, those of convolutions",
        not_reproducible=SUMS,
    ),
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
    if "accumulate" in asked and not can.parts:
        return can.not_parts
    if "sync_batch_norm" in asked and not can.synchronized:
        return "its steps cannot be cut so"
    if "reproducible" in asked and can.not_reproducible:
        return can.not_reproducible
    return can.not_compressed if method and method.partition(":")[0] not in can.compress else ""


def matrix() -> str:
    """A row for each strategy, a column for each option; then why the others are refused."""
    flags = [f"`--{name.replace('_', '-')}`" for name in OPTIONS]
    lines = [f"| `--strategy` | axes of `--mesh` | {' | '.join(flags)} |", "|---|---|" + "---|" * len(flags)]
    whys: dict[tuple[str, str], list[str]] = {}
    for strategy, can in CAPABILITIES.items():
        methods = "all methods" if can.compress == ALL else ", ".join(can.compress) if can.compress else "no"
        if can.not_compressed:
            whys.setdefault(("compress", can.not_compressed), []).append(f"`{strategy}`")
        if can.not_reproducible:
            whys.setdefault(("reproducible", can.not_reproducible), []).append(f"`{strategy}`")
        shards = "no" if can.not_reproducible else "yes" + f"; {can.norms}" * bool(can.norms)
        yes = [("no", "yes")[ability] for ability in (can.parts, can.synchronized)]
        lines.append(f"| `{strategy}` | {' | '.join([', '.join(can.axes) or 'none', *yes, methods, shards])} |")
    reasons = [f"`--{option}` with {', '.join(names)}: {why}" for (option, why), names in whys.items()]
    reasons += [f"`--accumulate` with `{name}`: {can.not_parts}" for name, can in CAPABILITIES.items() if not can.parts]
    reasons += [f"`--{a}` with `--{b}`: {why}".replace("_", "-") for (a, b), why in APART.items()]
    return "\n".join([*lines, "", "What is refused, and why: " + "; ".join(reasons) + "."]) + "\n"

"""What every strategy can: one table, from which combinations are refused and README's matrix is written.

Nothing is imported here, so that wrong options are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEEP_NOTHING = ("none", "fp16", "qsgd", "terngrad")
ALIKE = ("none", "fp16")  # round the same number alike on every rank
ALONE = (*KEEP_NOTHING, "onebit", "signsgd", "topk", "threshold", "dgc")  # messages of single ranks
ALL = (*ALONE, "powersgd")


@dataclass(frozen=True)
class Capabilities:
    """What one strategy can.

    Attributes
    ----------
    axes : tuple of str
        Of the mesh, along which it cuts the work.
    not_stages : str
        Why not along "pipeline", where along others.
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
    reproducible : bool
        Whether there are virtual shards.
    mixed : bool
        Whether a step that overflows float16 is skipped on all ranks alike (--dtype mixed).
    not_reproducible : str
        Why not.
    norms : str
        Where virtual shards do without norms of whole tensors, in words.
    elastic : bool
        Whether it goes on where a rank dies (--elastic): others have what it had, or a copy, or the last checkpoint.
    apart : bool
        Whether ranks make steps of their own, so that the result is another one than one process's.
    """

    axes: tuple[str, ...] = ("data",)
    not_stages: str = ""
    parts: bool = True
    not_parts: str = ""
    synchronized: bool = True
    compress: tuple[str, ...] = ALL
    not_compressed: str = ""
    reproducible: bool = True
    not_reproducible: str = "micro-batches are added up in each stage as they pass, and are no virtual shards"
    mixed: bool = False
    norms: str = ""
    elastic: bool = False
    apart: bool = False


WITH_PARTS = ("data", "pipeline", "tensor")  # along which ranks may have parts of the network
ALL_AXES = (*WITH_PARTS, "space", "branch")
SHARDED = Capabilities(
    axes=("data", "tensor", "space", "branch"),
    not_stages="a stage would reduce its gradients, and gather its parameters, once for each micro-batch; use zero1",
    mixed=True,
    elastic=True,
    compress=KEEP_NOTHING,
    not_compressed="what a method keeps of all parameters on every rank is what shards are to save",
    norms="no LARS, LAMB or clipping by norms",
)
IN_SHARDS = ("zero1", "zero2", "fsdp")
TREE = "what is added up on one rank and what between them depends on how many there are"
ROUNDED = (
    "what several ranks have whole, with ddp, has to be rounded alike on all, and nothing left out, or it drifts apart"
)
NO_FACTORS = "powersgd: its factors are sums over all ranks; use --strategy ddp, or another method"
APART_ALL = Capabilities(synchronized=False, compress=(), reproducible=False, elastic=True, apart=True)
REPLICAS = replace(APART_ALL, axes=WITH_PARTS, not_compressed="replicas meet by their parameters, not by gradients")
SERVED_APART = replace(APART_ALL, axes=WITH_PARTS, compress=ALONE, not_compressed=NO_FACTORS)
CAPABILITIES = {
    "ddp": Capabilities(axes=ALL_AXES, mixed=True, elastic=True),
    "zero1": replace(SHARDED, axes=ALL_AXES, not_stages=""),
    "zero2": SHARDED,
    "fsdp": SHARDED,
    "ps": Capabilities(
        mixed=True,
        elastic=True,
        compress=ALONE,
        not_compressed=NO_FACTORS,
        norms="on several servers no LARS, LAMB or clipping by norms",
    ),
    "dp": Capabilities(mixed=True, compress=(), not_compressed="the master gets one sum, made on its way by all ranks"),
    # Also what ddp and zero1 can where the mesh has an axis "pipeline".
    "pipeline": Capabilities(
        mixed=True,
        elastic=True,
        axes=WITH_PARTS,
        parts=False,
        not_parts="a pipeline cuts every batch into micro-batches of its own: say how many by --pipeline NAME:micro=N",
        compress=ALIKE,
        not_compressed=ROUNDED,
        reproducible=False,
    ),
    # Also what ddp, zero1, zero2 and fsdp can where it has an axis "tensor".
    "tensor": Capabilities(
        mixed=True,
        elastic=True,
        axes=WITH_PARTS,
        compress=ALIKE,
        not_compressed=ROUNDED,
        reproducible=False,
        not_reproducible=TREE,
    ),
    "owt": Capabilities(
        axes=(),
        mixed=True,
        compress=(),
        not_compressed="few gradients travel, those of convolutions",
        reproducible=False,
        not_reproducible=TREE,
    ),
    "downpour": SERVED_APART,
    "sandblaster": replace(
        APART_ALL,
        elastic=False,
        parts=False,
        not_parts="a batch is cut into chunks already: say how large by sandblaster:chunk=N",
        not_compressed="a line search needs gradients as they are",
    ),
    **dict.fromkeys(("local-sgd", "diloco", "easgd"), REPLICAS),
}
# What ddp can where the mesh has one of these axes; and ZeRO's stages, less what they can without.
TOGETHER = {
    axis: Capabilities(
        mixed=True,
        elastic=True,
        axes=("data", axis),
        reproducible=False,
        not_reproducible=TREE,
    )
    for axis in ("space", "branch")
}
# Why those axes go with no other but "data", by the other one.
NOT_BESIDE = {
    **dict.fromkeys(
        ("pipeline", "tensor"),
        "ranks that share rows or branches have all parameters and sum the gradients of all, others have parts of them",
    ),
    **dict.fromkeys(("space", "branch"), "a rank has rows for all branches, or branches for all rows"),
}
# What those can that have a --consistency, where it is not sync.
LATE = {
    "ps": SERVED_APART,
    "ddp": replace(APART_ALL, not_compressed="what is on its way is a sum; use --strategy ps --consistency async"),
}

AS_ONE = tuple(name for name, can in CAPABILITIES.items() if not can.apart)  # compute what one process computes

# What does not go together under any strategy.
APART = {
    ("accumulate", "reproducible"): "virtual shards are micro-batches: use more of them",
    ("compress", "reproducible"): "what a rank leaves out depends on how many there are",
    (
        "reproducible",
        "sync_batch_norm",
    ): "virtual shards are computed one after another, and statistics need all at once",
}
# Why there are no workers of several ranks beside servers.
ON_WORKERS = "a server on a worker does not serve while its rank waits for the others of the worker"
WHO_IS_LEFT = "ranks that are left become workers of one rank, and servers"
IN_STEP = "push and pull of all in step are schedules of whole vectors, and ranks have parts of them"
# Why such a worker, or a replica without servers, is no pipeline that updates after every mini-batch.
NEVER_FLUSHED = "it updates its stages itself after every mini-batch, and no gradient of a step is left"
CONSISTENCIES = {"ps": "ssp:S, async", "ddp": "stale:S"}  # for README
OPTIONS = ("accumulate", "sync_batch_norm", "compress", "reproducible")
COLUMNS = (*OPTIONS, "mixed", "elastic")  # of the table; these two have rules of their own


def why_not(strategy: str, method: str | None = None, *options: str, late: bool = False) -> str:
    """Why a strategy, or an axis of TOGETHER, does not go with a method and these of COLUMNS; '' where it does.

    `late`: with a --consistency that is not sync.
    """
    can = (CAPABILITIES | TOGETHER)[strategy]
    return reason(LATE.get(strategy, can) if late else can, method, *options)


def reason(can: Capabilities, method: str | None = None, *options: str) -> str:
    """Why what can this, and no more, does not go with a method and these of COLUMNS; '' where it does."""
    asked = (*options, *(["compress"] if method else []))
    for pair, why in APART.items():
        if set(pair) <= set(asked):
            return why
    if "accumulate" in asked and not can.parts:
        return can.not_parts
    if "sync_batch_norm" in asked and not can.synchronized:
        return "statistics over all ranks need all of them at one step, and each is at its own"
    if "reproducible" in asked and not can.reproducible:
        if can.apart:
            return "what is added up when depends on who comes first, or on how many there are"
        return can.not_reproducible
    if "mixed" in asked and not can.mixed:
        return "no step is skipped by all"
    if "elastic" in asked and not can.elastic:
        return "what a rank alone has is lost with it"
    return can.not_compressed if method and method.partition(":")[0] not in can.compress else ""


def matrix() -> str:
    """A row for each strategy, a column for each option; then why the others are refused."""
    flags = ["`--dtype mixed`" if name == "mixed" else f"`--{name.replace('_', '-')}`" for name in COLUMNS]
    lines = [f"| `--strategy` | axes of `--mesh` | {' | '.join(flags)} |", "|---|---|" + "---|" * len(flags)]
    rows = CAPABILITIES | {f"ddp --mesh {axis}=N": can for axis, can in TOGETHER.items()}
    for axis, can in TOGETHER.items():
        methods = {name: getattr(SHARDED, name) for name in ("compress", "not_compressed")}
        rows[f"{', '.join(IN_SHARDS)} --mesh {axis}=N"] = replace(can, **methods)
    rows |= {f"{name} --consistency {CONSISTENCIES[name]}": can for name, can in LATE.items()}
    whys: dict[tuple[str, str], list[str]] = {}
    for strategy, can in rows.items():
        cells = []
        for option, shown in zip(COLUMNS, flags, strict=True):
            methods = [name for name in ALL if name not in can.compress] if option == "compress" else [None]
            why = reason(can, methods[0], option) if methods else ""
            cells.append("no" if why else "yes")
            if why:
                whys.setdefault((shown, why), []).append(f"`{strategy}`")
            if option == "compress":
                cells[-1] = ", ".join(can.compress) or "no" if why else "all methods"
            elif option == "reproducible" and not why and can.norms:
                cells[-1] += f"; {can.norms}"
        lines.append(f"| `{strategy}` | {', '.join(can.axes) or 'none'} | {' | '.join(cells)} |")
    reasons = [f"{shown} with {', '.join(names)}: {why}" for (shown, why), names in whys.items()]
    stages = [f"`{name}`" for name, can in CAPABILITIES.items() if can.not_stages]
    reasons.append(f"an axis `pipeline` with {', '.join(stages)}: {CAPABILITIES['fsdp'].not_stages}")
    for why in dict.fromkeys(NOT_BESIDE.values()):
        others = " or ".join(f"`{axis}`" for axis, other in NOT_BESIDE.items() if other == why)
        reasons.append(f"an axis `space` or `branch` beside {others}: {why}")
    beside = {"of `ps` in step": IN_STEP, "and `--server-place workers`": ON_WORKERS, "and `--elastic`": WHO_IS_LEFT}
    reasons += [f"an axis `pipeline` or `tensor` beside servers, {what}: {why}" for what, why in beside.items()]
    apart = [f"`{name}`" for name, can in rows.items() if can.apart and "pipeline" in can.axes]
    reasons.append(f"`--pipeline pipedream` with {', '.join(apart)}: {NEVER_FLUSHED}")
    reasons += [f"`--{a}` with `--{b}`: {why}".replace("_", "-") for (a, b), why in APART.items()]
    return "\n".join([*lines, "", "What is refused, and why:", "", *(f"- {text}" for text in sorted(reasons))]) + "\n"

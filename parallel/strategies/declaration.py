"""What a strategy is: one declaration, in the strategy's own file; strategies/__init__.py has the list.

    STRATEGY = Strategy(
        name="zero2", title="ZeRO stage 2", sources=("Rajbhandari et al. 2020",),
        build=build,                                  # options of the command line, ... -> trainer
        supports=Supports(compress=STATELESS, mixed=True, elastic=True),
        options=(ShardOptions,), keys=None,           # its flags; its keys, as in local-sgd:8
        ...
    )

From the list are derived: the command line and its --help, what is refused and why, what --resume may change, the
candidates of the planner, the tables of docs/options.md, the public names of `parallel`.

Nothing here imports NumPy or MPI, nor do files with a declaration while they are imported: --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from parallel.settings import Keys

STATELESS = ("none", "fp16", "qsgd", "terngrad")
ROUNDING_ALIKE = ("none", "fp16")  # round the same number alike on every rank
PER_RANK_MESSAGES = (*STATELESS, "onebit", "signsgd", "topk", "threshold", "dgc")  # messages of single ranks
ALL = (*PER_RANK_MESSAGES, "powersgd")
REPLICA_AXES = ("data", "pipeline", "tensor")  # along which a replica with local updates may be several ranks
ROUNDED = (
    "arrays that several ranks have in full must be rounded equally on all, with nothing left out, or they drift apart"
)
NODE_MEMORY = ("auto", "on", "off")
NOT_COMPRESSED_IN_SHARDS = "a method keeps an array of all parameters on every rank, which shards are meant to avoid"
NOT_STAGES = "a stage would reduce its gradients, and gather its parameters, once for each micro-batch; use zero1"
UNIT_BYTES = 1 << 20  # of parameters of neighbouring layers that are gathered together, by default
TREE = "the order of additions depends on the number of ranks"


@dataclass(frozen=True)
class Supports:
    """What a strategy can be combined with.

    Attributes
    ----------
    axes : tuple of str
        Axes of the mesh along which it divides the work.
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
    not_reproducible : str
        Why not.
    norms : str
        Where virtual shards do without norms of whole tensors, in words.
    mixed : bool
        Whether a step that overflows float16 is skipped on all ranks alike (--dtype mixed).
    elastic : bool
        Whether it goes on where a rank dies (--elastic): others have what it had, or a copy, or the last checkpoint.
    local_update : bool
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
    not_reproducible: str = ""
    norms: str = ""
    mixed: bool = False
    elastic: bool = False
    local_update: bool = False

    def reason_against(self, method: str | None = None, *options: str) -> str:
        """Return why this cannot be combined with a compression method and these of COLUMNS; '' where it does."""
        wanted = (*options, *(["compress"] if method else []))
        for pair, reason in NEVER_TOGETHER.items():
            if set(pair) <= set(wanted):
                return reason
        if "accumulate" in wanted and not self.parts:
            return self.not_parts
        if "sync_batch_norm" in wanted and not self.synchronized:
            return "statistics over all ranks need all ranks at the same step"
        if "reproducible" in wanted and not self.reproducible:
            if self.local_update:
                return "the order of additions depends on the order of arrival or on the number of ranks"
            return self.not_reproducible
        if "mixed" in wanted and not self.mixed:
            return "ranks cannot agree to skip an overflowed step"
        if "elastic" in wanted and not self.elastic:
            return "state that only one rank has would be lost with it"
        return self.not_compressed if method and method.partition(":")[0] not in self.compress else ""


LOCAL_UPDATE = Supports(synchronized=False, compress=(), reproducible=False, elastic=True, local_update=True)

# What does not go together under any strategy.
NEVER_TOGETHER = {
    ("accumulate", "reproducible"): "its virtual shards already are micro-batches; raise --reproducible instead",
    ("compress", "reproducible"): "the part that a rank leaves out depends on the number of ranks",
    (
        "reproducible",
        "sync_batch_norm",
    ): "virtual shards are computed one after another, and statistics need all at once",
}
OPTIONS = ("accumulate", "sync_batch_norm", "compress", "reproducible")
COLUMNS = (*OPTIONS, "mixed", "elastic")  # of the table; the last two have rules of their own


@dataclass(frozen=True)
class Strategy:
    """One strategy: what the command line, the planner, the docs and the tests know of it.

    Attributes
    ----------
    name : str
        Of --strategy.
    title : str
        Its name in the literature.
    aliases : tuple of str
        Its other names in the literature: scripts/estimate.py takes them, and a refusal of one gives this name.
    sources : tuple of str
    build : callable
        (options, network, loss, optimizer, communicator) -> DistributedTrainer.
    supports : Supports
    options : tuple of dataclasses
        Flags that have an effect with this strategy, declared by `settings.option`; others may share them.
    keys : Keys or None
        What may stand behind the colon of --strategy NAME:KEYS.
    consistencies : tuple of str
        Names of --consistency that it has; empty for none.
    late, late_values : Supports or None, str
        What it supports with a --consistency other than sync, and which, for the docs: "ssp:S, async".
    public : tuple of str
        Names of its file that `parallel` has.
    check_options : callable or None
        (options) -> None: refuse what options alone say and no other field does.
    check : callable or None
        (options, ranks or None, network, optimizer) -> number of ranks that read samples, or None for all: refuse
        what cannot be on so many ranks, with this network.
    whole : int
        Arrays of the parameters' size that every rank must hold, of parameters and gradients.
    serves : bool
        Whether some ranks are, or have, servers (--servers).
    searches : bool
        Whether a step is a line search (--optimizer lbfgs, and no other), on one process too.
    cost : callable or None
        (job, axes, network, text of --strategy, servers) -> Prediction of a step; None where nothing is predicted.
    summary, memory, traffic : str
        What it does; bytes that a rank keeps, for Adam in float32; elements that it sends in a step: for the docs.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    build: Callable
    supports: Supports
    options: tuple[type, ...] = ()
    keys: type[Keys] | None = None
    aliases: tuple[str, ...] = ()
    consistencies: tuple[str, ...] = ()
    late: Supports | None = None
    late_values: str = ""
    public: tuple[str, ...] = ()
    check_options: Callable | None = None
    check: Callable | None = None
    whole: int = 2
    serves: bool = False
    searches: bool = False
    cost: Callable | None = None
    summary: str = ""
    memory: str = ""
    traffic: str = ""

    def supported(self, late: bool = False) -> Supports:
        """Return what it supports, with a --consistency that is not sync where `late`."""
        return self.late if late and self.late else self.supports

    def reads(self) -> tuple[str, ...]:
        """Return the names of its flags."""
        return tuple(entry.name for kind in self.options for entry in fields(kind))

"""A prediction taken at its word: the options of the run that it is about, and why it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nn.core.network import Network
from parallel.planning.job import Prediction
from parallel.planning.tables import nbytes, seconds
from parallel.state.stages import stages


def options_of(prediction: Prediction, network: Network | None = None) -> dict[str, str]:
    """--strategy, --pipeline and --mesh of the run.

    Parameters
    ----------
    network : Network or None
        Whose layers the prediction's are: then a pipeline is cut where it says, as far as that may be.
    """
    axes = prediction.axes
    if prediction.ranks == 1:
        return {}
    found = {"strategy": prediction.strategy}
    if axes.pipeline > 1 or prediction.replicas:
        name, _, more = prediction.strategy.partition(":")
        keys = [f"micro={prediction.micro_batches}", *["chunks=2"] * (name == "interleaved"), *filter(None, [more])]
        if prediction.replicas:
            keys.append(f"replicas={'/'.join(map(str, prediction.replicas))}")
        if network and _can_be_cut(network, prediction.cuts):
            keys.append(f"cuts={'/'.join(map(str, prediction.cuts))}")
        found = {"strategy": "pipeline", "pipeline": f"{name}:{','.join(keys)}"}
    if prediction.ranks > axes.data:
        found["mesh"] = ",".join(f"{axis}={size}" for axis, size in axes._asdict().items() if size > 1)
    return found


def _can_be_cut(network: Network, cuts: Sequence[int]) -> bool:
    try:
        return len(stages(network, cuts)) == len(cuts) + 1
    except ValueError:
        return False


def best_of_each(found: Sequence[Prediction], first: int) -> list[Prediction]:
    """The first few, and the fastest mesh of every strategy."""
    of_each = {p.strategy: p for p in reversed(found)}.values()
    return [p for i, p in enumerate(found) if i < first or any(p is each for each in of_each)]


def reasons(
    best: Prediction, found: Sequence[Prediction], limit: float, usable: Callable[[Prediction], bool]
) -> list[str]:
    """What to use, why, and by how much: lines.

    Parameters
    ----------
    found : all predictions, the fastest first
    limit : bytes that a rank has
    usable : whether train.py has that strategy on that mesh
    """
    lines = [f"use {best.name}: {seconds(best.seconds)} a step, {nbytes(best.memory)} a rank"]
    fitting = [p for p in found if p.memory <= limit]
    if fitting[0] is not best:
        note = f" ({fitting[0].note})" if fitting[0].note else ""
        time = seconds(fitting[0].seconds)
        lines.append(f"{fitting[0].name}{note} would take {time}, but train.py does not take it")
    others = (p for p in fitting if p.strategy != best.strategy and p.seconds >= best.seconds)
    if next_ := next(filter(usable, others), None):
        gaps = {part: next_.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in {*next_.parts, *best.parts}}
        why = max(sorted(gaps), key=gaps.__getitem__)
        lines.append(
            f"{next_.seconds / best.seconds:.2f} times as fast as {next_.name}, which takes {seconds(next_.seconds)}: "
            f"{why} {seconds(next_.parts.get(why, 0.0))} there, {seconds(best.parts.get(why, 0.0))} here"
        )
    dense = next((p for p in found if p.strategy == "ddp" and p.axes.data == p.ranks), None)
    if dense and dense.memory > limit:
        lines.append(f"ddp does not fit: it would take {nbytes(dense.memory)} of {nbytes(limit)}")
    return lines

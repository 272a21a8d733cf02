"""From a prediction to a run: its options, and the reasons for choosing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nn.core.network import Network
from parallel.planning.job import Prediction
from parallel.planning.tables import nbytes, seconds
from parallel.state.stages import stages


def options_of(prediction: Prediction, network: Network | None = None) -> dict[str, str]:
    """Return --strategy, --pipeline, --mesh and --context of the predicted run.

    Parameters
    ----------
    network : Network or None
        The predicted network. With it the pipeline gets the predicted cuts, where the network can be cut there.
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
    if prediction.attention == "ulysses":
        found["context"] = "ulysses"
    return found


def _can_be_cut(network: Network, cuts: Sequence[int]) -> bool:
    try:
        return len(stages(network, cuts)) == len(cuts) + 1
    except ValueError:
        return False


def best_of_each(found: Sequence[Prediction], first: int) -> list[Prediction]:
    """Return the `first` fastest predictions, and the fastest mesh of every strategy."""
    of_each = {p.strategy: p for p in reversed(found)}.values()
    return [p for i, p in enumerate(found) if i < first or any(p is each for each in of_each)]


def reasons(
    best: Prediction, found: Sequence[Prediction], limit: float, usable: Callable[[Prediction], bool]
) -> list[str]:
    """Return lines that say what to use, why, and how much faster it is.

    Parameters
    ----------
    found : all predictions, the fastest first
    limit : bytes of memory of a rank
    usable : function that says whether train.py runs that strategy on that mesh
    """
    lines = [f"use {best.name}: {seconds(best.seconds)} a step, {nbytes(best.memory)} a rank"]
    fitting = [p for p in found if p.memory <= limit]
    if fitting[0] is not best:
        note = f" ({fitting[0].note})" if fitting[0].note else ""
        time = seconds(fitting[0].seconds)
        lines.append(f"{fitting[0].name}{note} would take {time}, but train.py cannot run it")
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

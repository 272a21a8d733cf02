"""The tables of docs/options.md, made from the declarations; `python tests/test_readme.py` writes them."""

from __future__ import annotations

from dataclasses import replace

from parallel.axis import AXES, DIVIDE_NETWORK, DIVIDE_SAMPLES
from parallel.strategies import DECLARED, STRATEGIES
from parallel.strategies.axes import SUPPORTS
from parallel.strategies.axis_rules import NEVER_FLUSHED
from parallel.strategies.declaration import ALL, COLUMNS, NEVER_TOGETHER, Supports
from parallel.strategies.parameter_server import NOT_ELASTIC, NOT_ON_WORKERS, NOT_SYNC
from parallel.strategies.zero import NOT_STAGES, SHARDED, STAGES


def summaries() -> str:
    """Return a row for each strategy: what it does, keeps and sends; then its keys."""
    lines = [
        "| `--strategy` | what it does | Adam in float32, bytes a rank | elements on the wire, a rank and step "
        "| source |",
        "|---|---|---|---|---|",
    ]
    for strategy in DECLARED:
        default = " (default)" * (strategy is DECLARED[0])
        sources = "; ".join(strategy.sources)
        cells = strategy.summary, strategy.memory, strategy.traffic, f"{strategy.title}: {sources}"
        lines.append(f"| `{strategy.name}`{default} | {' | '.join(cells)} |")
    lines += ["", "Keys that may follow a colon, as in `--strategy local-sgd:8,drift=0.1`:", ""]
    lines += [f"- `{strategy.name}`: {strategy.keys.describe()}" for strategy in DECLARED if strategy.keys]
    return "\n".join(lines) + "\n"


def matrix() -> str:
    """Return a row for each strategy, a column for each option; then why the others are refused."""
    flags = ["`--dtype mixed`" if name == "mixed" else f"`--{name.replace('_', '-')}`" for name in COLUMNS]
    lines = [f"| `--strategy` | axes of `--mesh` | {' | '.join(flags)} |", "|---|---|" + "---|" * len(flags)]
    rows = _rows()
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, can in rows.items():
        cells = []
        for option, shown in zip(COLUMNS, flags, strict=True):
            refused = [method for method in ALL if method not in can.compress] if option == "compress" else [None]
            why = can.reason_against(refused[0], option) if refused else ""
            cells.append("no" if why else "yes")
            if why:
                reasons.setdefault((shown, why), []).append(f"`{name}`")
            if option == "compress":
                cells[-1] = ", ".join(can.compress) or "no" if why else "all methods"
            elif option == "reproducible" and not why and can.norms:
                cells[-1] += f"; {can.norms}"
        lines.append(f"| `{name}` | {', '.join(can.axes) or 'none'} | {' | '.join(cells)} |")
    found = [f"{shown} with {', '.join(names)}: {why}" for (shown, why), names in reasons.items()]
    found += _of_axes(rows)
    found += [f"`--{a}` with `--{b}`: {why}".replace("_", "-") for (a, b), why in NEVER_TOGETHER.items()]
    return "\n".join([*lines, "", "What is refused, and why:", "", *(f"- {text}" for text in sorted(found))]) + "\n"


def _rows() -> dict[str, Supports]:
    """What strategies support, alone, along an axis that is no strategy, and with a --consistency."""
    rows = {name: strategy.supports for name, strategy in STRATEGIES.items()}
    cutting = {axis: SUPPORTS[axis] for axis in DIVIDE_SAMPLES}
    rows |= {f"ddp --mesh {axis}=N": can for axis, can in cutting.items()}
    compress = {"compress": SHARDED.compress, "not_compressed": SHARDED.not_compressed}
    rows |= {f"{', '.join(STAGES)} --mesh {axis}=N": replace(can, **compress) for axis, can in cutting.items()}
    dividing = {axis: can for axis, can in SUPPORTS.items() if axis in DIVIDE_NETWORK}
    rows |= {f"ddp, {', '.join(STAGES)}, tensor --mesh {axis}=N": can for axis, can in dividing.items()}
    late = [strategy for strategy in DECLARED if strategy.late]
    return rows | {f"{strategy.name} --consistency {strategy.late_values}": strategy.late for strategy in late}


def _of_axes(rows: dict[str, Supports]) -> list[str]:
    """Why axes do not go with strategies, or with each other."""
    without = [f"`{name}`" for name, strategy in STRATEGIES.items() if strategy.supports.not_stages]
    found = [f"an axis `pipeline` with {', '.join(without)}: {NOT_STAGES}"]
    alone = " or ".join(f"`{name}`" for name, axis in AXES.items() if axis.only_beside_data)
    for why in dict.fromkeys(axis.reason for axis in AXES.values() if axis.reason):
        others = " or ".join(f"`{name}`" for name, axis in AXES.items() if axis.reason == why)
        found.append(f"an axis {alone} combined with {others}: {why}")
    beside = {
        "of `ps` in step": NOT_SYNC,
        "and `--server-place workers`": NOT_ON_WORKERS,
        "and `--elastic`": NOT_ELASTIC,
    }
    found += [f"an axis `pipeline` or `tensor` combined with servers, {what}: {why}" for what, why in beside.items()]
    replicas = [f"`{name}`" for name, can in rows.items() if can.local_update and "pipeline" in can.axes]
    return [*found, f"`--pipeline pipedream` with {', '.join(replicas)}: {NEVER_FLUSHED}"]

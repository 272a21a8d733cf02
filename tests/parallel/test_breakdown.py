"""Every rank's view: the breakdown of a step, clocks of several hosts, and the merged timeline."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE, longer
from equality import CHOOSY
from trace_events import mistakes_in_trace

import nn
import parallel.reports.breakdown
from collectives import price
from collectives.pricing.networks import Network
from collectives.pricing.trace_formats import read_chrome_trace, read_goal, recorded_schedule
from collectives.steps import Compute
from parallel.command.options import Options
from parallel.reports.breakdown import PARTS, Breakdown, draw_breakdown
from parallel.reports.timeline import split_waits, write_trace
from parallel.run_trainer import RunTrainer
from parallel.sync.base import GradientSync

ROOT = Path(__file__).parents[2]
NETLAB = ROOT / "scripts" / "netlab.py"
sys.path.insert(0, str(NETLAB.parent))
import netlab  # noqa: E402

MPIEXEC = Path(sys.executable).with_name("mpiexec")
SLOW = 0.1  # seconds that a slow rank computes longer, at least


def network():
    return nn.Network(nn.Linear(6, 3), (6,), np.float64)


def dataset(n=40):
    rng = np.random.default_rng(0)
    return nn.data.Dataset(rng.random((n, 6)), rng.integers(0, 3, n), dtype=np.float64)


def slowed(call, seconds, sleep=time.sleep):
    def slow(*arguments):
        sleep(seconds)
        return call(*arguments)

    return slow


@pytest.fixture
def sleep(monkeypatch):
    """A function that makes time pass, which does not pass otherwise."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (nn.data.loader, parallel.reports.breakdown):
        monkeypatch.setattr(module, "time", clock)
    return sleep


def test_one_process_is_measured_and_drawn(sleep):
    trainer = RunTrainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    trainer.compute_gradients = slowed(trainer.compute_gradients, 3, sleep)
    trainer.update = slowed(trainer.update, 2, sleep)
    trainer.sum_scores = slowed(trainer.sum_scores, 50, sleep)
    breakdown = Breakdown(trainer)
    wide = nn.data.Dataset(np.zeros((40, 6)), np.zeros(40, int), dtype=np.float64)
    reading = slowed(lambda x, keys: x, 4, sleep)
    loader = nn.Loader(wide, 10, transform=reading, prefetch=0, timeline=breakdown.loader)
    training = nn.fit(trainer, loader, 2, [breakdown], validation=nn.Loader(wide, 10))
    for record in training.history:
        assert tuple(record["breakdown"]) == PARTS
        for part, seconds in zip(PARTS, (3, 0, 0, 2, 1), strict=True):  # all four batches are read at once
            assert record["breakdown"][part] == {"min": seconds, "mean": seconds, "max": seconds}, part
    assert breakdown.table.tolist() == [[3, 0, 0, 2, 1]] and breakdown.steps == 8
    assert breakdown.by_rank() == {"compute": [3], "wait": [0], "communicate": [0], "update": [2], "input": [1]}


def test_the_picture_has_a_bar_for_every_rank():
    bars = draw_breakdown(np.array([[3e-3, 1e-3, 1e-3, 1e-3, 0], [1e-3, 3e-3, 1e-3, 1e-3, 0]])).axes[0].patches
    np.testing.assert_allclose([bar.get_width() for bar in bars], [3, 1, 1, 1, 0, 1, 3, 1, 1, 0])
    np.testing.assert_allclose([bar.get_x() for bar in bars[:5]], [0, 3, 4, 5, 6])


def test_breakdown_and_timeline_have_the_same_colours_and_the_shares_are_told():
    from matplotlib.colors import to_hex

    from collectives import draw_timeline

    axes = draw_breakdown(np.array([[3e-3, 1e-3, 2e-3, 4e-3, 0]])).axes[0]
    names, handles = axes.get_legend_handles_labels()[::-1]
    ours = {name: to_hex(handle.patches[0].get_facecolor()) for name, handle in zip(names, handles, strict=True)}
    events = [{"rank": 0, "name": name, "start": i, "end": i + 1} for i, name in enumerate([*PARTS[:4], "read"])]
    patches = draw_timeline(events).axes[0].get_legend().get_patches()
    theirs = {patch.get_label().replace("read", "input"): to_hex(patch.get_facecolor()) for patch in patches}
    assert ours == theirs and len(set(ours.values())) == len(PARTS)
    assert [text.get_text() for text in axes.texts] == ["30%", "10%", "20%", "40%"]


@pytest.mark.parametrize("scored", [True, False], ids=["accuracy", "loss alone"])
def test_the_best_epoch_is_ringed(tmp_path, monkeypatch, scored):
    """The first of the best by validation accuracy, or where there is none by validation loss."""
    from matplotlib.figure import Figure

    from parallel.reports.curves import write_curves

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **more: drawn.append(self))
    scores = [(0.9, 0.5), (0.4, 0.8), (0.6, 0.8)]
    history = [
        {"epoch": e, "loss": 1.0, "validation_loss": loss, "images_per_second": 1.0}
        | ({"validation_accuracy": score} if scored else {})
        for e, (loss, score) in enumerate(scores, 1)
    ]
    write_curves(history, tmp_path / "curves.png")
    rings = [line for ax in drawn[0].axes for line in ax.lines if line.get_label().startswith("best")]
    (ring,) = rings
    assert ring.get_label() == ("best: 80.00% after epoch 2" if scored else "best: 0.4 after epoch 2")
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([2], [80.0 if scored else 0.4])


def test_a_phase_inside_another_counts_once(sleep):
    trainer = SimpleNamespace(communicator=None, sum_scores=None)
    trainer.part = SimpleNamespace(inner=lambda: sleep(5))
    trainer.outer = lambda: (sleep(2), trainer.part.inner(), trainer.meet(), trainer.part.inner())
    trainer.meet = lambda: (sleep(1), trainer.part.inner())
    trainer.phases = (("compute", "outer", False), ("update", "part.inner", False), ("sum", "meet", True))
    breakdown = Breakdown(trainer)
    trainer.outer()
    trainer.outer()
    assert breakdown.spent == [4, 0, 0, 30, 0] and breakdown.together == [1, 1]


def test_what_is_read_ahead_is_no_input():
    breakdown = Breakdown(SimpleNamespace(communicator=None, sum_scores=None, phases=()))
    consumer = threading.get_ident()

    def reading(x, keys):
        while sys._current_frames()[consumer].f_code.co_name != "_ahead":  # until this one's consumer waits for it
            time.sleep(1e-3)
        time.sleep(SLOW)
        return x

    batches = nn.Loader(dataset(), 10, transform=reading, timeline=breakdown.loader).epoch(0)
    start = time.perf_counter()
    first = next(batches)  # of the only block
    assert SLOW < breakdown.spent[4] < time.perf_counter() - start, "read and waited for: counts once"
    spent = breakdown.spent[4]
    assert len([first, *batches]) == 4 and breakdown.spent[4] == spent


def test_measuring_costs_little_more_than_the_clock():
    """Three phases of a step that does nothing: six looks at it, and as much again, under a microsecond."""

    def trainer():
        made = SimpleNamespace(communicator=None, sum_scores=None, phases=GradientSync.phases)
        made.compute_gradients = lambda *_: None
        made.sync = SimpleNamespace(finish_step=lambda: None, update=lambda: None)
        return made

    def step(trainer):
        trainer.compute_gradients(1, 2, 3)
        trainer.sync.finish_step()
        trainer.sync.update()

    def cost(call, *arguments):
        start = time.perf_counter()
        for _ in range(500):
            call(*arguments)
        return time.perf_counter() - start

    plain, measured, look = trainer(), trainer(), time.perf_counter
    looks = lambda: (look(), look(), look(), look(), look(), look())
    Breakdown(measured)
    turns = [(cost(step, plain), cost(step, measured), cost(looks)) for _ in range(40)]
    without, with_it, clock = map(min, zip(*turns, strict=True))
    assert with_it - without < 6 * clock


@pytest.mark.mpi(ranks=3)
def test_a_slow_rank_lets_the_others_wait(comm):
    from collectives import Communicator
    from parallel import DistributedDataParallel

    communicator = Communicator(comm)
    make = (
        lambda: DistributedDataParallel(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator),
        lambda: DistributedDataParallel(
            network(), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator, node_memory="off", overlap="none"
        ),
        lambda: DistributedDataParallel(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator, shards=8),
    )
    for trainer_of in make:
        for slow in longer(SLOW):
            trainer = trainer_of()
            if comm.rank == 1:
                trainer.compute_gradients = slowed(trainer.compute_gradients, slow)
            breakdown = Breakdown(trainer)
            loader = nn.Loader(dataset(), 10, shard=trainer.shard, timeline=breakdown.loader)
            (record,) = nn.fit(trainer, loader, 1, [breakdown], validation=loader).history
            everyone = comm.allgather(record["breakdown"])
            assert everyone[0] == everyone[1] == everyone[2], "all ranks have the same record"
            table = dict(zip(PARTS, breakdown.table.T, strict=True))  # so it is the same on all ranks
            assert table["compute"][1] >= slow
            waits, computes = table["wait"], table["compute"]
            if (
                slow > 2 * max(computes[0], computes[2])
                and min(waits[0], waits[2]) > slow / 2 > waits[1]
                and table["communicate"].max() < slow / 2
            ):
                break
        else:
            pytest.fail(f"{trainer.describe()}: rank 1 computes {slow} s longer: {table}")
        assert everyone[0]["wait"]["min"] < everyone[0]["wait"]["mean"] < everyone[0]["wait"]["max"]


@pytest.mark.mpi(ranks=2)
def test_every_strategy_has_its_breakdown(comm):
    """The parts of a step are found, and make up most of its time."""
    from collectives import Communicator
    from parallel.strategies import AS_ONE, STRATEGIES, build_trainer

    communicator, data = Communicator(comm), dataset()
    for name in STRATEGIES:
        if name in CHOOSY:
            continue
        for reproducible in (None, 4) if name in AS_ONE else (None,):
            options = Options(strategy=name, reproducible=reproducible, batch=10)
            for slow in longer(0.01):
                trainer = build_trainer(options, network(), nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
                busy = next(method for part, method, _ in trainer.phases if part in ("compute", "forward"))
                setattr(trainer, busy, slowed(getattr(trainer, busy), slow))
                breakdown = Breakdown(trainer)
                loader = nn.Loader(data, 10, shard=trainer.shard, timeline=breakdown.loader)
                training = nn.fit(trainer, loader, 1, [breakdown])
                total = training.seconds / trainer.steps
                parts = breakdown.table[comm.rank]
                assert breakdown.table.shape == (2, 5) and (breakdown.table >= 0).all()
                assert parts.sum() <= total, f"{name}, {reproducible}: {parts} of {total}"
                if all(comm.allgather(0.5 * total < parts.sum())):
                    break
            else:
                pytest.fail(f"{name}, {reproducible}: {parts} of {total}")


@pytest.mark.mpi(ranks=4)
def test_clocks_of_hosts_are_brought_together(comm):
    """Ranks 0, 1 on one host, 2, 3 on another, whose clock is 1000 s ahead and gains 1% (in place of 0.001%)."""
    from parallel.reports.clock_offsets import measure, to_rank_0

    hosts, start = [0, 0, 2, 2], comm.bcast(time.perf_counter())

    def clock():
        now = time.perf_counter()
        return now if comm.rank < 2 else 1000 + now + 0.01 * (now - start)

    begin = measure(comm, hosts, clock)
    begun = time.perf_counter() - start
    comm.Barrier()
    time.sleep(0.1)
    earliest, mine, latest = time.perf_counter(), clock(), time.perf_counter()
    time.sleep(0.1)
    ending = time.perf_counter() - start
    end = measure(comm, hosts, clock)
    ended = time.perf_counter() - start
    if comm.rank < 2:
        assert (begin.seconds, begin.error) == (0, 0) and to_rank_0(mine, begin, end) == mine
        return
    assert begin.error > 0 and end.error > 0
    # What the clock has gained when it is measured is known as well as the moment.
    assert -0.01 * begun - begin.error <= begin.seconds + 1000 <= begin.error
    assert -0.01 * ended - end.error <= end.seconds + 1000 <= end.error - 0.01 * ending, "it has gained meanwhile"
    error = begin.error + end.error + 0.01 * (begun + ended - ending)
    assert earliest - error <= to_rank_0(mine, begin, end) <= latest + error
    gained = 0.01 * (earliest - start - begun)
    assert to_rank_0(mine, begin, begin) - earliest >= gained - begin.error, "control: with one it has run off"


def event(rank, name, start, end, together=False):
    return {"rank": rank, "lane": "", "name": name, "start": start, "end": end, "together": together}


def test_waiting_lasts_until_the_last_rank_has_come():
    ranks = [
        [event(0, "compute", 0, 2), event(0, "sum", 2, 9, True), event(0, "sum", 10, 12, True)],
        [event(1, "compute", 0, 7), event(1, "sum", 7, 9, True), event(1, "sum", 11, 12, True)],
    ]
    found = [(e["rank"], e["name"], e["start"], e["end"]) for e in split_waits(ranks)]
    assert found == [
        (0, "compute", 0, 2), (0, "wait", 2, 7), (0, "sum", 7, 9), (0, "wait", 10, 11), (0, "sum", 11, 12),
        (1, "compute", 0, 7), (1, "sum", 7, 9), (1, "sum", 11, 12),
    ]  # fmt: skip
    ranks[1].pop()  # a rank whose events are cut off earlier
    assert (0, "sum", 10, 12) in [(e["rank"], e["name"], e["start"], e["end"]) for e in split_waits(ranks)]


def test_a_timeline_survives_both_formats(tmp_path):
    """Chrome trace: every event; GOAL: the computation of each rank, and the waiting, which is simulated again."""
    events = split_waits(
        [
            [event(0, "compute", 0, 2), event(0, "sum", 2, 9, True), event(0, "update", 10, 11)],
            [event(1, "compute", 0.5, 7), event(1, "sum", 7, 9, True), event(1, "update", 9, 12)],
        ]
    )
    events.append(event(1, "read", 0, 4) | {"lane": "loader"})
    write_trace(events, tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    again = read_chrome_trace(tmp_path / "trace.json")
    expected = [{name: e[name] for name in ("rank", "lane", "name", "start", "end")} for e in events]
    assert again == [e | {"start": pytest.approx(e["start"]), "end": pytest.approx(e["end"])} for e in expected]
    fields = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all(isinstance(e["pid"], int) and isinstance(e.get("tid", 0), int) for e in fields)
    schedule = recorded_schedule(events)
    goal = read_goal(tmp_path / "recorded.goal", itemsize=1)
    assert [[type(step) for steps in goal(r, 2) for step in steps] for r in (0, 1)] == [
        [type(step) for steps in schedule[r] for step in steps] for r in (0, 1)
    ]
    free = Network.hockney(0.0, 0.0)
    assert price(goal, 2, None, 1, free).finish == pytest.approx([11, 12])
    schedule[1].insert(0, (Compute("late", seconds=5.0),))  # a rank that is later makes the other wait
    assert price(lambda r, size: schedule[r], 2, None, 1, free).finish == pytest.approx([16, 17])


@pytest.mark.mpi(ranks=2)
def test_a_run_leaves_its_breakdown_and_one_timeline_of_all_ranks(comm, tmp_path):
    """Data in memory-mapped files: reading ahead lies beside computing, on the picture and in the trace."""
    from parallel.command.training_run import train

    if comm.rank == 0:
        for part, count in (("train", 1200), ("test", 20)):
            np.save(tmp_path / f"x_{part}.npy", np.zeros((count, 48, 48, 1), np.uint8))
            np.save(tmp_path / f"y_{part}.npy", np.arange(count) % 10)
    data = comm.bcast(str(tmp_path))
    for epochs in longer(2):  # on a busy machine the thread that reads may get no core beside the one that computes
        out = Path(data) / f"run{epochs}"
        options = Options(model="mlp:2304,64,10", data=data, epochs=epochs, batch=100, timeline=True, out=str(out))
        result = train(options)
        comm.Barrier()
        fields = json.loads((out / "trace.json").read_text())
        assert not mistakes_in_trace(fields)
        trace, spans = fields["traceEvents"], {}
        for e in trace:
            if e["ph"] == "X":
                spans.setdefault((e["pid"], e["name"]), []).append((e["ts"], e["ts"] + e["dur"], e["tid"]))
        hidden = [
            any(max(a, c) < min(b, d) for a, b, _ in spans[rank, "read"] for c, d, _ in spans[rank, "compute"])
            for rank in (0, 1)
        ]
        if all(hidden):
            break
    assert all(hidden), "some of the reading happens while each rank computes"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [tuple(line["breakdown"]) for line in lines] == epochs * [PARTS]
    assert comm.rank or {len(values) for values in result["breakdown"].values()} == {2}
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    goal = read_goal(out / "recorded.goal", itemsize=1)
    free = Network.hockney(0.0, 0.0)
    again, end = price(goal, 2, None, 1, free).seconds, max(e["end"] for e in read_chrome_trace(out / "trace.json"))
    assert 0.5 * end < again < 1.5 * end, "computation and waiting, simulated again"
    for rank in (0, 1):
        assert {"read", "compute", "communicate", "update"} <= {name for r, name in spans if r == rank}
        assert {lanes[rank, lane] for _, _, lane in spans[rank, "read"]} == {"loader"}
    for name in ("timeline.png", "breakdown.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_phases_are_the_trainers_own_or_the_usual():
    one = RunTrainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    assert [name for name, _, _ in one.phases] == ["compute", "update"]


IN_THE_LAB = """
import socket, time
from mpi4py import MPI
from collectives import Communicator
from parallel.reports.clock_offsets import measure
from collectives.failures.launch_check import nodes_of

ahead = {"h1": 7.0, "h2": 19.0}[socket.gethostname()]
world = Communicator(MPI.COMM_WORLD)
for shift in (0.0, ahead):  # hosts of the lab have one clock
    for _ in range(100):  # on a busy machine most round trips are long
        offset = measure(world, nodes_of(world), lambda: time.perf_counter() + shift)
        if max(world.allgather(offset.error)) <= 0.02:
            break
    true = 0.0 if not shift else 7.0 - ahead
    assert abs(offset.seconds - true) <= offset.error <= 0.02, (shift, offset)
    assert (offset.error > 0) == (socket.gethostname() == "h2")
print(f"{socket.gethostname()} {offset.seconds:.1f}", flush=True)  # to what error allows
"""


@pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against()))
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")
def test_clocks_across_hosts(disk_path):
    (disk_path / "clocks_in_the_lab.py").write_text(IN_THE_LAB)
    lab = [sys.executable, NETLAB, "run", "--hosts", "2", "--slots", "2", "--rate", "400mbit", "--"]
    ranks = [MPIEXEC, "-n", "4", sys.executable, "-m", "mpi4py", disk_path / "clocks_in_the_lab.py"]
    done = subprocess.run([*map(str, lab + ranks)], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted(done.stdout.split("\n"))[1:] == ["h1 0.0", "h1 0.0", "h2 -12.0", "h2 -12.0"]

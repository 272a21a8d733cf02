"""Servers that wait for nobody, or not for long: nothing is lost, bounds hold, one worker is one process."""

import ast
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from equality import OPTIMIZERS, SEED, batches, cnn, dataset, difference, mlp, train

import nn
from parallel.command.options import Options
from parallel.command.parsing import parse
from parallel.launch import launcher
from parallel.settings import OptionError
from parallel.sync.mailbox import HEAD_BYTES, Actor, Mailbox, Message

ROOT = Path(__file__).parents[2]
LATE = ("ssp:0", "ssp:1", "async", "ssp:2,ahead=1", "async:ahead=1")


def server(comm, network=mlp, optimizer=None, servers=1, place="dedicated", **options):
    from collectives import Communicator
    from parallel import ParameterServer

    rule = optimizer or nn.SGD(0.1)
    return ParameterServer(
        network(), nn.CrossEntropyLoss(), rule, Communicator(comm), SEED, servers, place, limit=60, **options
    )


def downpour(comm, optimizer=None, servers=1, place="dedicated", network=mlp, **options):
    from collectives import Communicator
    from parallel import Downpour

    rule = optimizer or nn.SGD(0.1)
    return Downpour(
        network(), nn.CrossEntropyLoss(), rule, Communicator(comm), SEED, servers, place, limit=60, **options
    )


def pushed(trainer):
    """A list to which a worker's pushes are added, as they leave it."""
    found, worker = [], trainer.sync.worker
    if worker:
        push = worker.push

        def noted(rate):
            if worker.samples:
                found.append(worker.unpushed.copy())
            push(rate)

        worker.push = noted
    return found


def free(trainer):
    trainer.close()
    trainer.communicator.release()


@pytest.mark.mpi(ranks=3)
def test_one_worker_is_one_process_with_any_optimizer(comm):
    """One worker whose reads wait: bit for bit sequential training, Adagrad's in Downpour, on one server and two."""
    two = comm.Split(comm.rank < 2)
    for ranks, servers in (two, 1), (comm, 2):
        if ranks is two and comm.rank == 2:
            continue
        for name, rule in {**OPTIMIZERS, "adagrad": lambda: nn.Adagrad(0.05)}.items():
            if servers == 2 and name in ("lars", "lamb"):
                continue
            one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), rule(), SEED)
            losses = train(one, "mlp")
            for make, options in (server, {"consistency": "async"}), (downpour, {}):
                many = make(ranks, optimizer=rule(), servers=servers, **options)
                found = train(many, "mlp")
                many.synchronize()
                assert many.sync.updates == 5
                assert not many.sync.is_worker or found == losses
                if ranks.rank == 0:
                    np.testing.assert_array_equal(
                        many.flat_parameters, one.flat_parameters, err_msg=f"{name}, {servers}"
                    )
                free(many)


@pytest.mark.mpi(ranks=4)
def test_in_step_the_servers_make_the_step_of_data_parallelism(comm, thorough):
    """Bound 0, or as long as all start warm: with SGD to 1e-12 what one process computes, wherever servers are."""
    one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    train(one, "mlp")
    for servers, place in (2, "dedicated"), (4, "workers"), *(((1, "dedicated"), (1, "workers")) if thorough else ()):
        ends = set()
        for make in (
            lambda s=servers, p=place: server(comm, servers=s, place=p, consistency="ssp:0"),
            lambda s=servers, p=place: downpour(comm, servers=s, place=p, warm=5, push=3, fetch=2),
        ):
            many = make()
            train(many, "mlp")
            many.check_replicas()
            worst = difference(many.flat_parameters, one.flat_parameters) if many.is_writer else 0
            assert worst < 1e-12, (servers, place, worst)
            ends.add(many.digest())
            free(many)
        assert len(ends) == 1, "in the order of workers: the same bits every time"
    control = server(comm, consistency="ssp:0")
    if control.sync.is_worker and comm.rank == 1:
        control.sync.worker.push = lambda rate: (
            setattr(control.sync.worker, "samples", 0) or type(control.sync.worker).push(control.sync.worker, rate)
        )
    train(control, "mlp")
    control.synchronize()
    assert comm.rank or difference(control.flat_parameters, one.flat_parameters) > 1e-6, "control: one pushes nothing"


@pytest.mark.mpi(ranks=3)
def test_what_is_applied_is_what_was_pushed(comm):
    """With SGD the way from the first parameters to the last is the sum of all pushes, however late, once each."""
    cases = [(server, {"consistency": text}) for text in LATE]
    cases += [(downpour, {"push": 3, "fetch": 2}), (downpour, {"push": 2, "fetch": 4, "ahead": True, "warm": 2})]
    for make, options in cases:
        for servers, place in (1, "dedicated"), (2, "workers"):
            many = make(comm, servers=servers, place=place, **options)
            start, sent = many.flat_parameters.copy(), pushed(many)
            loader = nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64)
            seen = nn.fit(many, loader, 2).history
            assert len(seen) == 2 and many.steps == 6
            mine = sum(sent, np.zeros(many.network.layout.size))
            total = sum(comm.allgather(mine if many.sync.is_worker else np.zeros(many.network.layout.size)))
            counts = many.epoch_record()["staleness"]
            assert sum(counts["updates"]) == servers * sum(comm.allgather(len(sent)))
            if comm.rank == 0:
                way = (start - many.flat_parameters) / 0.1
                assert difference(way, total) < 1e-12, (options, servers, place)
                assert difference(way, total - sent[0]) > 1e-6, "control: one push less"
            many.check_replicas()
            free(many)


@pytest.mark.mpi(ranks=2)
def test_weight_decay_is_once_per_step(comm):
    """Zero gradients: a push of many steps decays as often as they do, and steps without samples decay as well."""

    def check(trainer, counts, want):
        """Train with this number of zeros in each step."""
        start = trainer.flat_parameters.copy()
        for n in counts:
            trainer.step(np.zeros((n, 6)), np.zeros(n, int), 4)
        trainer.synchronize()
        if comm.rank == 0:
            np.testing.assert_allclose(trainer.flat_parameters, want * start, rtol=1e-12)
        free(trainer)

    def linear():
        return nn.Network(nn.Sequential(nn.Linear(6, 3, bias=False)), (6,), "float64")

    def decaying():
        return nn.SGD(0.1, weight_decay=0.5)

    works = comm.rank == 0
    for push in 1, 2, 4, 8:
        many = downpour(comm, decaying(), network=linear, push=push, fetch=push)
        check(many, [4 * works] * 8, (1 - 0.05 * push) ** (8 // push))
    many = server(comm, linear, decaying(), consistency="async")
    check(many, [0, 4 * works] * 4, (1 - 0.05 * 2) ** 4)
    for busy in 0, 1:  # the other worker never has samples
        many = server(comm, linear, decaying(), place="workers", consistency="ssp:0")
        check(many, [4 * (comm.rank == busy)] * 8, (1 - 0.05) ** 8)


@pytest.mark.mpi(ranks=3)
def test_compressed_pushes_are_applied_too_and_the_rest_is_remembered(comm):
    from parallel.sync import compression

    for text in "topk:0.1", "onebit":
        for make, options in (server, {"consistency": "async:ahead=1"}), (downpour, {"push": 2}):
            many = make(comm, servers=2, place="workers", compressor=compression.parse(text), **options)
            start, sent = many.flat_parameters.copy(), pushed(many)
            train(many, "mlp")
            many.synchronize()
            left = sum(memory for memory in many.sync.memories.flat.values())
            total = sum(comm.allgather(sum(sent) - left))
            assert difference((start - many.flat_parameters) / 0.1, total) < 1e-12, text
            found = many.bytes_sent()
            assert 0 < found["bytes_sent"] < found["bytes_dense"]
            kept = {name: array.copy() for name, array in many.state_dict().items()}
            if comm.rank == 0:
                assert any(name.startswith("compress/") for name in kept)
            free(many)


class Token:
    """A straggler: in its steps it waits until another rank lets it go on."""

    def __init__(self, comm, trainer, straggler):
        self.comm, self.straggler = comm, straggler
        begin = trainer.sync.begin_step

        def waiting(step, *rest):
            if comm.rank == straggler:
                comm.recv(source=0)
            return begin(step, *rest)

        trainer.sync.begin_step = waiting

    def give(self):
        if self.comm.rank == 0:
            self.comm.send(None, self.straggler)


@pytest.mark.mpi(ranks=3)
def test_a_bound_holds_and_is_reached_beside_a_straggler(comm):
    """Worker 1 makes no step before worker 0 says so; that one goes as far as the bound allows, and no further."""
    for text, bound in ("ssp:1", 1), ("ssp:2", 2), ("ssp:2,ahead=1", 2), ("async", math.inf):
        many = server(comm, consistency=text)
        token, apart = Token(comm, many, 1), []
        free_steps = min(bound + 1, 5)
        for i, batch in enumerate(batches("mlp", many.shard)):
            if i == free_steps:  # it would wait for ever: so far it has not waited for anybody
                for _ in range(5):
                    token.give()
            many.step(*batch)
            if many.sync.is_worker:
                worker = many.sync.worker
                apart.append(worker.clock - 1 - min(copy.least for copy in worker.copies))
        if free_steps == 5:
            for _ in range(5):
                token.give()
        many.synchronize()
        if comm.rank == 0:
            assert max(apart) <= bound, (text, apart)
            assert apart[:free_steps] == list(range(free_steps)), "the straggler was where it had been"
        free(many)


@pytest.mark.mpi(ranks=3)
def test_a_server_that_breaks_the_bound_is_caught_by_who_reads(comm):
    many = server(comm, consistency="ssp:1")
    token = Token(comm, many, 1)
    if many.sync.is_server:
        many.sync.server.clock_table.bound = math.inf
    said = ""
    try:
        for batch in batches("mlp", many.shard):
            many.step(*batch)
    except RuntimeError as error:
        said = str(error)
    for _ in range(5):
        token.give()
    many.synchronize()
    if comm.rank == 0:
        assert "reads at clock 2, with the bound 1, what the server on rank 2 had at clock 0 of the slowest" in said
    else:
        assert not said
    free(many)


@pytest.mark.mpi(ranks=3)
def test_a_worker_that_has_finished_holds_nobody_back(comm):
    """Worker 1 is told that its epoch ends after two steps; worker 0 makes all five within a bound of one."""
    from parallel.strategies.join import UnevenTotal

    many = server(comm, consistency="ssp:1")
    for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
        if comm.rank == 1 and i == 2:
            break
        many.step(x, y, UnevenTotal(total, 0))
        if comm.rank == 2 and i == 1:  # the server's later steps are those that worker 0 makes alone
            break
    if comm.rank == 1:
        many.sync.worker.finish(0.1)
    if comm.rank == 2:
        many.sync.server.serve(math.inf)
        assert many.sync.server.clock_table.reached == {0: 5, 1: 2}
    if comm.rank == 0:
        many.sync.worker.finish(0.1)
    many.sync.synchronized = True
    free(many)


class Flood:
    """A communicator of rank 3: ranks 0 and 2 always have sent something; 1 once in a while."""

    rank = 3

    def __init__(self):
        self.looks, self.sent = 0, [0, 0, 0]

    def Dup(self):
        return self

    def Free(self):
        """Nothing is allocated."""

    def Improbe(self, peer, status):
        from mpi4py import MPI

        self.looks += 1
        if peer == 1 and self.looks % 2:
            return None
        self.sent[peer] += 1
        status.Set_elements(MPI.BYTE, HEAD_BYTES)
        return FloodMessage(peer)


class FloodMessage:
    def __init__(self, peer):
        self.peer = peer

    def Irecv(self, buffer):
        buffer.view(np.float64)[:4] = 0, self.peer, 3, 0  # kind, sender, receiver, length of the header
        return self

    def Test(self):
        return True


def test_a_rank_receives_from_all_in_turn():
    """A rank that sends without end gets no more turns than others."""
    mailbox, served = Mailbox(Flood(), {("worker", i): i for i in range(4)}, ("push",)), []
    mailbox.handlers["worker", 3] = lambda message: served.append(message.sender[1])
    mailbox.wait(lambda: len(served) >= 100)
    assert abs(served.count(0) - served.count(2)) <= 1 and served.count(1) >= 10
    served.clear()
    assert mailbox.poll() and len(served) == 4, "between layers about one message of each rank, however many there are"
    mailbox.close()


def test_a_wait_handles_no_message_behind_the_one_that_it_waits_for():
    """What comes next may belong to the next step, such as the end of a worker behind its last push."""

    class Late(Flood):
        """Nothing has come at first."""

        def Improbe(self, peer, status):
            self.looks += 1
            return super().Improbe(peer, status) if self.looks > 3 else None

    mailbox, served = Mailbox(Late(), {("worker", i): i for i in range(4)}, ("push",)), []
    mailbox.handlers["worker", 3], mailbox.serving = served.append, True
    mailbox.wait(lambda: bool(served))
    assert len(served) == 1
    mailbox.close()


def test_a_handler_receives_while_it_sends_and_runs_no_other_handler():
    """One message to a rank is in flight at a time; those that come meanwhile are handled afterwards."""

    class Slow(Flood):
        """A message to rank 1 leaves when three others have come."""

        in_flight = False

        def Isend(self, buffer, peer):
            assert not self.in_flight
            self.in_flight, self.until = True, sum(self.sent) + 3
            return self

        def Test(self):
            self.in_flight = sum(self.sent) < self.until
            return not self.in_flight

    mailbox, handled = Mailbox(Slow(), {("worker", i): i for i in range(4)}, ("push",)), []

    def handle(message):
        handled.append("begin")
        for _ in range(2):
            mailbox.send(Message("push", ("worker", 3), ("worker", 1)))
        handled.append("end")

    mailbox.handlers["worker", 3] = handle
    mailbox.wait(lambda: len(handled) >= 8)
    assert handled == ["begin", "end"] * 4 and len(mailbox.arrived) >= 3
    mailbox.handlers["worker", 3] = lambda message: None  # sends no more
    mailbox.close()


class Sender(Actor):
    """Answers one message with three large ones to the actor of its name on the other rank."""

    sent, received = False, 0

    def handle(self, message):
        if message.kind == "go":
            for _ in range(3):
                self.send((self.role[0], 1 - self.role[1]), "data", (), np.zeros(1 << 20))
            self.sent = True
        else:
            self.received += 1


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("serving", [True, False])
def test_mailboxes_that_send_receive_for_each_other(comm, serving):
    """Each rank sends in a handler of another mailbox first; the messages leave only if both mailboxes receive."""
    mailboxes = [Mailbox(comm, {("a", 0): 0, ("a", 1): 1}, ("go", "data"), limit=20.0) for _ in range(2)]
    actors = [Sender(mailbox, ("a", comm.rank)) for mailbox in mailboxes]
    for mailbox, actor in zip(mailboxes, actors, strict=True):
        mailbox.serving = serving
        actor.send(("a", comm.rank), "go")
    first = comm.rank
    comm.Barrier()
    for number in first, 1 - first:
        mailboxes[number].wait(lambda actor=actors[number]: actor.sent)
    for mailbox, actor in zip(mailboxes, actors, strict=True):
        mailbox.wait(lambda actor=actor: actor.received == 3)
        mailbox.close()


def test_compensation_is_its_formula():
    from parallel.sync.asynchronous.compensation import Compensation

    rng = np.random.default_rng(0)
    correct, mean_square, w = Compensation(7, np.float64), np.zeros(7), rng.random(7)
    then = {0: w.copy(), 1: w.copy()}
    for worker in then:
        correct.remember(worker, 0, w)
    for version, worker in enumerate((0, 1, 1, 0)):
        g = rng.standard_normal(7)
        mean_square = 0.95 * mean_square + 0.05 * g**2
        want = g + 2 / np.sqrt(mean_square + 1e-7) * g**2 * (w - then[worker])
        correct(g, w, worker, max(correct.sent[worker]))
        np.testing.assert_allclose(g, want, rtol=1e-12)
        np.testing.assert_allclose(correct.mean_square, mean_square, rtol=1e-12)
        w = w - 0.1 * g
        correct.remember(worker, version + 1, w)
        then[worker] = w.copy()
        assert len(correct.sent[worker]) <= 2


@pytest.mark.mpi(ranks=3)
def test_compensated_servers_compute_what_the_formula_says(comm):
    """In step the order is that of workers, so it can be computed here; nothing is late for the first of them."""
    many = server(comm, consistency="ssp:0", delay_compensation=True)
    one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    w, mean_square = one.flat_parameters.copy(), 0.0
    shards = [batches("mlp", (i, 2)) for i in range(2)]
    for step in range(5):
        then = w.copy()
        for x, y, total in (shard[step] for shard in shards):
            one.flat_parameters[:] = then
            one.compute_gradients(x, y, total)
            g = one.gradients.copy()
            if len(x):
                mean_square = 0.95 * mean_square + 0.05 * g**2
                w = w - 0.1 * (g + 2 / np.sqrt(mean_square + 1e-7) * g**2 * (w - then))
    train(many, "mlp")
    many.synchronize()
    if comm.rank == 0:
        assert difference(many.flat_parameters, w) < 1e-12
    free(many)


@pytest.mark.mpi(ranks=3)
def test_checkpoints_continue_and_are_continued_by_other_strategies(comm):
    """In step, so that all is determined: stopped and continued is the same, bits and moments; and others go on."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    options = {"consistency": "ssp:0", "delay_compensation": True, "network": cnn_alone}

    def make():
        return server(comm, optimizer=nn.Adam(0.01), servers=2, place="workers", **options)

    straight, first = make(), make()
    history = batches("cnn", straight.shard)
    for batch in history[:3]:
        straight.step(*batch)
        first.step(*batch)
    kept = comm.bcast({name: array.copy() for name, array in first.state_dict().items()})
    straight.synchronize()
    assert int(kept["exchange/updates"]) == straight.sync.updates == 9, "three workers, three steps"
    again = make()
    again.load_state_dict(kept)
    for batch in history[3:]:
        straight.step(*batch)
        again.step(*batch)
    a, b = straight.state_dict(), again.state_dict()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    before = again.snapshot()
    again.step(*history[0])
    again.restore(before)
    assert again.digest() == straight.digest()
    other = DistributedDataParallel(cnn_alone(), nn.CrossEntropyLoss(), nn.Adam(0.01), Communicator(comm), SEED)
    other.load_state_dict(kept)
    other.step(*history[3])
    back = comm.bcast({name: array.copy() for name, array in other.state_dict().items()})
    again.load_state_dict(back)
    assert again.sync.updates == 4 * 3 and again.steps == 4
    again.step(*history[4])
    one = again.alone()
    assert comm.rank or (one.steps == 5 and np.isfinite(one.flat_parameters).all())


def cnn_alone():
    return cnn(synchronized=False)


@pytest.mark.mpi(ranks=3)
def test_a_loss_that_is_not_finite_ends_all_ranks_and_is_pushed_nowhere(comm):
    for make, options in (
        (server, {"consistency": "async"}),
        (server, {"consistency": "ssp:1", "servers": 2, "place": "workers"}),
        (downpour, {"push": 3, "fetch": 3, "ahead": True}),
    ):
        many = make(comm, **options)
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1"):
            for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
                if comm.rank == 1 and i == 2:
                    x[0] = np.nan
                many.step(x, y, total)
            many.synchronize()
        many.synchronize()
        assert not many.sync.is_worker or np.isfinite(many.flat_parameters).all()
        many.check_replicas()
        free(many)
    from nn.optim import clipping

    many = server(comm, optimizer=nn.SGD(0.1, clip=clipping.ClipGlobalNorm(1.0)), consistency="async")
    with pytest.raises(FloatingPointError, match="norm"):
        for i, batch in enumerate(batches("mlp", many.shard)):
            if many.sync.is_worker and i == 1:
                many.sync.end_addend = lambda: many.gradients.fill(np.inf)
            many.step(*batch)
        many.synchronize()
    free(many)


@pytest.mark.mpi(ranks=2)
def test_who_waits_for_whom_is_told(comm):
    """A worker that goes away in the middle of a step: the server names it."""
    many = server(comm, consistency="async")
    if comm.rank == 1:
        many.sync.begin_step(0, 0, 16, 1)
        many.sync.mailbox.limit = 0.05
        with pytest.raises(TimeoutError, match=r"server on rank 1 waits for the workers on ranks 0 \(clock 0\)"):
            many.sync.finish_step()
        many.sync.mailbox.limit = 60
        comm.send(None, 0)
        many.sync.finish_step()
    else:
        comm.recv(source=1)
        (x, y, total), *_ = batches("mlp", (0, 1))
        many.step(x, y, total)
    many.synchronize()
    free(many)


DYING = """
import os, signal, sys
import numpy as np
import nn
from mpi4py import MPI
from collectives import Communicator
from parallel import ParameterServer

c = Communicator(MPI.COMM_WORLD)
network = nn.Network(nn.Sequential(nn.Linear(4, 3)), (4,))
how = {"consistency": "ssp:1", "limit": 60}
trainer = ParameterServer(network, nn.CrossEntropyLoss(), nn.SGD(0.1), c, **how)
sync = trainer.sync
x, y = np.ones((2 * sync.is_worker, 4), "f4"), np.zeros(2 * sync.is_worker, int)
for step in range(6):
    if (step, c.rank) == (2, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step(x, y, 4)
if sync.is_worker:
    sync.worker.finish(0.1)
else:
    sync.server.serve(float("inf"))
    sync.mailbox.flush()
open(f"{sys.argv[1]}/{c.rank}", "w").write(repr(sync.server and sync.server.clock_table.reached))
os._exit(0)
"""


def test_a_dead_worker_leaves_the_clock(tmp_path):
    """Where MPI outlives its ranks: worker 1 is killed, and worker 0 makes its steps, within a bound of one."""
    mpiexec = launcher.find_mpiexec()
    said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in said:
        pytest.skip("this MPI library has no fault tolerance")
    program = tmp_path / "program.py"
    program.write_text(DYING)
    given = ["--with-ft", "ulfm", "--mca", "coll", "^han", "-n", "3", sys.executable, program, tmp_path]
    environment = os.environ | launcher.settings(3, mpiexec) | {"PYTHONPATH": str(ROOT)}
    subprocess.run([mpiexec, *given], env=environment, timeout=PATIENCE, stdin=subprocess.DEVNULL, capture_output=True)
    assert (tmp_path / "0").exists(), "worker 0 has come to its end"
    reached = ast.literal_eval((tmp_path / "2").read_text())
    assert reached[0] == 6 and reached[1] <= 2
    assert not (tmp_path / "1").exists()


@pytest.mark.mpi(ranks=3)
def test_memory_is_what_the_formula_says(comm):
    for make, options in (server, {"consistency": "async", "delay_compensation": True}), (downpour, {"push": 2}):
        many = make(comm, optimizer=nn.Adam(0.01), servers=1, **options)
        train(many, "mlp")
        many.synchronize()
        found, formula = many.memory(), many.formula()
        for kind, size in formula.items():
            assert found[kind] == pytest.approx(size, rel=0.02), (make.__name__, kind)
        assert found["in transit"] > 0
        free(many)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--strategy ddp --consistency async", "expected one of sync, stale with ddp"),
        ("--strategy ps --consistency stale:1", "expected one of sync, ssp, async with ps"),
        ("--strategy ps --consistency ssp", "needs a bound in steps, such as ssp:2"),
        ("--strategy ps --consistency ssp:-1", "given -1"),
        ("--strategy ps --consistency ssp:0,ahead=1", "with the bound 0 nothing that comes ahead is new enough"),
        ("--strategy ps --consistency often", "--consistency often: expected one of sync, ssp, async, stale"),
        ("--strategy ps --consistency ssp:x", "bound must be a whole number"),
        ("--strategy ps --consistency async:3", "ahead"),
        ("--strategy zero1 --consistency async", "--consistency has no effect"),
        ("--strategy ps --delay-compensation", "with --consistency sync nothing is late"),
        ("--strategy ddp --consistency stale:1 --delay-compensation", "--delay-compensation has no effect"),
        ("--consistency stale:-2", "given -2"),
        ("--consistency stale:1 --node-memory on", "--node-memory has no effect"),
        ("--consistency stale:1 --compress none", "sums in flight cannot be compressed"),
        ("--strategy ps --consistency async --reproducible 4", "depends on the order of arrival"),
        ("--strategy ps --consistency async --sync-batch-norm", "need all ranks at the same step"),
        ("--strategy ps --consistency async --compress powersgd:2", "its factors are sums over all ranks"),
        ("--strategy ps --consistency async --servers 3", "there is room for at most 2 beside one worker"),
        ("--strategy ps --consistency async --servers 2 --clip global:1", "norms of whole tensors"),
        ("--strategy downpour:push=0", "downpour: push"),
        ("--strategy downpour:every=2", r"what is 'every=2'\? downpour takes push="),
        ("--strategy downpour --servers 3", "there is room for at most 2 beside one worker"),
        ("--strategy local-sgd:0", "local-sgd: every must be at least 1, given 0"),
        ("--strategy local-sgd:4,drift=-1", "local-sgd: drift must be at least 0, given -1"),
        ("--strategy local-sgd --compress none", "replicas average parameters"),
        ("--strategy diloco:5,momentum=2", "diloco: momentum"),
        ("--strategy easgd:5,alpha=2", "easgd: alpha must be at least 0 and at most 1, given 2"),
        ("--strategy easgd --servers 2", "--servers has no effect"),
        ("--strategy ddp:4", "ddp takes no keys"),
        ("--strategy dpd", "--strategy dpd: expected one of ddp, zero1, zero2"),
        ("--strategy zero3", "zero3 is fsdp"),
    ],
)
def test_what_cannot_be_is_refused_before_there_are_ranks(options, words):
    from parallel.command.factory import prepare

    with pytest.raises(OptionError, match=words):
        prepare(parse([*options.split(), "--ranks", "3", "--limit", "100"]))


def test_another_strategy_continues_without_the_consistency_of_the_one_before(tmp_path):
    before = Options(strategy="ps", consistency="async", delay_compensation=True, servers=2)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(before)))
    for more, want in (
        ([], ("ps", "async", True, 2)),
        (["--strategy", "ddp"], ("ddp", "sync", False, 1)),
        (["--strategy", "ddp", "--consistency", "stale:1"], ("ddp", "stale:1", False, 1)),
        (["--strategy", "local-sgd:4"], ("local-sgd:4", "sync", False, 1)),
        (["--strategy", "downpour:push=2"], ("downpour:push=2", "sync", False, 2)),
    ):
        found = parse(["--resume", str(tmp_path), *more])
        assert (found.strategy, found.consistency, found.delay_compensation, found.servers) == want


def test_one_process_is_refused_where_there_must_be_servers():
    from parallel.command.factory import prepare

    with pytest.raises(OptionError, match="downpour:push=2"):
        prepare(parse(["--strategy", "downpour:push=2", "--limit", "100"]))


@pytest.mark.mpi(ranks=3)
def test_a_run_logs_and_draws_staleness(comm, shared_tmp_path):
    """Of every update, in metrics.jsonl; the epochs are counted as ever, and loss and scores are alike on all ranks."""
    from parallel.command.training_run import train as run

    out = shared_tmp_path / "run"
    options = Options(
        strategy="ps",
        consistency="async",
        model="mlp:64,8,10",
        epochs=2,
        limit=200,
        out=str(out),
        timeline=True,
        watch=60,
    )
    result = run(options)
    assert len({json.dumps(comm.allgather(result["loss"])[r]) for r in range(3)}) == 1
    if comm.rank == 0:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = math.ceil(200 / 32)
        assert [record["step"] for record in records] == [steps, 2 * steps]
        for record in records:
            assert sum(record["staleness"]["updates"]) == 2 * steps, "each of two workers, in every step"
            assert record["breakdown"]["wait"]["max"] >= 0 and math.isfinite(record["loss"])
        assert (out / "staleness.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "timeline.png").exists()
    again = run(dataclasses.replace(options, epochs=3, resume=str(out), pictures=False, timeline=False))
    assert again["epochs"] == 3 and again["steps"] == 3 * math.ceil(200 / 32)


@pytest.mark.mpi(ranks=3)
def test_a_loss_that_is_not_finite_ends_those_who_look_as_well(comm):
    """A worker synchronizes in the step of that loss, while ranks that have not heard of it look."""
    for last in range(4):
        for make in (
            lambda: downpour(comm, push=2, fetch=2),
            lambda: server(comm, consistency="async"),
            lambda: server(comm, servers=3, place="workers", consistency="ssp:1"),
        ):
            many = make()
            history = batches("mlp", many.shard)
            bad = min(comm.allgather(comm.rank if len(history[last % len(history)][0]) else 3))  # the first worker
            with pytest.raises(nn.NonFiniteLoss), np.errstate(invalid="ignore"):
                for step in range(last + 1):
                    x, y, total = history[step % len(history)]
                    if step == last and comm.rank == bad:
                        x = np.full_like(x, np.nan)
                    many.step(x, y, total)
                    many.digest()
                many.synchronize()
            many.check_replicas()
            assert np.isfinite(many.step(*history[0])) and len(set(comm.allgather(many.digest()))) == 1
            many.close()

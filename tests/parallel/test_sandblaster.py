"""Sandblaster: L-BFGS on coordinator, shards and replicas makes the steps of one process, whatever arrives when."""

import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE

import nn
from nn.optim.lbfgs import LBFGS, Vectors
from parallel import QuasiNewton
from parallel.command import main
from parallel.elastic.chaos import result
from parallel.strategies.sandblaster import Sandblaster
from parallel.sync.coordinator.roles import COORDINATOR, KINDS, Coordinator, ParameterShard, Replica
from parallel.sync.coordinator.shards import WORKING, assign_roles
from parallel.sync.mailbox import HEAD_BYTES, LocalMailbox, Mailbox, Message
from parallel.sync.push_pull import server_slices

ROOT = Path(__file__).parents[2]
SAMPLES, CHUNK, STEPS = 50, 7, 6


def network(**options):
    return nn.Network(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), (6,), np.float64)


def data(samples=SAMPLES):
    rng = np.random.default_rng(0)
    return rng.standard_normal((samples, 6)), rng.integers(0, 3, samples)


def serial():
    return nn.Trainer(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), seed=3)


def plain(steps=STEPS):
    """(parameters, losses before each step) of L-BFGS in one process, each gradient that of the batch at once."""
    trainer, (x, y) = serial(), data()
    lbfgs = LBFGS(Vectors(trainer.flat_parameters, trainer.gradients), lambda: trainer.compute_gradients(x, y, len(x)))
    losses = []
    for _ in range(steps):
        lbfgs.step()
        losses.append(lbfgs.start)
    return trainer.flat_parameters, losses


class Lazy(LocalMailbox):
    """Messages to or from one role (of some kinds) seldom come while there are others; without a chance never."""

    def __init__(self, rng, lazy, chance=0.0, kinds=KINDS):
        super().__init__(rng)
        self.lazy, self.chance, self.kinds = lazy, chance, kinds

    def late(self, pair, message):
        return self.lazy in pair and message.kind in self.kinds

    def receive(self):
        kept = {pair: messages for pair, messages in self.sent.items() if self.late(pair, messages[0])}
        if len(kept) == len(self.sent) or (self.chance and self.rng.random() < self.chance):
            return super().receive()
        for pair in kept:
            del self.sent[pair]
        message = super().receive()
        self.sent |= kept
        return message


class Together:
    """All roles in this process, each replica with a network of its own."""

    def __init__(self, replicas, shards, mailbox, kind=ParameterShard):
        x, y = data()
        first = serial()
        slices = [slice(lo, hi) for lo, hi in server_slices(first.network.layout.size, shards)]
        names = ["w", *QuasiNewton().slots, *WORKING]
        self.mailbox, self.roles, self.shards = mailbox, {}, []
        self.chunks = Counter()  # how many times each (evaluation, chunk) was sent
        send = mailbox.send

        def checked(message):
            assert message.kind in KINDS and len(message.header) <= 6
            if message.kind == "chunk":
                self.chunks[message.header] += 1
            send(message)

        mailbox.send = checked
        for i, share in enumerate(slices):
            w = first.flat_parameters[share].copy()
            self.shards.append(kind(i, Vectors(w, np.zeros_like(w)), names, replicas, mailbox))
        for i in range(replicas):
            one = serial()

            def compute(chunk, one=one):
                rows = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, SAMPLES))
                return one.compute_gradients(x[rows], y[rows], SAMPLES, rows.start)

            self.roles["replica", i] = Replica(i, slices, one.flat_parameters, one.gradients, compute, mailbox)
        self.coordinator = Coordinator(names, shards, replicas, mailbox)
        self.coordinator.chunks = math.ceil(SAMPLES / CHUNK)
        self.roles |= {role.role: role for role in (*self.shards, self.coordinator)}
        self.lbfgs = LBFGS(self.coordinator, self.coordinator.evaluate)

    def search(self):
        for role in self.roles.values():
            role.start_search()
        self.lbfgs.step()
        if not self.coordinator.current:
            self.coordinator.refresh()
        self.coordinator.stop()
        self.mailbox.wait(lambda: all(role.done for role in self.roles.values()))
        assert not self.mailbox.sent, "nothing is in flight"

    def parameters(self):
        return np.concatenate([shard.vectors.arrays["w"] for shard in self.shards])


def orders():
    """Ways in which messages may arrive."""
    yield LocalMailbox()
    for seed in range(4):
        yield LocalMailbox(np.random.default_rng(seed))
    for chance in (0.0, 0.03, 0.1):
        yield Lazy(np.random.default_rng(9), ("replica", 0), chance)
        yield Lazy(np.random.default_rng(9), ("replica", 0), chance, ("push", "computed"))
    yield Lazy(None, ("shard", 0))
    yield Lazy(np.random.default_rng(8), COORDINATOR, 0.01)


@pytest.mark.parametrize("shards", [1, 3])
def test_any_order_of_arrival_gives_the_same_bits(shards):
    want, losses = plain()
    found, backups = set(), 0
    for replicas in (1, 4):
        for mailbox in orders():
            run = Together(replicas, shards, mailbox)
            for loss in losses:
                run.search()
                assert run.lbfgs.start == pytest.approx(loss, rel=1e-12)
            np.testing.assert_allclose(run.parameters(), want, rtol=0, atol=1e-10)
            for role in run.roles.values():
                if isinstance(role, Replica):
                    assert np.array_equal(role.parameters, run.parameters()), "replicas have what the step has found"
            found.add(run.parameters().tobytes())
            backups += run.chunks.total() - len(run.chunks)
    assert len(found) == 1 and backups > 10, "and chunks were computed twice"


def test_control_a_shard_that_counts_what_comes_twice_is_found():
    class Twice(ParameterShard):
        def _push(self, evaluation, chunk, gradient):
            again = chunk in getattr(self, "seen", ())
            super()._push(evaluation, chunk, gradient.copy())
            if again and evaluation == self.evaluation:
                self.vectors.arrays["g"] += gradient

    want, _ = plain()
    wrong = 0
    for mailbox in orders():
        run = Together(4, 2, mailbox, Twice)
        for _ in range(STEPS):
            run.search()
        wrong += bool(np.abs(run.parameters() - want).max() > 1e-10)
    assert wrong


def test_a_shard_drops_what_is_late_and_keeps_what_is_early():
    """Chunks in every order; those of the evaluation before are not counted, and a pull that comes early waits."""
    for order in itertools.permutations(range(3)):
        mailbox = LocalMailbox()
        shard = ParameterShard(0, Vectors(np.arange(4.0), np.zeros(4)), ["w", "g"], 1, mailbox)

        def tell(kind, *header, array=None, shard=shard):
            shard.handle(Message(kind, ("replica", 0), ("shard", 0), header, array))

        tell("begin", 1, 3)
        tell("push", 1, 2, array=np.full(4, 50.0))
        tell("pull", 2)
        assert not mailbox.sent, "those are not the parameters that are meant"
        tell("begin", 2, 3)
        assert np.array_equal(mailbox.receive().array, np.arange(4.0))
        tell("push", 1, 0, array=np.full(4, 70.0))
        tell("pull", 1)
        for chunk in order:
            for _ in range(2):
                tell("push", 2, chunk, array=np.full(4, 0.1 + chunk))
        assert mailbox.receive().kind == "summed" and not mailbox.sent, "and it is told once"
        assert np.array_equal(shard.vectors.arrays["g"], np.full(4, (0.1 + 1.1) + 2.1)), "in one order"
        tell("pull", 2)
        assert not mailbox.sent, "all has been computed without that replica"


def test_a_slow_replica_computes_less_and_nobody_waits_for_it():
    run = Together(3, 1, Lazy(None, ("replica", 0)))
    computed = [0, 0, 0]
    for i in range(3):
        role = run.roles["replica", i]

        def counted(chunk, i=i, compute=role.compute):
            computed[i] += 1
            return compute(chunk)

        role.compute = counted
    run.search()
    assert computed[0] == 0 and computed[1] > 0 and computed[2] > 0
    assert run.coordinator.evaluations > 1


def test_finds_the_minimum_that_scipy_finds():
    optimize = pytest.importorskip("scipy.optimize")
    x, y = data(200)

    def make():
        return nn.Network(nn.Linear(6, 3), (6,), np.float64)

    one = nn.Trainer(make(), nn.CrossEntropyLoss(), nn.SGD(0.1))

    def function(w):
        one.flat_parameters[:] = w
        return one.compute_gradients(x, y, len(x)), one.gradients.copy()

    theirs = optimize.minimize(
        function, one.flat_parameters.copy(), jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-9}
    )
    trainer = Sandblaster(make(), nn.CrossEntropyLoss(), QuasiNewton(tolerance=1e-8), servers=2, same_batch=True)
    said = []
    trainer.say = said.append
    while not said:
        loss = trainer.step(x, y)
        assert trainer.steps < 200
    assert "minimum" in said[0] and abs(loss - theirs.fun) < 1e-12
    assert trainer.predict(x).shape == (200, 3)


def steps(trainer, number, batch=None):
    """Make steps on all samples, or on batches of so many in turn."""
    x, y = data()
    batch = batch or SAMPLES
    losses = []
    for i in range(trainer.steps, trainer.steps + number):
        rows = np.arange(i * batch, (i + 1) * batch) % SAMPLES
        mine = rows if trainer.shard[0] == 0 else rows[:0]
        losses.append(trainer.step(x[mine], y[mine], batch))
    return losses


LAYOUTS = [(2, 1, "workers"), (3, 1, "dedicated"), (4, 2, "dedicated"), (4, 3, "workers")]


@pytest.mark.mpi(ranks=[2, 3], more=[4])
def test_on_ranks_as_in_one_process(comm, tmp_path_factory):
    from collectives import Communicator

    communicator = Communicator(comm)
    for size, servers, place in LAYOUTS:
        if size != comm.size:
            continue
        for batch, same in ((None, True), (20, False)):
            options = {"servers": servers, "chunk": CHUNK, "same_batch": same}

            def make(comm, place, options=options):
                optimizer = QuasiNewton(history=3)
                return Sandblaster(network(), nn.CrossEntropyLoss(), optimizer, comm, 3, place=place, **options)

            one, many = make(None, "dedicated"), make(communicator, place)
            assert steps(many, 4, batch) == steps(one, 4, batch)
            state, want = many.state_dict(), one.state_dict()
            many.check_replicas()
            assert many.digest() == one.digest(), "the same bits for as many shards"
            if many.is_writer:
                assert state.keys() == want.keys()
                for name, array in want.items():
                    assert np.array_equal(array, state[name]), name
            # A checkpoint continues, here and on one process.
            for to in (make(communicator, place), make(None, "dedicated")):
                to.load_state_dict(comm.bcast(state))
                assert to.steps == 4
                snapshot = to.snapshot()
                steps(to, 2, batch)
                after = to.digest()
                to.restore(snapshot)
                steps(to, 2, batch)
                assert to.digest() == after
                to.close()
            x, y = data()
            reader = many.shard[0] == 0
            sums = many.sum(many.sum_scores(x if reader else x[:0], y if reader else y[:0]))
            np.testing.assert_allclose(sums, one.sum_scores(x, y), rtol=1e-9)
            kept = communicator.allreduce(many.memory()["moments"])
            assert kept == one.memory()["moments"], "nobody has a vector that another one has"
            if comm.rank == 0:
                coordinators = many.memory()
                assert coordinators.pop("in transit") <= HEAD_BYTES * (comm.size - 1), "commands of a few bytes"
                assert not any(coordinators.values()), "the coordinator holds no parameters"
            alone = many.alone()
            assert (alone is None) == bool(comm.rank)
            many.close()
        one.close()


@pytest.mark.mpi(ranks=3)
def test_what_goes_wrong_is_told_on_all_ranks(comm):
    from collectives import Communicator

    communicator = Communicator(comm)
    trainer = Sandblaster(network(), nn.CrossEntropyLoss(), QuasiNewton(), communicator, chunk=CHUNK)
    x, y = data()
    mine = slice(None) if trainer.shard[0] == 0 else slice(0)
    with pytest.raises(ValueError, match=r"rank 1 has 50 samples of a batch of 49; expected 49 of 49"):
        trainer.step(x[mine], y[mine], 49)
    with pytest.raises(ValueError, match="batch of None"):
        trainer.step(x[mine], y[mine])
    with pytest.raises(ValueError, match="leave out accumulate, given 2"):
        trainer.step(x[mine], y[mine], SAMPLES, 2)
    before = trainer.digest()
    x[30, 2] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"step 0: the loss is .* in the input"):
        trainer.step(x[mine], y[mine], SAMPLES)
    assert trainer.digest() == before and trainer.steps == 0
    x, _ = data()
    assert math.isfinite(trainer.step(x[mine], y[mine], SAMPLES)), "and it goes on"
    if comm.rank != 1:
        with pytest.raises(ValueError, match=f"rank {comm.rank} has no copy of the parameters"):
            trainer.predict(x)
    trainer.close()
    places = {COORDINATOR: 0, ("shard", 0): 1, ("replica", 0): 2}
    mailbox, received = Mailbox(communicator, places, KINDS, limit=0.05), []
    role = [COORDINATOR, ("shard", 0), ("replica", 0)][comm.rank]
    mailbox.handlers[role] = received.append
    waits = rf"rank {comm.rank} \({role[0]} 0\) waits for a message from any rank: nothing has come for 0.05 s"
    with pytest.raises(TimeoutError, match=waits):
        mailbox.wait(lambda: received)
    comm.barrier()  # all have waited in vain
    mailbox.limit = 60
    mailbox.send(Message("push", role, list(places)[(comm.rank + 1) % 3], (1.0, 2.0), np.arange(3.0)))
    mailbox.wait(lambda: received)
    (message,) = received
    assert message.sender == list(places)[comm.rank - 1] and message.header == (1.0, 2.0)
    assert np.array_equal(message.array.view(np.float64), np.arange(3.0))
    mailbox.close()


def test_bad_input_is_refused():
    loss = nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match="expected QuasiNewton, given SGD"):
        Sandblaster(network(), loss, nn.SGD(0.1))
    with pytest.raises(ValueError, match="leave out clip, weight_decay and rates"):
        QuasiNewton(weight_decay=0.1)
    with pytest.raises(ValueError, match="freeze nothing"):
        Sandblaster(network(), loss, QuasiNewton()).freeze("0")
    with pytest.raises(ValueError, match="history"):
        QuasiNewton(history=0)
    with pytest.raises(ValueError, match="chunk must be at least 1 sample, given 0"):
        Sandblaster(network(), loss, QuasiNewton(), chunk=0)
    with pytest.raises(TypeError, match=r"parallel\.Sandblaster"):
        nn.Trainer(network(), loss, QuasiNewton())
    for layer, header in ((nn.BatchNorm1d(6), "moves with every batch"), (nn.Dropout(0.5), "another function every")):
        with pytest.raises(ValueError, match=header):
            Sandblaster(nn.Network(nn.Sequential(layer, nn.Linear(6, 3)), (6,)), loss, QuasiNewton())
    assert assign_roles(4, 1, "dedicated") == ([1, 2], [3]) and assign_roles(4, 2, "workers") == ([1, 2, 3], [1, 2])
    assert assign_roles(1, 3, "dedicated") == ([0], [0, 0, 0])
    with pytest.raises(ValueError, match="beside the coordinator, rank 0: 1 parameter servers on 1 ranks"):
        assign_roles(2, 1, "dedicated")


def test_the_library_fits_with_it():
    """`fit` on one process: epochs, validation, the best epoch."""
    x, y = data()
    whole = nn.data.Dataset(x, y, classes=3, dtype=np.float64)
    trainer = Sandblaster(network(), nn.CrossEntropyLoss(), QuasiNewton(), chunk=16, same_batch=True)
    loader = nn.Loader(whole, SAMPLES, shard=trainer.shard)
    training = nn.fit(trainer, loader, 10, validation=loader, test=loader)
    losses = [record["loss"] for record in training.history]
    assert losses == sorted(losses, reverse=True) and training.result["loss"] < 0.8 * losses[0]


def test_from_the_command_line(tmp_path, nothing_left):
    """On one process and on ranks, at once and in two goes: the same bits."""
    options = ["--model", "mlp:64,12,10", "--limit", "200", "--batch", "180", "--optimizer", "lbfgs", "--no-pictures"]
    options += ["--strategy", "sandblaster:chunk=50,history=4"]
    found = set()
    for name, goes in (("one", [["4"]]), ("two", [["2"], ["4"]]), ("ranks", [["2", "--ranks", "3"], ["4"]])):
        for i, (epochs, *ranks) in enumerate(goes):
            where = ["--resume" if i else "--out", str(tmp_path / name)]
            command = [sys.executable, "scripts/train.py", *([] if i else options), *where, "--epochs", epochs, *ranks]
            done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
            assert done.returncode == 0, done.stdout + done.stderr
        found.add(result(tmp_path / name)["parameters_sha256"])
    assert len(found) == 1


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("--optimizer lbfgs", "use --strategy sandblaster --optimizer lbfgs"),
        ("--strategy sandblaster", "use --strategy sandblaster --optimizer lbfgs"),
        ("--strategy sandblaster --optimizer lbfgs --lr 0.3", "--lr has no effect with --optimizer lbfgs"),
        ("--strategy sandblaster:chunk=0 --optimizer lbfgs", "chunk must be at least 1, given 0"),
        ("--strategy sandblaster --optimizer lbfgs --ranks 2", "beside the coordinator, rank 0"),
        ("--strategy sandblaster --optimizer lbfgs --accumulate 2", "already divided into chunks"),
        ("--strategy sandblaster --optimizer lbfgs --compress fp16 --ranks 3", "needs exact gradients"),
        ("--strategy sandblaster --optimizer lbfgs --model resnet20", "moves with every batch"),
    ],
)
def test_wrong_options_are_told_before_ranks_start(line, header, capsys, monkeypatch):
    monkeypatch.setattr(main, "start_ranks", lambda *_: pytest.fail("ranks are started"))
    assert main.main(line.split()) == main.WRONG_OPTION
    assert header in capsys.readouterr().err

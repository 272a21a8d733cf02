"""Without a server: late sums, and replicas that meet now and then, are what one process computes step by step."""

import numpy as np
import pytest
from equality import (
    CLIPS,
    MODELS,
    OPTIMIZERS,
    SEED,
    batches,
    cnn,
    dataset,
    difference,
    mlp,
    one_process,
    train,
)

import nn
from parallel import ShardedCheckpoints
from parallel.state.placed import OWN


def make(comm, name, optimizer=None, network=mlp, **options):
    import parallel
    from collectives import Communicator

    rule = optimizer or nn.SGD(0.1)
    return getattr(parallel, name)(network(), nn.CrossEntropyLoss(), rule, Communicator(comm), SEED, **options)


def free(trainer):
    trainer.close()
    trainer.communicator.release()


def alone(network=cnn):
    return network(synchronized=False)


class Simulated:
    """Replicas in one process: each takes its part of every batch, and steps by itself."""

    def __init__(self, size, rule, model="mlp"):
        self.size = size
        self.each = [nn.Trainer(mlp(), nn.CrossEntropyLoss(), rule(), SEED) for _ in range(size)]
        self.shards = [batches(model, (i, size)) for i in range(size)]

    def gradients(self, step):
        """Of every replica, at its own parameters, of its part of the batch."""
        for trainer, shard in zip(self.each, self.shards, strict=True):
            trainer.steps = step
            trainer.compute_gradients(*shard[step])
        return [trainer.gradients for trainer in self.each]

    def move(self, step):
        for trainer, g in zip(self.each, self.gradients(step), strict=True):
            g *= self.size
            trainer.optimizer.update(trainer.flat_parameters, g, trainer.slots, step, trainer.region)

    def mean(self):
        return sum(trainer.flat_parameters for trainer in self.each) / self.size


@pytest.mark.mpi(ranks=[2, 3])
def test_meeting_in_every_step_is_data_parallelism(comm, ranks):
    """With SGD, momentum and weight decay, over uneven batches, on ranks that have no sample at times."""
    rules = {name: OPTIMIZERS[name] for name in ("sgd", "momentum", "nesterov")}
    for name, options in (
        ("LocalSGD", {"every": 1}),
        ("LocalSGD", {"every": 100, "drift": 1e-9}),
        ("DiLoCo", {"every": 1, "outer": 1.0, "momentum": 0.0}),
        ("StaleDataParallel", {"delay": 0}),
    ):
        models = ("mlp", "transformer") if name == "DiLoCo" else ("mlp",)
        assert_equal_to_one_process(comm, name, options, models, tuple(rules))
    control = make(comm, "LocalSGD", OPTIMIZERS["momentum"](), every=2)
    train(control, "mlp")
    control.synchronize()
    assert difference(control.flat_parameters, one_process("mlp", "momentum")[0].flat_parameters) > 1e-6, (
        "control: every second"
    )
    free(control)


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("together", [{"tensor": 2}, {"pipeline": 2, "micro_batches": 3}], ids=["tensor", "pipeline"])
def test_a_replica_of_several_ranks_is_one_of_one_rank(comm, together):
    """Meeting in every step is data parallelism; every third, gradients clipped by norms of whole ones, it is not."""
    several = {"every": 1} | together
    assert_equal_to_one_process(comm, "LocalSGD", several, ("mlp", "transformer"), ("sgd", "momentum"))
    if "pipeline" in together:
        both = {"every": 1, "pipeline": 2, "tensor": 2, "schedule": "gpipe", "micro_batches": 3}
        assert_equal_to_one_process(comm, "LocalSGD", both, ("transformer",), ("adam",))

    def rule():
        return OPTIMIZERS["momentum"](CLIPS[1])

    ours, many = Simulated(2, rule), make(comm, "LocalSGD", rule(), every=3, **together)
    for step, batch in enumerate(batches("mlp", many.shard)):
        ours.move(step)
        if step % 3 == 2:
            mean = ours.mean()
            for each in ours.each:
                each.flat_parameters[:] = mean
        many.step(*batch)
    many.check_replicas()
    state = many.state_dict()
    ours.each[0].flat_parameters[:] = ours.mean()
    for name, array in ours.each[0].state_dict().items():
        if comm.rank == 0 and name.startswith("param/"):
            assert np.abs(state[name] - array).max() < 1e-12 * np.abs(array).max(), name
    assert many.synchronize(1.0) == 1.0
    free(many)
    many = make(comm, "LocalSGD", every=3, **together)
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 2"):
        for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
            if comm.rank >= 2 and i == 1:
                x[0] = np.nan
            many.step(x, y, total)
    free(many)
    with pytest.raises(ValueError, match="pipedream in a replica: it updates its stages after every mini-batch"):
        make(comm, "LocalSGD", pipeline=2, schedule="pipedream")


@pytest.mark.mpi(ranks=4)
def test_however_replicas_meet_they_may_be_several_ranks(comm):
    """As with a rank each; stopped and continued the same bits; a rank each goes on from what several have kept."""
    pair, pipeline = comm.Split(comm.rank < 2), {"pipeline": 2, "micro_batches": 3}
    for name, options, together in (
        ("LocalSGD", {"every": 100, "drift": 0.03}, {"tensor": 2}),
        ("LocalSGD", {"every": 100, "drift": 0.03}, pipeline),
        ("DiLoCo", {"every": 2}, {"tensor": 2}),
        ("DiLoCo", {"every": 2}, pipeline),
        ("EASGD", {"every": 2, "alpha": 0.2}, {"tensor": 2}),
        ("EASGD", {"every": 2, "alpha": 0.2}, pipeline),
    ):
        each = make(pair, name, nn.Adam(0.01), **options)
        train(each, "mlp")
        counted, want = each.epoch_record(), comm.bcast(each.state_dict())
        assert name != "LocalSGD" or 1 < counted["averages"] < 5, counted
        many, again = (make(comm, name, nn.Adam(0.01), **options, **together) for _ in range(2))
        train(many, "mlp")
        assert many.epoch_record() == pytest.approx(counted)
        many.check_replicas()
        many.synchronize()  # as for a checkpoint that a run continues from
        found = comm.bcast(many.state_dict())
        assert found.keys() == want.keys()
        for entry, array in want.items():
            scale = np.abs(array).max() or 1.0
            assert np.abs(found[entry] - array).max() / scale < 1e-12, (name, together, entry)
        again.load_state_dict(found if comm.rank == 0 else {})
        each.load_state_dict(found)
        more = batches("mlp", many.shard)[:3]
        for trainer in many, again:
            for batch in more:
                trainer.step(*batch)
        assert many.digest() == again.digest()
        for batch in batches("mlp", each.shard)[:3]:
            each.step(*batch)
        want, last = comm.bcast(each.state_dict()), comm.bcast(many.state_dict())
        for entry, array in want.items():
            assert np.abs(last[entry] - array).max() <= 1e-11 * (np.abs(array).max() or 1.0), (name, together, entry)
        fewer = {entry: array for entry, array in found.items() if not entry.startswith(OWN)}
        again.load_state_dict(fewer)  # of another strategy
        for batch in more:
            again.step(*batch)
        assert name == "LocalSGD" or again.digest() != many.digest(), "control: what is its own counts"
        for trainer in many, again, each:
            free(trainer)


def assert_equal_to_one_process(comm, name, options, models, optimizers):
    """As `assert_equals_one_process`, but that a step returns this rank's estimate of the loss."""
    for model in models:
        for optimizer in optimizers:
            one, losses = one_process(model, optimizer)
            many = make(comm, name, OPTIMIZERS[optimizer](), MODELS[model], **options)
            found = np.array(train(many, model))
            mean = sum(comm.allgather(found)) / comm.size
            np.testing.assert_allclose(mean, losses, rtol=1e-12, err_msg=name)
            many.check_replicas()
            state, want = many.state_dict(), one.state_dict()
            for entry, array in want.items():
                if comm.rank == 0 and array.size and array.ndim:
                    scale = np.abs(array).max() or 1.0
                    assert np.abs(state[entry] - array).max() / scale < 1e-12, (name, options, optimizer, entry)
            free(many)


@pytest.mark.mpi(ranks=2)
def test_no_delay_is_data_parallelism_bit_for_bit(comm):
    for optimizer in "momentum", "adam":
        a, b = (
            make(comm, name, OPTIMIZERS[optimizer](), cnn, **options)
            for name, options in (("DistributedDataParallel", {}), ("StaleDataParallel", {"delay": 0}))
        )
        assert train(a, "cnn") == train(b, "cnn") and a.digest() == b.digest()
        free(a)
        free(b)


@pytest.mark.mpi(ranks=3)
def test_late_sums_are_those_of_one_process_that_waits(comm):
    """Each sum is applied once, at its own rate, S steps late; where all meet, what is on its way is in."""
    for delay in 1, 3:
        for optimizer in "sgd", "adam":
            many, rule = make(comm, "StaleDataParallel", OPTIMIZERS[optimizer](), delay=delay), OPTIMIZERS[optimizer]()
            one = nn.Trainer(mlp(), nn.CrossEntropyLoss(), rule, SEED)
            waiting = []

            def apply(one=one, rule=rule, waiting=waiting):
                step, g, rule.lr = waiting.pop(0)
                rule.update(one.flat_parameters, g, one.slots, step, one.region)

            for step, batch in enumerate(batches("mlp", (0, 1))):
                rule.lr = many.optimizer.lr = 0.1 / (1 + step)
                one.steps = step
                one.compute_gradients(*batch)
                waiting.append((step, one.gradients.copy(), rule.lr))
                if len(waiting) > delay:
                    apply()
                many.step(*batches("mlp", many.shard)[step])
                if step != 2:
                    assert difference(many.flat_parameters, one.flat_parameters) < 1e-12
                else:
                    many.synchronize()  # as where a checkpoint is kept
                    while waiting:
                        apply()
                    assert difference(many.flat_parameters, one.flat_parameters) < 1e-12
            many.synchronize()
            before = one.flat_parameters.copy()
            assert waiting and difference(many.flat_parameters, before) > 1e-6, "control: those that were on their way"
            while waiting:
                apply()
            assert difference(many.flat_parameters, one.flat_parameters) < 1e-12
            many.check_replicas()
            free(many)


@pytest.mark.mpi(ranks=3)
def test_replicas_are_those_of_one_process(comm):
    """Local SGD, DiLoCo and EASGD against three trainers in this process, step by step."""
    for optimizer in "sgd", "adam":
        rule = OPTIMIZERS[optimizer]
        ours, many = Simulated(3, rule), make(comm, "LocalSGD", rule(), every=2)
        for step, batch in enumerate(batches("mlp", many.shard)):
            ours.move(step)
            if step % 2:
                mean = ours.mean()
                for each in ours.each:
                    each.flat_parameters[:] = mean
            many.step(*batch)
            assert difference(many.flat_parameters, ours.each[comm.rank].flat_parameters) < 1e-12, (optimizer, step)
        many.synchronize()
        assert difference(many.flat_parameters, ours.mean()) < 1e-12
        free(many)

        ours, many = Simulated(3, rule), make(comm, "DiLoCo", rule(), every=2, outer=0.7, momentum=0.9)
        last, velocity = ours.mean(), 0.0
        for step, batch in enumerate(batches("mlp", many.shard)):
            ours.move(step)
            if step % 2:
                delta = last - ours.mean()
                velocity = 0.9 * velocity + delta
                last = last - 0.7 * (delta + 0.9 * velocity)
                for each in ours.each:
                    each.flat_parameters[:] = last
            many.step(*batch)
            assert difference(many.flat_parameters, ours.each[comm.rank].flat_parameters) < 1e-11, (optimizer, step)
        free(many)

        ours, many = Simulated(3, rule), make(comm, "EASGD", rule(), every=2, alpha=0.2)
        centre = ours.mean()
        for step, batch in enumerate(batches("mlp", many.shard)):
            ours.move(step)
            if step % 2:
                apart = [0.2 * (each.flat_parameters - centre) for each in ours.each]
                for each, way in zip(ours.each, apart, strict=True):
                    each.flat_parameters -= way
                centre = centre + sum(apart)
            many.step(*batch)
            assert difference(many.flat_parameters, ours.each[comm.rank].flat_parameters) < 1e-12, (optimizer, step)
        replica = many.flat_parameters.copy()
        many.sum_scores(*batches("mlp", many.shard)[0][:2])  # is of the centre
        apart = [0.2 * (each.flat_parameters - centre) for each in ours.each]
        assert difference(many.flat_parameters, centre + sum(apart)) < 1e-12
        many.check_replicas()
        many.step(*batches("mlp", many.shard)[0])
        assert (
            difference(many.flat_parameters, replica) > 1e-6
            and len({*comm.allgather(many.flat_parameters.tobytes())}) == 3
        )
        free(many)


@pytest.mark.mpi(ranks=2)
def test_replicas_meet_when_one_has_drifted(comm):
    """Only one learns anything here: the other one hears of it by the number that all tell in every step."""
    many = make(comm, "LocalSGD", every=1000, drift=0.01)
    met = []
    for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
        many.optimizer.lr = 0.5 if comm.rank == 1 and i == 2 else 1e-9
        many.step(x, y, total)
        met.append(many.sync.averages)
    assert met == [0, 0, 1, 1, 1]
    found = many.epoch_record()
    assert found["averages"] == 1 and found["drift"] > 0.01
    free(many)


STRATEGIES = (
    ("LocalSGD", {"every": 4}),
    ("LocalSGD", {"every": 4, "drift": 0.02}),
    ("DiLoCo", {"every": 4}),
    ("EASGD", {"every": 4}),
    ("StaleDataParallel", {"delay": 2}),
)


@pytest.mark.mpi(ranks=3)
def test_checkpoints_continue(comm, shared_tmp_path):
    """Stopped after a checkpoint in the middle of an epoch, and continued: the same bits, records and centre."""

    def loader(many, shuffle=True):
        return nn.Loader(dataset("mlp"), 8, seed=1, shuffle=shuffle, shard=many.shard, dtype=np.float64)

    for i, (name, options) in enumerate(STRATEGIES):
        build = lambda n=name, o=options: make(comm, n, nn.Adam(0.01), alone, **o)
        kept = ShardedCheckpoints(shared_tmp_path / str(i))
        straight = build()
        hooks = [nn.KeepCheckpoints(kept, 2, None)]
        want = nn.fit(straight, loader(straight), 2, hooks, loader(straight, False))
        assert straight.steps == 10 and want.history[-1]["validation_accuracy"] >= 0
        records = comm.allgather([(record["loss"], record["validation_loss"]) for record in want.history])
        assert all(record == records[0] for record in records), "alike on all ranks, so callbacks decide alike"

        class Stop(Exception):
            pass

        class Stopped(nn.KeepCheckpoints):
            def on_step(self, training, loss):
                super().on_step(training, loss)
                if training.trainer.steps == 8:
                    raise Stop

        kept = ShardedCheckpoints(shared_tmp_path / f"{i} again")
        first = build()
        with pytest.raises(Stop):
            nn.fit(first, loader(first), 2, [Stopped(kept, 2, None)], loader(first, False))
        again = build()
        state, progress, _ = kept.load()
        again.load_state_dict(state)
        assert again.steps == 8
        found = nn.fit(
            again, loader(again), 2, [nn.KeepCheckpoints(kept, 2, None)], loader(again, False), progress=progress
        )
        a, b = straight.state_dict(), again.state_dict()
        for entry in a:
            np.testing.assert_array_equal(a[entry], b[entry], err_msg=f"{name}: {entry}")
        keys = ("loss", "validation_loss", "step")
        assert [[r[k] for k in keys] for r in found.history] == [[r[k] for k in keys] for r in want.history], name
        assert again.digest() == straight.digest()
        other = make(comm, "DistributedDataParallel", nn.Adam(0.01), alone)  # does without what is their own
        other.load_state_dict(b)
        back = {entry: array.copy() for entry, array in other.state_dict().items()}
        assert not any(entry.startswith(OWN) for entry in back)
        again.load_state_dict(back)
        again.step(*batches("mlp", again.shard)[0])
        one = again.alone()
        assert comm.rank or one.steps == 11
        for each in straight, first, again, other:
            free(each)


@pytest.mark.mpi(ranks=3)
def test_a_loss_that_is_not_finite_is_told_where_all_meet(comm):
    for name, options in STRATEGIES:
        many = make(comm, name, **options)
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1"):
            for i, (x, y, total) in enumerate(batches("mlp", many.shard)):
                if comm.rank == 1 and i == 1:
                    x[0] = np.nan
                many.step(x, y, total)
            many.synchronize()
        assert np.isfinite(many.flat_parameters).all()
        free(many)
    from nn.optim import clipping

    many = make(comm, "LocalSGD", nn.SGD(0.1, clip=clipping.ClipGlobalNorm(1.0)), every=3)
    many.sync.end_addend = lambda: many.gradients.fill(np.inf if comm.rank == 2 else 1.0)
    with pytest.raises(FloatingPointError, match="norm"):
        train(many, "mlp")
    free(many)


@pytest.mark.mpi(ranks=2)
def test_looking_between_meetings_changes_nothing(comm):
    """It shows what averaging would give; training goes on as if nobody had looked. Once it added averages."""

    def run(name, options, look):
        many = make(comm, name, nn.Adam(0.01), alone, **options)
        for i, batch in enumerate(batches("mlp", many.shard)):
            many.step(*batch)
            if look and i % 2:
                held = many.state_dict()
                assert np.isfinite(many.sum_scores(*batch[:2])[0])
                many.check_replicas()
                assert many.digest() == many.digest() and many.predict(batch[0]).shape == (len(batch[0]), 10)
                assert len(set(comm.allgather(many.flat_parameters.tobytes()))) == 1, "all see the same"
                many.snapshot()
                again = many.state_dict()
                assert all(np.array_equal(held[entry], again[entry]) for entry in held), name
                with pytest.raises(ValueError, match="lacks"):
                    many.load_state_dict({})
        own = many.epoch_record()
        many.synchronize()
        found = many.state_dict(), own
        free(many)
        return found

    for name, options in STRATEGIES:
        (want, counted), (found, counted_too) = (run(name, options, look) for look in (False, True))
        assert counted == counted_too, name
        for entry, array in want.items():
            np.testing.assert_array_equal(found[entry], array, err_msg=f"{name}: {entry}")


@pytest.mark.mpi(ranks=2)
def test_after_a_loss_that_is_not_finite_the_state_is_that_of_all(comm):
    for name, options in STRATEGIES:
        many = make(comm, name, **options)
        data = batches("mlp", many.shard)
        many.step(*data[0])
        x, y, total = data[1]
        with pytest.raises(nn.NonFiniteLoss):
            many.step(x * np.nan if comm.rank == 1 else x, y, total)
            many.synchronize()
        for _ in range(2):
            many.check_replicas()
            state = many.state_dict()
            assert len(set(comm.allgather(many.flat_parameters.tobytes()))) == 1, name
            assert all(np.isfinite(array).all() for array in state.values())
            many.step(*data[2])
        many.synchronize()
        many.check_replicas()
        free(many)


@pytest.mark.mpi(ranks=2)
def test_what_cannot_be_is_refused(comm):
    def refused(name, words, **options):
        with pytest.raises(ValueError, match=words):
            make(comm, name, **options)

    refused("LocalSGD", "every", every=0)
    refused("LocalSGD", "drift", drift=-1.0)
    refused("LocalSGD", "statistics over all ranks need all of them", network=cnn)
    refused("EASGD", "would overshoot each other.*at most 2 / .replicas . 1., here 0.667", alpha=0.7)
    refused("StaleDataParallel", "delay must be at least 0, given -1", delay=-1)
    refused("StaleDataParallel", "bucket: late gradients are summed by messages", delay=1, bucket=2.0)
    refused("StaleDataParallel", "statistics over all ranks", delay=1, network=cnn)
    refused("ParameterServer", "statistics over all ranks", consistency="async", network=cnn)
    refused("ParameterServer", "virtual shards are added up over all ranks", consistency="async", shards=4)
    refused("ParameterServer", "synchronous gradients have no delay", delay_compensation=True)
    from parallel import ReplicaError

    with pytest.raises(ReplicaError, match="average"):
        make(comm, "LocalSGD", every=1 + comm.rank)


@pytest.mark.mpi(ranks=2)
def test_memory_is_what_the_formula_says(comm):
    for name, options in STRATEGIES:
        many = make(comm, name, nn.Adam(0.01), **options)
        train(many, "mlp")
        many.synchronize()
        for kind, size in many.formula().items():
            assert many.memory()[kind] == pytest.approx(size, rel=0.02), (name, kind)
        free(many)

"""Images cut in height, and branches on different ranks: they compute what one process computes."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE
from equality import CLIPS, OPTIMIZERS, SEED
from threads import on_threads

import nn
from nn.core.layer import Sequential
from nn.models.googlenet import Auxiliary, AuxiliaryLoss
from nn.models.resnet import Subsample


def convolutions(synchronized=False):
    """Strides, paddings, dilations, groups, windows that stick out, heights that nothing divides."""
    layers = [
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, synchronized=synchronized), nn.ReLU()),
        *(nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), nn.LocalResponseNorm(3)),
        *(nn.Conv2d(4, 6, (5, 3), stride=(1, 2), padding=(4, 0), dilation=(2, 1), groups=2), nn.Tanh()),
        *(nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False), nn.Dropout(0.3)),
        *(nn.Conv2d(6, 4, (4, 1), padding="same"), nn.Flatten(), nn.Linear(16, 5)),
    ]
    return nn.Network(Sequential(*layers), (13, 9, 2), np.float64, "convolutions")


def residual(synchronized=False):
    """Two ways of a residual connection, with a shortcut and without; activations computed again; a mean at the end."""
    norm = nn.BatchNorm2d(6, synchronized=synchronized)
    body = [nn.Conv2d(4, 6, 3, 2, 1, bias=False), norm, nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)]
    layers = [
        *(nn.Conv2d(2, 4, 7, padding=3), nn.ReLU(), nn.Residual(Sequential(*body), Subsample(2, 6)), nn.ReLU()),
        nn.Recompute(nn.Residual(Sequential(nn.Conv2d(6, 6, 5, padding=2), nn.Dropout(0.2), nn.LayerNorm(6)))),
        *(nn.GlobalAvgPool2d(), nn.Linear(6, 5)),
    ]
    return nn.Network(Sequential(*layers), (11, 6, 2), np.float64, "residual")


def inception(normalized=True, synchronized=False):
    """Branches, a classifier inside; one of the layers behind is too low to be cut."""
    norm = [nn.BatchNorm2d(3, synchronized=synchronized)] if normalized else []
    branches = nn.Parallel(
        Sequential(nn.Conv2d(4, 3, 1, bias=False), *norm, nn.ReLU()),
        Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2), nn.ReLU()),
        Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(4, 2, 1)),
    )
    head = Sequential(nn.AdaptiveAvgPool2d((5, 2)), nn.Flatten(), nn.Linear(90, 5))
    rest = Sequential(nn.Conv2d(9, 4, 3, stride=(3, 1)), nn.MaxPool2d(2), nn.GlobalMaxPool2d(), nn.Linear(4, 5))
    return nn.Network(
        Sequential(nn.Linear(2, 4), nn.Tanh(), branches, Auxiliary(rest, head)), (12, 6, 2), np.float64, "inception"
    )


def unnormalized():
    return inception(False)


def wide():
    """Layers whose factors are smaller than their gradients, and a rank has one of them."""
    branches = nn.Parallel(nn.Linear(24, 40), Sequential(nn.Linear(24, 8), nn.Tanh()))
    return nn.Network(Sequential(nn.Flatten(), branches, nn.Linear(48, 5)), (4, 3, 2), np.float64, "wide")


def halves():
    """In mixed precision."""
    layers = unnormalized().root
    return nn.Network(layers, (12, 6, 2), np.float32, "halves", mixed=True)


LOSSES = dict.fromkeys((inception, unnormalized, halves), AuxiliaryLoss(nn.CrossEntropyLoss()))
SAMPLES = 9


def batches(network, shard, batch=4, steps=5):
    """The first steps' (x, y, total) of batches of 4, 4, 1: also fewer samples than ranks."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((SAMPLES, *network.in_shape)), rng.integers(0, 5, SAMPLES)
    x, dtype = x.astype(network.dtype), network.dtype
    loader = nn.Loader(nn.data.Dataset(x, y, classes=5, dtype=dtype), batch, seed=1, shard=shard, dtype=dtype)
    return [each for epoch in range(steps) for each in loader.epoch(epoch)][:steps]


def train(trainer, network, parts=1, **more):
    return [trainer.step(*each, accumulate=parts) for each in batches(network, trainer.shard, **more)]


def loss_of(make):
    return LOSSES.get(make, nn.CrossEntropyLoss())


def one_process(make, optimizer="adam", clip=0, **more):
    one = nn.Trainer(make(**more), loss_of(make), OPTIMIZERS[optimizer](CLIPS[clip]), SEED)
    return one, train(one, one.network)


def together(comm, make, optimizer="adam", clip=0, kind="SpatialParallel", sync=None, more=None, **ranks):
    import parallel
    from collectives import Communicator

    communicator = comm if hasattr(comm, "release") else Communicator(comm)
    rule = OPTIMIZERS[optimizer](CLIPS[clip])
    made = getattr(parallel, kind)
    return made(make(**(more or {})), loss_of(make), rule, communicator, SEED, **ranks, **(sync or {}))


def assert_same(many, one, losses, **options):
    np.testing.assert_allclose(train(many, one.network, **options), losses, rtol=1e-12, err_msg=many.describe())
    want, got = one.state_dict(), many.state_dict()
    there = many.is_writer or not many.scattered
    assert not there or want.keys() == {name for name in got if not name.startswith("compress/")}
    for name, array in want.items() if there else ():
        scale = np.abs(array).max() or 1.0 if array.size else 1.0
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12 * scale, err_msg=f"{many.describe()}: {name}")
    many.check_replicas()


@pytest.mark.mpi(ranks=[2], more=[3, 4])
def test_rows_of_images(comm, ranks):
    for make, optimizer, clip in ((convolutions, "adam", 1), (residual, "momentum", 0), (inception, "lamb", 2)):
        one, losses = one_process(make, optimizer, clip)
        many = together(comm, make, optimizer, clip)
        assert_same(many, one, losses)
        many.close()


@pytest.mark.mpi(ranks=[2], more=[3, 4])
@pytest.mark.parametrize(("least", "ways"), [(0, {"forward", "backward"}), (1 << 40, set())])
def test_rows_on_their_way_while_others_are_computed(comm, ranks, monkeypatch, least, ways):
    """As between nodes, where that pays: what needs no other rank's rows first. All ranks make the same calls."""
    from collectives import Communicator
    from parallel.strategies.operators import rows, strategy
    from parallel.sync import messages

    monkeypatch.setattr(strategy, "nodes_of", lambda ranks: range(ranks.size))
    monkeypatch.setattr(messages, "ROUNDS", 2)  # two steps of each way, then one that was found better
    monkeypatch.setattr(rows, "HIDES", least)
    found = set()
    for way in "forward", "backward":
        name = f"{way}_in_parts"
        monkeypatch.setattr(rows.WindowRows, name, noted(found, way, getattr(rows.WindowRows, name)))
    for make in convolutions, residual:
        one, losses = one_process(make)
        many, said = together(Communicator(comm, debug=True), make), []
        many.say = said.append
        assert_same(many, one, losses)
        many.close()
        assert len(said) == 1 and said[0].startswith("rows of other ranks ")
    assert set().union(*comm.allgather(found)) == ways  # of many ranks some have too few rows


def noted(found, way, method):
    def call(self, *arguments):
        found.add(way)
        return method(self, *arguments)

    return call


@pytest.mark.mpi(ranks=[2, 4], more=[3])
def test_branches_on_different_ranks(comm, ranks):
    """Three branches on two and three ranks, and on four, of which one has none."""
    for make, optimizer, clip in ((inception, "lamb", 2), (wide, "adam", 0)):
        one, losses = one_process(make, optimizer, clip)
        many = together(comm, make, optimizer, clip, "BranchParallel")
        assert_same(many, one, losses)
        many.close()


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=4)
def test_groups_share_a_batch(comm):
    """data=2,space=2: also of a batch of one sample, of which a group has none; statistics over all ranks."""
    messages = {"node_memory": "off", "overlap": "thread"}
    for make, kind, ranks, more, sync in (
        (convolutions, "SpatialParallel", {"space": 2}, {"synchronized": True}, messages),
        (convolutions, "SpatialParallel", {"space": 2}, {"synchronized": True}, {"node_memory": "on"}),
        (unnormalized, "BranchParallel", {"branch": 2}, {}, messages),
        (inception, "BranchParallel", {"branch": 2}, {"synchronized": True}, messages),
        (inception, "BranchParallel", {"branch": 2}, {"synchronized": True}, {"stage": 3, "unit_bytes": 400}),
        (inception, "SpatialParallel", {"space": 2}, {"synchronized": True}, {"stage": 2, "unit_bytes": 400}),
    ):
        one, losses = one_process(make, "adam", 1, **more)
        many = together(comm, make, "adam", 1, kind, sync, more, **ranks)
        assert many.shard == (comm.rank // 2, 2)
        assert_same(many, one, losses)
        many.close()


EXACT = ("none", "topk:1", "threshold:0", "powersgd:64")  # nothing is left out
HOW = (
    {"stage": 1},
    {"stage": 2, "unit_bytes": 400},
    {"stage": 3, "unit_bytes": 400, "prefetch": 1},
    {"stage": 3, "compressor": "none"},
    *({"compressor": method} for method in EXACT),
)


def exchange_of(how):
    from parallel.sync import compression

    return how | {"compressor": compression.parse(how["compressor"])} if "compressor" in how else how


@pytest.mark.mpi(ranks=2, more=[3, 4])
def test_shards_and_compressed_gradients(comm, ranks, tmp_path, thorough):
    """ZeRO's shards lie on all ranks, whatever axis they are on; norms are those of whole tensors."""
    groups = 2 if ranks == 4 else ranks
    hows = [*HOW, {"stage": 2, "offload": str(tmp_path)}]
    for i, (make, kind, axis) in enumerate(
        [(residual, "SpatialParallel", "space"), (unnormalized, "BranchParallel", "branch")]
    ):
        for how in hows if thorough else hows[i::2]:
            optimizer = ("adam", 0) if how.get("compressor", "none") != "none" else ("lamb", 1)
            given = {"synchronized": True} if make is residual else {}
            many = together(comm, make, *optimizer, kind, exchange_of(how), given, **{axis: groups})
            one, losses = one_process(make, *optimizer, **given)
            assert_same(many, one, losses, parts=1 if make is residual else 2)
            many.close()


@pytest.mark.mpi(ranks=2)
def test_parts_half_precision_and_checkpoints(comm):
    one, losses = one_process(unnormalized)
    for kind in "SpatialParallel", "BranchParallel":
        many = together(comm, unnormalized, kind=kind)
        assert_same(many, one, losses, parts=2)
        state = many.state_dict()
        many.close()
        many = together(comm, unnormalized, kind=kind)
        half = nn.Trainer(unnormalized(), loss_of(unnormalized), OPTIMIZERS["adam"](), SEED)
        given = batches(half.network, (0, 1))
        [half.step(*batch) for batch in given[:2]]
        many.load_state_dict(half.state_dict())
        np.testing.assert_allclose([many.step(*batch) for batch in given[2:]], losses[2:], rtol=1e-12)
        again = many.state_dict()
        for name, array in state.items():
            np.testing.assert_allclose(again[name], array, rtol=0, atol=1e-12 * max(1, np.abs(array).max(initial=0)))
        digest, alone = many.digest(), many.alone()
        assert alone is None or alone.digest() == digest
        np.testing.assert_allclose(many.predict(given[0][0]), one.predict(given[0][0]), rtol=1e-10, atol=1e-12)
        mine = many.sum(many.sum_scores(*given[0][:2]))
        np.testing.assert_allclose(mine, one.sum_scores(*given[0][:2]), rtol=1e-10)
        many.close()
        mixed = together(comm, halves, "sgd", kind=kind)
        single, expected = one_process(halves, "sgd")
        np.testing.assert_allclose(train(mixed, single.network), expected, rtol=1e-3)
        mixed.close()


@pytest.mark.mpi(ranks=2)
def test_a_control_without_what_travels(comm, monkeypatch):
    """Halos that do not travel, or a sum that is left out, make other parameters."""
    from parallel.strategies.operators import halo
    from parallel.strategies.tensor import moves

    for make, kind, place, name, instead in (
        (convolutions, "SpatialParallel", halo.Halo, "moves", property(lambda self: False, lambda self, value: None)),
        (unnormalized, "BranchParallel", moves.CopyTo, "backward", lambda self, p, gy, saved, ctx: (gy, {})),
    ):
        one, losses = one_process(make)
        monkeypatch.setattr(place, name, instead, raising=False)
        many = together(comm, make, kind=kind)
        # A halo that does not come holds whatever was there. No Recompute: it would find that on one rank alone.
        with pytest.raises((AssertionError, nn.NonFiniteLoss)):
            assert_same(many, one, losses)
        many.close()
        monkeypatch.undo()


@pytest.mark.mpi(ranks=2)
def test_a_bad_sample_is_traced_and_nothing_hangs(comm):
    many = together(comm, convolutions)
    x, y, total = batches(convolutions(), (0, 1))[0]
    x = x.copy()
    x[2, 12, 3] = np.inf  # a row of the last rank
    before = {name: np.array(array) for name, array in many.state_items()}
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*\[2\]"):
        many.step(x, y, total)
    assert all(np.array_equal(before[name], array) for name, array in many.state_items())
    many.close()


@pytest.mark.mpi(ranks=[2], more=[3])
def test_halos_on_the_wire(comm, ranks):
    """Of 3x3 convolutions two rows each way between neighbours; the first one takes what every rank has."""
    from collectives import Communicator
    from parallel.reports.traffic import Traffic

    def network(count):
        layers = [each for _ in range(count) for each in (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU())]
        return nn.Network(Sequential(*layers, nn.GlobalAvgPool2d()), (12, 7, 4), np.float64)

    found = {}
    for count in (1, 2, 4):
        traffic = Traffic(Communicator(comm))
        many = together(traffic, lambda count=count: network(count), sync={"node_memory": "off"})
        x, y, total = batches(network(1), (0, 1))[0]
        many.step(x, y % 4, total)
        traffic.reset()
        many.step(x, y % 4, total)
        found[count] = traffic.bytes["run"], traffic.calls["run"]
        many.close()
    row = len(x) * 7 * 4 * 8
    neighbours = 2 if 0 < comm.rank < ranks - 1 else 1
    assert found[1] == (0, 0)
    for count in (2, 4):
        assert found[count] == ((count - 1) * 2 * neighbours * row, 2 * (count - 1))


@pytest.mark.mpi(ranks=2)
def test_a_rank_keeps_half_of_the_activations(comm):
    def network():
        layers = [each for i in range(4) for each in (nn.Conv2d(2 if i == 0 else 8, 8, 3, padding=1), nn.Tanh())]
        return nn.Network(Sequential(*layers, nn.GlobalAvgPool2d()), (128, 32, 2), np.float64)

    from nn.core.mixed_precision import nbytes

    many = together(comm, network)
    x = np.zeros((1, 128, 32, 2))
    one = network()
    ctx = one.context()
    w = one.layout.zeros(np.float64)
    kept = nbytes(one.forward(one.layout.views(w), x, ctx)[1])
    assert nbytes(many.forward(x, True)[1]) < 0.56 * kept
    many.close()


# ------------------------------------------------------------------------------------------ without ranks


def test_halos_bring_what_is_needed_however_thin_the_parts():
    """In the simulator, with sends that wait: every element that comes is the one that is needed; and home again."""
    from collectives.checking.simulator import simulate
    from parallel.strategies.operators.halo import halo, owned_rows, pieces
    from parallel.strategies.operators.rows import needed_rows

    size = 3
    for ranks, height, kernel, stride, padding in product((2, 3, 5), (5, 7, 16), (1, 3, 9), (1, 2), (0, 1, 4)):
        layer = nn.Conv2d(1, 1, (kernel, 1), (stride, 1), (padding, 0))
        if height + 2 * padding < kernel or (out := layer.specs((height, 4, 1))[1][0]) < ranks:
            continue
        needs, owned = needed_rows(layer, (height, 4), out, ranks), owned_rows(height, ranks)
        sent, due = ([pieces(rank, needs, owned)[way] for rank in range(ranks)] for way in (0, 1))

        def elements(messages):
            return [((row, i),) for _, (lo, hi) in messages for row in range(lo, hi) for i in range(size)]

        for back in (False, True):
            source, target, wanted = ("theirs", "mine", sent) if back else ("mine", "theirs", due)
            given = due if back else sent
            buffers = [
                {source: elements(given[rank]), target: [None] * len(elements(wanted[rank]))} for rank in range(ranks)
            ]
            simulate(partial(halo, needs=needs, owned=owned, size=size, back=back), buffers)
            assert [held[target] for held in buffers] == [elements(messages) for messages in wanted]


class Post:
    """Stands in for a communicator of threads: what `Run` sends is put where it belongs."""

    def __init__(self, group, table):
        self.group, self.table = group, table

    def compile(self, rounds, **buffers):
        return [step for steps in rounds for step in steps], buffers

    def Irun(self, plan, name=""):
        self.Run(plan, name)
        return SimpleNamespace(Wait=lambda: True)

    def Run(self, plan, name=""):
        from collectives.steps import Send

        steps, buffers = plan
        table, rank = self.table, self.group.rank
        for step in steps:
            if isinstance(step, Send):
                table[rank, step.peer] = buffers[step.buf][step.lo : step.hi].copy()
        self.group.barrier.wait(PATIENCE)
        for step in steps:
            if not isinstance(step, Send):
                buffers[step.buf][step.lo : step.hi] = table.pop((step.peer, rank))
        self.group.barrier.wait(PATIENCE)


WINDOWS = [
    nn.Conv2d(3, 4, (3, 1), padding=(1, 0)),
    nn.Conv2d(3, 2, (4, 3), padding="same"),
    nn.Conv2d(3, 3, (2, 2), stride=(3, 1), padding=(0, 1), groups=3),
    nn.Conv2d(3, 2, (3, 1), padding=(5, 0), dilation=(4, 1)),
    nn.Conv2d(3, 2, (1, 1), stride=(2, 2)),
    nn.MaxPool2d(2),
    nn.MaxPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True),
    nn.MaxPool2d((5, 1), (1, 1), (2, 0)),
    nn.AvgPool2d((3, 2), (2, 2), (1, 1)),
    nn.AvgPool2d((4, 1), (3, 1), (2, 0), ceil_mode=True, count_include_pad=False),
    nn.AdaptiveAvgPool2d((7, 2)),
    Subsample(2, 5),
]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("layer", WINDOWS, ids=repr)
def test_every_window_on_many_ranks(layer, hidden, monkeypatch):
    """Outputs, gradients of the input and of parameters of one process, for heights that nothing divides.

    Also where rows of others are on their way while the rest is computed, however small it is.
    """
    from parallel.strategies.operators import rows
    from parallel.strategies.operators.space import cut

    monkeypatch.setattr(rows, "HIDES", 0)

    for ranks, height in ((2, 11), (3, 16), (4, 23), (7, 22)):
        network = nn.Network(Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), layer), (height, 5, 2), np.float64)
        if network.out_shape[0] < ranks:
            continue
        rng = np.random.default_rng(0)
        w = rng.standard_normal(network.layout.size)
        x = rng.standard_normal((2, height, 5, 2))
        gy = rng.standard_normal((2, *network.out_shape))

        def passed(held, groups, w=w, x=x, gy=gy):
            layout, g = held.layout, np.full_like(w, np.nan)
            ctx = held.context()
            ctx.network_context.input_gradient, ctx.network_context.groups = True, groups
            y, saved = held.forward(layout.views(w), x, ctx)
            y = y.copy()
            gx = held.backward(layout.views(w), layout.views(g), gy.copy(), saved, ctx)
            return y, gx, {name: array.copy() for name, array in layout.items(g)}

        expected, table = passed(network, {}), {}

        def work(group, network=network, table=table, passed=passed):
            group.communicator = Post(group, table)
            held = cut(network, group.rank, group.size)
            for halo in rows.halos(held.root) if hidden else ():
                halo.beside = group.communicator
            return passed(held, {"space": group})

        found = on_threads(ranks, work)
        for y, gx, _ in found:
            np.testing.assert_allclose(y, expected[0], rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(gx, expected[1], rtol=1e-12, atol=1e-13)
        for name, array in expected[2].items():
            np.testing.assert_allclose(sum(g[name] for _, _, g in found), array, rtol=1e-11, atol=1e-12)


def test_branches_are_dealt_by_what_they_cost():
    from parallel.strategies.operators.branches import owners_of

    assert owners_of([5, 1, 4, 3, 2], 2) == [0, 0, 1, 1, 0]
    assert owners_of([0, 0, 0], 3) == [0, 1, 2] and owners_of([7], 3) == [0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--mesh space=2 --model mlp:64,10", "takes samples of shape .* 2 ranks cannot have some rows each: .*no conv"),
        ("--mesh space=9", r"of which 9 ranks cannot have some rows each: .* use at most 8 ranks on the axis space"),
        ("--mesh branch=2", "has no branches that 2 ranks could compute: there is no nn.Parallel"),
        ("--mesh space=2,branch=2", "space and branch"),
        ("--mesh space=2,pipeline=2", "space and pipeline"),
        ("--mesh space=2,tensor=2", "space and tensor"),
        ("--mesh space=2 --strategy ps", "has no effect with --strategy ps"),
        (
            "--mesh space=2 --strategy zero2 --compress topk:0.1",
            "--compress",
        ),
        ("--mesh space=2 --reproducible 4", "--reproducible cannot be combined with --mesh space=2: the order of"),
        (
            "--mesh branch=2 --strategy fsdp --reproducible 4",
            "--reproducible cannot be combined with --mesh branch=2: the order",
        ),
        ("--mesh space=2 --strategy owt", "--strategy owt"),
        ("--mesh space=2 --consistency stale:1", "--consistency"),
        ("--mesh space=2 --ranks 3", "3 ranks"),
    ],
)
def test_what_cannot_be_is_refused_in_time(given, words):
    from parallel.command.factory import prepare
    from parallel.command.parsing import parse
    from parallel.settings import OptionError

    ranks = [] if "--ranks" in given else ["--ranks", "9" if "=9" in given else "4" if given.count("=") > 1 else "2"]
    with pytest.raises(OptionError, match=words):
        prepare(parse([*given.split(), *ranks, "--limit", "60"]))


@pytest.mark.mpi(ranks=2)
def test_the_command_line(comm):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    for make, mesh in ((convolutions, "space=2"), (inception, "branch=2")):
        one, losses = one_process(make)
        rule = OPTIMIZERS["adam"]()
        many = build_trainer(Options(mesh=mesh, seed=SEED), make(), loss_of(make), rule, Communicator(comm))
        assert_same(many, one, losses)
        many.close()

"""A measured network is positive, the same on every rank, and a file that `price` can use."""

import pytest


@pytest.mark.mpi(ranks=[1, 3])
def test_measured_network(comm, tmp_path):
    from collectives import ALGORITHMS, price
    from collectives.pricing.measure import measure_network
    from collectives.pricing.networks import Network

    if comm.size == 1:
        with pytest.raises(ValueError, match="two or more"):
            measure_network(comm)
        return
    network = measure_network(comm, sizes=(4, 4096, 1 << 20), seconds=0.01)
    assert all(other == network for other in comm.allgather(network))
    assert network.ranks_per_node == 3 and "3 ranks a node" in network.source
    assert network.between == network.inside  # there is no other level here
    lengths = [point.nbytes for point in network.inside.points]
    assert set(lengths) >= {4, 4096, 1 << 20} and network.inside.eager is not None  # MPI buffers no message of 1 MiB
    assert {network.inside.eager, network.inside.eager + 1} <= set(lengths)
    assert all(min(point) > 0 for point in network.inside.points)
    for points in (network.posts, network.fetches):
        assert [n for n, _ in points] == [n for n, _ in network.copies] and all(seconds > 0 for _, seconds in points)
    assert 1e-13 < network.memory < 1e-8
    assert [ranks for ranks, _ in network.barriers] == [2, 3] and all(seconds > 0 for _, seconds in network.barriers)
    # Any machine: a message of 1 MiB takes between 10 us and 1 s, memory moves between 100 MB/s and 1 TB/s.
    assert 1e-5 < network.inside.alpha + (1 << 20) * network.inside.beta < 1
    assert 1e-12 < network.gamma < 1e-8 and 1e-12 < network.copy < 1e-8
    network.save(tmp_path / "network.json")
    assert Network.load(tmp_path / "network.json") == network
    assert price(ALGORITHMS["allreduce"]["ring"], 3, 1000, 4, network).seconds > 0


@pytest.mark.mpi(ranks=2)
def test_the_network_of_a_communicator(comm):
    """As a run with --strategy auto measures it: the requests of a Communicator are its own, and not those of MPI."""
    from collectives import Communicator
    from collectives.pricing.measure import measure_network

    communicator = Communicator(comm)
    network = measure_network(communicator, sizes=(16, 4096), seconds=0.002)
    communicator.release()
    assert [ranks for ranks, _ in network.barriers] == [2] and network.inside.alpha > 0


def test_partners_are_those_of_recursive_doubling():
    from collectives.pricing.measure import at_once

    class Alone:
        """Rank 2 of 5, with nobody else: who it would exchange with."""

        def __init__(self):
            self.asked = []
            self.Get_rank, self.Get_size, self.Barrier = lambda: 2, lambda: 5, lambda: None
            self.Sendrecv = lambda out, to, tag, into, source, other: self.asked.append((to, source))
            self.allreduce = lambda seconds, op: seconds

    comm = Alone()
    at_once(comm, 8, 0.0, around=False)
    assert comm.asked == [(3, 3), (0, 0)], "the third one, 6, is not there"
    at_once(comm, 8, 0.0, around=True)
    assert comm.asked[2:] == [(3, 1)]


def test_the_line_through_messages_that_a_token_bucket_lets_through_is_that_of_a_stream():
    """A cable of 100 ns a byte, 10 us away, where what comes after a rest is free up to 20,000 bytes."""
    from collectives.pricing.measure import summary
    from collectives.pricing.networks import Point, fit

    lengths = (4, 64, 1024, 4096, 16_384, 65_536, 1 << 20)
    seconds = [(10e-6 + 100e-9 * max(0, n - 20_000), 100e-9 * n) for n in lengths]
    points = [Point(n, time, 1e-6, 1e-6, gap, time, time) for n, (time, gap) in zip(lengths, seconds, strict=True)]
    assert summary(points).beta == pytest.approx(100e-9, rel=0.1)
    assert fit([(point.nbytes, point.time) for point in points]).beta < 50e-9, "a burst hides the cable"

"""The table of algorithms: complete, monotone, replaceable by a file, and made from measurements."""

import platform

import pytest

from collectives import ALGORITHMS
from collectives.algorithms.registry import COMMUTATIVE, NODES, Cost, Need, algorithm, by_messages
from collectives.choosing.selection import (
    ANY,
    LIBRARIES,
    SHARED,
    TABLE,
    Call,
    Selection,
    cache_file,
    load,
    save,
    table_from,
)

PLACES = {"node": [0, 0, 0], "network": [0, 1, 2], "nodes": [0, 0, 2]}


def limits_rise(rows):
    """Rows for shared arrays stand before those that hold where there are none."""
    limits = [limit for limit, name in rows if name != "shared_arrays"]
    return limits == sorted(limits) and limits[-1] == ANY and len(set(rows)) == len(rows)


def test_every_place_has_rows_that_rise_for_every_operation():
    for place, table in TABLE.items():
        assert set(table) == set(ALGORITHMS)
        for operation, rows in table.items():
            assert limits_rise(rows), (place, operation)


def test_rows_of_a_library_are_for_one_node_and_the_file_goes_before_them(tmp_path, monkeypatch):
    for library, table in LIBRARIES.items():
        for operation, rows in table.items():
            assert limits_rise(rows)
            assert rows != TABLE["node"][operation], "no row of its own"
            rows_of = lambda nodes, name, op=operation: [row[:2] for row in Selection({}, nodes, name).rows[op]]
            assert rows_of([0, 0], f"{library} 9.1")[: len(rows)] == rows
            for nodes, name in (([0, 0], f"Other {library}"), ([0, 1], f"{library} 9.1")):
                default = TABLE["network" if any(nodes) else "node"][operation]
                assert rows_of(nodes, name)[: len(default)] == default
            save(tmp_path / "tune.json", {"node": {operation: [(ANY, "native")]}})
            monkeypatch.setenv("RINGPROP_TUNE", str(tmp_path / "tune.json"))
            assert rows_of([0, 0], f"{library} 9.1")[:1] == [(ANY, "native")]
            monkeypatch.delenv("RINGPROP_TUNE")


def test_what_is_chosen_can_always_run():
    for place, nodes in PLACES.items():
        selection = Selection({}, nodes)
        assert selection.place == place
        assert all(selection.native_below(operation) < 1 << 31 for operation in ALGORITHMS)
        for operation in ALGORITHMS:
            for asked in ["auto", *(["shared"] if operation in SHARED else []), *by_messages(operation)]:
                for nbytes in (0, 1 << 10, 1 << 20, 1 << 40):
                    for ordered in (False, True):
                        for shareable in (False, True):
                            call = Call(operation, nbytes, ordered=ordered, shareable=shareable and not ordered)
                            name = selection.choose(asked, call)
                            known = *by_messages(operation), "shared"
                            assert name in known or (name == "native" and nbytes < 1 << 31)
                            if name == "shared":
                                assert place == "node" or (place == "nodes" and operation == "allreduce")
                                assert call.shareable
                            elif name != "native":
                                assert ALGORITHMS[operation][name].ordered or not ordered
            call = Call(operation, 100, vector=True)
            if operation in ("allgather", "alltoall", "gather", "scatter"):
                assert selection.choose("auto", call) in by_messages(operation), "no length is the same on all ranks"


def test_short_calls_are_the_librarys_where_the_table_says_so_and_it_can():
    selection = Selection({}, PLACES["node"])
    limits = {operation: int(selection.native_below(operation)) for operation in ALGORITHMS}
    assert sum(limit >= 0 for limit in limits.values()) > 5
    for operation, limit in limits.items():
        for nbytes in (0, limit) if limit >= 0 else ():
            assert selection.choose("auto", Call(operation, nbytes)) == "native"
            assert selection.choose("auto", Call(operation, nbytes, numpy=True)) != "native"


def test_blocks_of_different_lengths_take_no_algorithm_for_equal_ones():
    selection = Selection({}, [0, 1])
    assert selection.choose("bruck", Call("alltoall", 100)) == "bruck"
    assert selection.reason("bruck", Call("alltoall", 100, vector=True)) == (
        "pairwise",
        "bruck needs blocks of one length",
    )


def test_a_file_replaces_rows(tmp_path, monkeypatch):
    file = tmp_path / "tune.json"
    save(file, {"network": {"allreduce": [(100, "doubling"), (ANY, "ring")]}})
    assert load(file) == {"network": {"allreduce": [(100, "doubling"), (ANY, "ring")]}}
    monkeypatch.setenv("RINGPROP_TUNE", str(file))
    selection = Selection({}, [0, 1])
    assert selection.reason("auto", Call("allreduce", 100)) == ("doubling", f"{file} says so up to 100 bytes")
    assert selection.choose("auto", Call("allreduce", 101)) == "ring"
    assert [row[:2] for row in selection.rows["scan"][:1]] == TABLE["network"]["scan"]


@pytest.mark.parametrize(
    "content, said",
    [
        ("[", "no table of algorithms"),
        ("[]", "no table of algorithms"),
        ('{"moon": {}}', "no place 'moon'"),
        ('{"node": {"allreduce": [[null, "rind"]]}}', "no allreduce algorithm 'rind'"),
        ('{"node": {"allreduce": [[null, "auto"]]}}', "name an algorithm"),
        ('{"node": {"allreduce": [[5, "ring"], [4, "ring"], [null, "ring"]]}}', "must rise"),
        ('{"node": {"allreduce": [[5, "ring"], [5, "doubling"], [null, "ring"]]}}', "must rise"),
        ('{"node": {"allreduce": [[null, "ring"], [null, "doubling"]]}}', "must rise"),
        ('{"node": {"allreduce": [[null, "ring"], [5, "ring"]]}}', "end with null"),
        ('{"node": {"allreduce": [[5, "ring"]]}}', "end with null"),
        ('{"node": {"allreduce": []}}', "end with null"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(content, said, tmp_path):
    file = tmp_path / "tune.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"tune.json: .*{said}"):
        load(file)


def test_a_table_from_measurements_changes_as_seldom_as_will_do():
    times = {
        "native": {4: 1.0, 64: 1.5, 1024: 9.0, 4096: 40.0},
        "doubling": {4: 1.05, 64: 1.0, 1024: 4.0, 4096: 20.0},
        "ring": {4: 4.0, 64: 4.0, 1024: 3.9, 4096: 10.0},
    }
    assert table_from(times) == [(4, "native"), (1024, "doubling"), (ANY, "ring")]


def test_a_new_entry_is_chosen_at_once_by_calls_that_meet_its_needs(tmp_path, monkeypatch):
    def newest(rank, size, count):
        yield from ALGORITHMS["scan"]["chain"].rounds(rank, size, count)

    monkeypatch.setitem(ALGORITHMS, "scan", dict(ALGORITHMS["scan"]))
    algorithm("scan", cost=lambda p, n: Cost(1, n), needs={COMMUTATIVE})(newest)
    save(tmp_path / "tune.json", {"node": {"scan": [(ANY, "newest")]}})
    monkeypatch.setenv("RINGPROP_TUNE", str(tmp_path / "tune.json"))
    selection = Selection({}, [0, 0])
    assert selection.choose("auto", Call("scan", 100)) == "newest"
    found = selection.reason("auto", Call("scan", 100, ordered=True))
    assert found == ("doubling", f"newest needs {COMMUTATIVE.value}")
    assert selection.choose("newest", Call("scan", 100, float16=True)) == "newest", "as asked for"
    assert selection.choose("auto", Call("scan", 100, float16=True)) == "flat"


def test_a_table_says_where_shared_arrays_are_faster():
    times = {
        "native": {4: 1.0, 64: 5.0, 1024: 5.0, 4096: 9.0},
        "ring": {4: 2.0, 64: 5.1, 1024: 4.9, 4096: 3.0},
        "shared_arrays": {4: 2.0, 64: 2.0, 1024: 2.0, 4096: 5.0},
    }
    rows = [(4, "native"), (1024, "shared_arrays"), (1024, "native"), (ANY, "ring")]
    assert table_from(times, 1.03) == rows


def test_what_is_in_the_users_cache_holds_on_one_node(tmp_path, monkeypatch):
    library = "Some MPI v1.2, package: nothing"
    monkeypatch.delenv("RINGPROP_TUNE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_file.cache_clear()
    file = cache_file(library)
    assert file.parent == tmp_path / "ringprop" and "some-mpi-v1.2" in file.name and "package" not in file.name
    assert Selection({}, [0, 0], library).choose("auto", Call("scan", 100)) == "doubling"
    file.parent.mkdir()
    save(file, {"node": {"scan": [(ANY, "chain")]}})
    assert Selection({}, [0, 0], library).reason("auto", Call("scan", 100)) == (
        "chain",
        f"{file} says so for all longer messages",
    )
    assert Selection({}, [0, 1], library).choose("auto", Call("scan", 100)) == "doubling"
    monkeypatch.setenv("RINGPROP_TUNE", "")
    assert Selection({}, [0, 0], library).choose("auto", Call("scan", 100)) == "doubling", "switched off"
    cache_file.cache_clear()


@pytest.mark.parametrize("operation", ["allgather", "broadcast"])
def test_shared_arrays_are_read_where_they_lie_once_there_are_some(operation, tmp_path, monkeypatch):
    short, long = Call(operation, 1 << 10), Call(operation, 1 << 20)
    for place, nodes in PLACES.items():
        selection = Selection({}, nodes)
        before = [selection.choose("auto", call) for call in (short, long)]
        selection.arrays = True
        assert selection.choose("auto", short) == before[0]
        assert selection.choose("auto", long) == ("shared_arrays" if place == "node" else before[1])
        assert selection.choose("auto", long._replace(private=True)) == before[1]
        assert selection.choose("native", long) == "native"
    selection = Selection({}, PLACES["node"])
    selection.arrays = True
    assert short.nbytes < selection.native_below(operation) < long.nbytes, "or a shortcut would go past the choice"
    save(tmp_path / "tune.json", {"node": {operation: [(ANY, "native")]}})
    monkeypatch.setenv("RINGPROP_TUNE", str(tmp_path / "tune.json"))
    tuned = Selection({}, PLACES["node"])
    tuned.arrays = True
    assert tuned.choose("auto", long) == "native", "a table of one's own is followed"


def test_a_measured_table_holds_for_messages_too(tmp_path, monkeypatch):
    """Nonblocking calls and memory=False went by the table of the package, of which they said that it was the file."""
    file = tmp_path / "table.json"
    rows = {"allreduce": [(1000, "ring"), (ANY, "shared")], "broadcast": [(ANY, "native")]}
    save(file, {"node": rows, "network": {"allgather": [(ANY, "doubling")]}})
    monkeypatch.setenv("RINGPROP_TUNE", str(file))
    selection = Selection({}, [0, 0], memory=False)
    assert selection.reason("auto", Call("allreduce", 500)) == ("ring", f"{file} says so up to 1,000 bytes")
    for asked in ("auto", "schedule", "messages"):
        requested = selection.requested("allreduce", asked)
        name, why = selection.reason(requested, Call("allreduce", 1 << 20))
        assert name == "segmented_ring" and why == "shared needs node memory: only messages are sent"
        assert selection.choose(requested, Call("broadcast", 100)) == "flat"
        assert selection.choose(requested, Call("allgather", 100)) == "doubling"
        assert selection.reason(requested, Call("scan", 100))[1].startswith("the default table says so")


@pytest.mark.parametrize(
    "operation, needs, message",
    [
        ("sum", (), "no operation 'sum': expected one of allgather, allreduce"),
        ("allreduce", {NODES}, "allreduce, newest: expected a parameter 'nodes' after rank, size, count"),
        ("allreduce", {Need.DIMS}, "expected a parameter 'dims'"),
        ("reduce", (), "reduce, newest: expected a parameter 'root'"),
        ("alltoall", (), "expected a parameter 'into'"),
        ("scan", {"COMMUTATIVE"}, "expected values of Need"),
    ],
)
def test_an_entry_that_no_call_could_run_is_refused_when_it_is_registered(operation, needs, message):
    def newest(rank, size, count):
        yield ()

    with pytest.raises((TypeError, ValueError), match=message):
        algorithm(operation, cost=lambda p, n: Cost(), needs=needs)(newest)
    assert "newest" not in ALGORITHMS.get(operation, {})


def test_the_name_of_the_processor(tmp_path):
    from collectives.choosing.selection import processor

    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick 7\nmodel name\t: Quick 7\n")
    assert processor(str(tmp_path / "cpuinfo")) == "Quick 7"
    assert processor(str(tmp_path / "none")) == platform.machine()

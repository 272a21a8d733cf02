"""Checkpoints of one file for each rank: whole when read, damage is named, files of a killed run do not count."""

import hashlib
import json

import numpy as np
import pytest

import nn
from parallel import ShardedCheckpoints
from parallel.state.fragments import Fragment
from parallel.state.splits import Split, SplitSpec, cut

WHOLE = {"param/0.W": np.arange(24.0).reshape(6, 4), "param/0.b": np.arange(4.0), "steps": np.array(7)}
SPLIT = Split(1, blocks=2)


def three(change=lambda fragments: fragments):
    """Of three ranks: W is cut along its columns into two parts, the second of them among ranks 1 and 2."""
    spec = {"0.W": SplitSpec((6, 4), None, split=SPLIT)}
    first, second = (cut(spec, {"0.W": WHOLE["param/0.W"]}, i, 2)["0.W"] for i in range(2))
    at = {"shape": (6, 4), "split": SPLIT}
    return change(
        [
            [Fragment("steps", WHOLE["steps"]), Fragment("param/0.W", first, part=(0, 2), **at)],
            [Fragment("param/0.W", second.reshape(-1)[:5], part=(1, 2), **at)],
            [
                Fragment("param/0.W", second.reshape(-1)[5:], part=(1, 2), start=5, **at),
                Fragment("param/0.b", WHOLE["param/0.b"]),
            ],
        ]
    )


def save(kept, steps, ranks, names=(None,)):
    """As three ranks do."""
    number = kept.begin_parts(steps)
    progress = [{"epoch": steps}, None, None]
    parts = [kept.write_part(steps, number, (i, 3), iter(mine), progress[i]) for i, mine in enumerate(ranks)]
    kept.list_parts(steps, parts, names)
    return [kept.directory / file for file, _ in parts]


def test_parts_come_back_whole(tmp_path):
    kept = ShardedCheckpoints(tmp_path)
    for steps in (1, 2, 3):
        save(kept, steps, three(), (None,) if steps > 1 else ("best", None))
    state, progress, _ = kept.load()
    assert progress == {"epoch": 3} and state.keys() == WHOLE.keys()
    for name, array in WHOLE.items():
        assert state[name].dtype == array.dtype and np.array_equal(state[name], array), name
    assert kept.load("best")[1] == {"epoch": 1}
    assert len(list(tmp_path.iterdir())) == 10, "the best one, the last two, and the manifest"
    kept.save(WHOLE | {"steps": np.array(3)}, {"epoch": 4})  # one of one file takes its place
    kept.save(WHOLE, {"epoch": 5}, "best")
    assert kept.load()[1] == {"epoch": 4} and kept.load("best")[1] == {"epoch": 5}
    assert len(list(tmp_path.iterdir())) == 1 + 3 + 2


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_damaged_part_is_named_and_the_one_before_used(tmp_path, which, damage):
    kept = ShardedCheckpoints(tmp_path)
    before, parts = save(kept, 1, three()), save(kept, 2, three())
    content = bytearray(parts[which].read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "flip":
            parts[which].write_bytes(content)
        case "truncate":
            parts[which].write_bytes(content[:-7])
        case "swap":
            parts[which].write_bytes(before[(which + 1) % 3].read_bytes())
        case "remove":
            parts[which].unlink()
    with pytest.warns(UserWarning, match=f"DAMAGED.*its part {parts[which].name}: "):
        assert kept.load()[1] == {"epoch": 1}
    for left in before:
        left.write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(nn.CheckpointError, match=parts[which].name):
        kept.load()


CHANGES = {
    "missing": (lambda ranks: [ranks[0], [], ranks[2]], r"param/0\.W: elements of part 1 of 2 from 0 on are missing"),
    "short": (lambda ranks: [ranks[0], ranks[1], ranks[2][1:]], r"param/0\.W: it has 12 elements of part 1 of 2, .* 5"),
    "twice": (
        lambda ranks: [ranks[0], ranks[1], [Fragment("param/0.b", np.zeros(2), (4,)), *ranks[1]]],
        r"param/0\.W: elements of part 1 of 2 from 0 on are there twice",
    ),
    "dtype": (
        lambda ranks: [*ranks[:2], [ranks[2][0], Fragment("steps", np.array(7.0), (), 1)]],
        r"steps: another shape, dtype",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_do_not_make_a_whole_are_refused(tmp_path, change):
    """Though every file is what the manifest says."""
    kept, (change, said) = ShardedCheckpoints(tmp_path), CHANGES[change]
    save(kept, 1, three())
    save(kept, 2, three(change))
    with pytest.warns(UserWarning, match=said):
        assert kept.load()[1] == {"epoch": 1}


def test_a_manifest_that_was_cut_short_is_refused_by_name(tmp_path):
    kept = ShardedCheckpoints(tmp_path)
    save(kept, 1, three())
    text = (tmp_path / "manifest.json").read_text()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        (tmp_path / "manifest.json").write_text(text[:length])
        with pytest.raises(nn.CheckpointError, match=r"manifest\.json"):
            kept.load()
    for wrong in ("../step.npz", "a/b.npz", 7, "x"):
        entry = {"file": "step-00000001.npz", "named": False, "parts": [{"file": wrong, "sha256": ""}]}
        (tmp_path / "manifest.json").write_text(json.dumps({"format": 2, "checkpoints": [entry]}))
        with pytest.raises(nn.CheckpointError, match="was it edited"):
            kept.entries()


def test_what_is_not_listed_does_not_count_and_is_removed(tmp_path):
    """A run was killed when some of its parts were there, also those of a step that is listed already."""
    kept = ShardedCheckpoints(tmp_path)
    listed = save(kept, 1, three())
    for steps in (1, 2):
        number = kept.begin_parts(steps)
        file, _ = kept.write_part(steps, number, (1, 3), iter(three()[1]))
        assert (tmp_path / file) not in listed, "it takes nobody's place"
    assert kept.load()[1] == {"epoch": 1}
    assert len(list(tmp_path.glob("*.part-*"))) == 4, "the first was removed as the second began"
    save(kept, 3, three())
    assert sorted(tmp_path.glob("*.part-*")) == sorted([*listed, *tmp_path.glob("step-00000003.*")])


def test_parts_are_read_without_trust(tmp_path):
    """Places that no array has; nothing is unpickled, and no memory asked for that the files do not have."""
    kept = ShardedCheckpoints(tmp_path)
    good = {"shape": [2], "start": 0, "part": [0, 1], "split": None}
    wrongs = [{"shape": [10**30]}, {"shape": [-1]}, {"shape": 2}, {"start": -1}, {"part": [1, 1]}, {"part": [0, 2]}]
    wrongs += [{"split": [5, 1, 0], "part": [0, 2]}, {"split": [0, 3, 0], "part": [0, 2]}, {"part": [0, 10**9]}]
    wrongs += [{"shape": [0, 10**30]}, {"shape": [10**12]}, {"part": [0, 10**9], "split": [0, 1, 0]}, {"start": 1.0}]
    for wrong in wrongs:
        file = tmp_path / "step-00000001.1.part-0-of-1.npz"
        places = json.dumps({"w": good | wrong})
        np.savez(file, w=np.zeros(2), progress=np.array("{}"), fragments=np.array(places))
        kept.list_parts(1, [(file.name, hashlib.sha256(file.read_bytes()).hexdigest())])
        with pytest.warns(UserWarning, match="w: "), pytest.raises(nn.CheckpointError, match="no usable"):
            kept.load()

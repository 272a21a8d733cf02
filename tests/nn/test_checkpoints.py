"""Checkpoints survive whatever happens to them: damage is found and named, a full disk leaves the old."""

import errno
import hashlib
import os
import stat

import numpy as np
import pytest

import nn
from nn.training import checkpoints


def state(step):
    return {"param/0.W": np.full((2, 3), float(step)), "steps": np.array(step)}


def test_round_trip_keeps_the_last_two(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    (tmp_path / ".step-00000001.npz.7.tmp").write_bytes(b"what a run leaves that is killed while it writes")
    for step in (1, 2, 3):
        kept.save(state(step), {"epoch": step, "history": [{"loss": 0.1}]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "step-00000002.npz", "step-00000003.npz"]
    loaded, progress, path = kept.load()
    assert (loaded["param/0.W"] == 3).all() and loaded["steps"] == 3
    assert progress == {"epoch": 3, "history": [{"loss": 0.1}]} and path.name == "step-00000003.npz"


def test_a_step_that_is_saved_twice_is_there_once(tmp_path):
    """As where a step ends an epoch: each line of the manifest has its file, and the second save counts."""
    kept = nn.Checkpoints(tmp_path)
    for step, epoch in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 2)):
        kept.save(state(step), {"epoch": epoch})
        files = [entry["file"] for entry in kept.entries()]
        assert len(set(files)) == len(files) and all((tmp_path / file).exists() for file in files)
    assert files == ["step-00000002.npz", "step-00000003.npz"] and kept.load()[1] == {"epoch": 2}
    (tmp_path / files[1]).unlink()
    with pytest.warns(UserWarning, match="DAMAGED.*step-00000003"):
        assert kept.load()[1] == {"epoch": 1}


@pytest.mark.parametrize("name", ["", "a/b", "step-00000001"])
def test_a_name_that_is_none_or_that_of_a_step_is_refused(name, tmp_path):
    """A named one would else replace that of the step, and not be found as the latest."""
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {"epoch": 1})
    with pytest.raises(ValueError, match="name is that of a file in the directory"):
        kept.save(state(1), {}, name)
    assert kept.load()[1] == {"epoch": 1}


def test_named_ones_are_kept_beside(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {}, "best")
    for step in (2, 3, 4):
        kept.save(state(step), {})
    assert kept.load("best")[0]["steps"] == 1 and kept.load()[0]["steps"] == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_used(tmp_path, damage):
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {"epoch": 1})
    path = kept.save(state(2), {"epoch": 2})
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"flip": content, "truncate": content[:-9], "remove": content, "empty": b""}[damage])
    if damage == "remove":
        path.unlink()
    with pytest.warns(UserWarning, match="DAMAGED.*step-00000002"):
        _, progress, used = kept.load()
    assert progress == {"epoch": 1} and used.name == "step-00000001.npz"


def test_none_left_is_an_error_with_all_reasons(tmp_path):
    with pytest.raises(nn.CheckpointError, match="holds none"):
        nn.Checkpoints(tmp_path / "nowhere").load()
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {}).unlink()
    with pytest.warns(UserWarning), pytest.raises(nn.CheckpointError, match=r"step-00000001.npz"):
        kept.load()


def test_a_manifest_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(nn.CheckpointError, match="not JSON"):
        nn.Checkpoints(tmp_path).load()
    (tmp_path / "manifest.json").write_text('{"format": 7}')
    with pytest.raises(nn.CheckpointError, match="format 7"):
        nn.Checkpoints(tmp_path).load()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_and_no_litter(tmp_path, monkeypatch, call):
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {"epoch": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.os, call, full)
    with pytest.raises(
        OSError, match=r"cannot write [\d,]+ bytes to .*step-00000002.npz .*what was there before is kept"
    ):
        kept.save(state(2), {"epoch": 2})
    monkeypatch.undo()
    assert kept.load()[1] == {"epoch": 1}
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "step-00000001.npz"]


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_save_cut_short_anywhere_leaves_a_checkpoint(tmp_path, monkeypatch, cut):
    """Content, name, the directory that has it; the manifest last. What fails leaves the old or the new, whole."""
    kept, calls = nn.Checkpoints(tmp_path), []
    kept.save(state(1), {"epoch": 1})
    sync, replace = os.fsync, os.replace

    def until(what):
        calls.append(what)
        if len(calls) == cut:
            raise OSError(errno.EIO, "Input/output error")

    def fsync(file):
        until("directory" if stat.S_ISDIR(os.fstat(file).st_mode) else "content")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (until(new.name), replace(old, new)))
    with pytest.raises(OSError, match="write"):
        kept.save(state(2), {"epoch": 2})
    names = "step-00000002.npz", "manifest.json"
    assert calls == [what for name in names for what in ("content", name, "directory")][:cut]
    assert kept.load()[1] == {"epoch": 1 if cut < 6 else 2}
    assert not list(tmp_path.glob(".*"))


def save_until(kept, cut, step):
    """Save a "best" one in a process that is gone, and nothing is cleaned up, at the `cut`-th write to the disk."""
    if not (child := os.fork()):
        try:
            writes = iter(range(1, 100))
            for call in ("fsync", "replace"):
                real = getattr(os, call)
                setattr(os, call, lambda *of, real=real: os._exit(7) if next(writes) == cut else real(*of))
            kept.save(state(step), {"epoch": step}, "best")
            os._exit(next(writes) + 10)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("cut", range(1, 10))
def test_one_that_takes_anothers_place_is_whole_wherever_the_process_is_killed(tmp_path, cut):
    """Manifest, file, manifest: each its content, its name, the directory. And killed again."""
    for again in (2, 5, 8):
        kept = nn.Checkpoints(tmp_path / str(again))
        kept.save(state(1), {"epoch": 1}, "best")
        assert save_until(kept, cut, 2) == 7
        stands = 1 if cut < 6 else 2
        loaded, progress, _ = kept.load("best")
        assert loaded["steps"] == progress["epoch"] == stands
        assert save_until(kept, again, 3) == 7
        assert kept.load("best")[1] == {"epoch": stands if again < 6 else 3}
        kept.save(state(4), {"epoch": 4}, "best")
        assert kept.load("best")[1] == {"epoch": 4} and kept.entries()[0].keys() == {"file", "sha256", "named"}
    assert save_until(kept, 10, 5) == 20, "no tenth write"


def test_a_reader_of_the_manifest_sees_it_whole(tmp_path):
    """The one before, if that is what was opened: it is replaced, not written over."""
    kept = nn.Checkpoints(tmp_path)
    kept.save(state(1), {})
    before = (tmp_path / "manifest.json").read_text()
    with open(tmp_path / "manifest.json") as opened:
        kept.save(state(2), {})
        assert opened.read() == before != (tmp_path / "manifest.json").read_text()


def test_pickles_are_neither_written_nor_read(tmp_path):
    kept = nn.Checkpoints(tmp_path)
    evil = {"evil": np.array([{"a": 1}], object)}
    with pytest.raises(TypeError, match="evil holds Python objects"):
        kept.save(state(1) | evil, {})
    path = kept.save(state(1), {})
    np.savez(path, progress=np.array("{}"), **evil)
    manifest = (tmp_path / "manifest.json").read_text()
    old = kept.entries()[0]["sha256"]
    (tmp_path / "manifest.json").write_text(manifest.replace(old, hashlib.sha256(path.read_bytes()).hexdigest()))
    with pytest.warns(UserWarning, match="allow_pickle"), pytest.raises(nn.CheckpointError):
        kept.load()

"""Checkpoints survive whatever happens to them: damage is found and named, a full disk leaves the old."""

import errno
import hashlib
import os

import numpy as np
import pytest

import nn
from nn import checkpoints


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

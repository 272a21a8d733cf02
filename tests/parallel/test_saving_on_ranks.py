"""nn.save on ranks: whatever the strategy shards, the file has the whole network, and all ranks end alike."""

import hashlib

import numpy as np
import pytest
from equality import dataset
from test_callbacks import STRATEGIES, trainer

import nn

MORE = {"pipeline": {"strategy": "pipeline", "pipeline": "gpipe:micro=2"}, "downpour": {"strategy": "downpour"}}


@pytest.mark.mpi(ranks=3, timeout=60)
def test_every_strategy_saves_the_whole_network(comm, shared_tmp_path):
    x, _ = dataset("mlp").batch(slice(0, 4), np.float64)
    digests = set()
    for i, (name, options) in enumerate((STRATEGIES | MORE).items()):
        many = trainer(comm, **options)
        for batch in nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64).epoch(0):
            many.step(*batch)
        file = nn.save(many, shared_tmp_path / f"{i}.npz")  # of a pipeline, ranks have a part of it
        nn.export_onnx(many, shared_tmp_path / f"{i}.onnx")
        comm.Barrier()
        after = nn.load(file)
        digest = hashlib.sha256(after.flat_parameters).hexdigest()
        assert digest == many.digest() or comm.rank, name
        assert (shared_tmp_path / f"{i}.onnx").stat().st_size > 4 * 1800
        assert len(set(comm.allgather(after.predict(x).tobytes()))) == 1
        digests.add(digest)
    assert len(digests) > 2, "control: not all strategies round alike, some compress"


@pytest.mark.mpi(ranks=2)
def test_a_file_that_cannot_be_written_ends_all_ranks(comm, shared_tmp_path):
    for name in ("by messages", "fsdp", "dp"):
        many = trainer(comm, **STRATEGIES[name])
        with pytest.raises(
            OSError, match="the first rank could not write the network" if comm.rank else "No such file"
        ):
            nn.save(many, shared_tmp_path / "nowhere" / "x.npz")
        assert len(set(comm.allgather(many.steps))) == 1

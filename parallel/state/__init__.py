"""Networks of which ranks have parts or stages, and the state of a trainer whose arrays lie on several ranks.

| file | holds |
|---|---|
| splits.py | arrays that are split: every rank of a tensor group holds a part of them |
| stages.py | a network cut between layers |
| fragments.py | fragments of arrays, as ranks hold and write them, and the whole arrays that they make |
| placed.py | a row of the table of a trainer's arrays: Replicate, Shard, Partial |
| table.py | the table: gather, load, snapshot, digest, bytes, checkpoints, written once |
| placement_picture.py | who holds what |
| sharded_checkpoints.py | checkpoints of one file for each rank |
| checkpoint_writer.py | who writes them: one rank, or all, at once or on threads |
"""

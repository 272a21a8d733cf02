"""Gradient synchronizers: how gradients and parameters of different ranks are brought together.

| file | holds |
|---|---|
| base.py, step_result.py | the methods of a sync, and the one of one process; the message and the result of a step |
| messages.py, node_memory.py | sums in buckets; sums in memory that the ranks of a node share |
| gradient_factors.py, undo_log.py | for node memory: factors in place of gradients; an update that a death cuts short |
| fixed_tree.py | the same bits on any number of ranks |
| sharded.py, unit_buffered.py, units.py, offload.py | ZeRO-1; ZeRO-2 and 3; units of layers; shards in files |
| served.py, push_pull.py, server_roles.py | parameter servers in step: their schedules, who serves |
| master.py | one rank updates |
| local_update.py | the base where ranks make steps of their own, of stale.py and replicas.py |
| asynchronous, coordinator, mailbox.py | servers that wait for nobody; L-BFGS on shards; their messages |
| compression | fewer bytes |
"""

"""From a call to the wire: schedule -> program -> plan -> persistent requests.

| file | holds |
|---|---|
| plan_cache.py | plans that are kept, and their keys; what short calls take instead |
| plan_moves.py, plan_reductions.py | the arguments of collectives that move, and that reduce |
| buffers.py | what mpi4py takes as a buffer |
| planner.py | which algorithm, its program, its memory |
| custom_schedules.py | schedules of the caller's: simulated first |
| nonblocking.py | Iallreduce and its kin; Allreduce_init and its kin |

Programs and plans are in executor/, plans in memory that ranks share in node_memory/plans.py.
"""

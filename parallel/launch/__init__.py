"""Starting ranks and ending them.

| file | holds |
|---|---|
| launcher.py | mpiexec and its ranks, none of which is ever left behind |
| processes.py | finding the processes of a job, and ending them |
| notebook.py, notebook_rank.py | %%mpi: a notebook cell on ranks, and what a rank does with it |
"""

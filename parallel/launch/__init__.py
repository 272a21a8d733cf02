"""Starting ranks and ending them.

| file | holds |
|---|---|
| launcher.py | mpiexec and its ranks, none of which is ever left behind |
| limits.py | cores and memory that containers and Slurm leave to this process |
| blas.py | threads and kernels of NumPy's products |
| processes.py | finding the processes of a job, and ending them |
| start_rank.py | the program that starts a rank and leaves a file for the launcher |
| notebook.py | %%mpi: a notebook cell on ranks |
| notebook_session.py | the ranks of a cell, or of many |
| notebook_rank.py | what a rank does with cells |
| notebook_output.py | what ranks print and draw, side by side |
"""

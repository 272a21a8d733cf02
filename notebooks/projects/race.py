"""Race your data parallelism against ringprop's: mpirun -n 2 python -m mpi4py race.py

Both train the same network on the same samples, in alternating runs; the median step of each counts.
"""

import statistics
import time
from itertools import pairwise

import numpy as np
from data_parallel import DataParallel
from mpi4py import MPI
from network import Network
from threadpoolctl import threadpool_limits

import nn
from collectives import Communicator
from parallel import DistributedDataParallel

SIZES, SAMPLES, ROUNDS, STEPS = (256, 512, 512, 10), 64, 7, 10

if __name__ == "__main__":
    communicator = Communicator(MPI.COMM_WORLD)
    draw = np.random.default_rng(communicator.rank)
    x, labels = draw.normal(size=(SAMPLES, SIZES[0])), draw.integers(0, SIZES[-1], SAMPLES)
    layers = [each for a, b in pairwise(SIZES) for each in (nn.Linear(a, b), nn.Tanh())][:-1]
    network = nn.Network(nn.Sequential(*layers), (SIZES[0],), dtype=np.float64)
    ours = DistributedDataParallel(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1), communicator)
    yours = DataParallel(Network(SIZES), communicator, bucket=100_000)
    racers = {
        "yours": lambda: yours.step(x, labels),
        "ringprop": lambda: ours.step(x, labels, SAMPLES * communicator.size),
    }
    seconds = {name: [] for name in racers}
    with threadpool_limits(1, user_api="blas"):
        for _ in range(ROUNDS):
            for name, step in racers.items():
                communicator.Barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    step()
                seconds[name].append((time.perf_counter() - start) / STEPS)
    if communicator.rank == 0:
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        for name, each in medians.items():
            print(f"{name:9} {1e3 * each:.2f} ms a step")
        print(f"yours takes {medians['yours'] / medians['ringprop']:.2f} times as long")
    ours.close()
    communicator.release()

"""Project 1, solved."""

import numpy as np
from network import Network, cross_entropy


class DataParallel:
    def __init__(self, network: Network, communicator, rate: float = 0.1, bucket: int = 1000):
        self.network, self.communicator, self.rate, self.bucket = network, communicator, rate, bucket
        self.g = np.zeros_like(network.w)
        communicator.Bcast(network.w, root=0)

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        count, total = np.array([float(len(x))]), np.empty(1)
        self.communicator.Allreduce(count, total)
        self.g[:] = 0
        arrays = self.network.forward(x)
        loss, gy = cross_entropy(arrays[-1], labels, int(total[0]))
        requests, begin = [], len(self.g)  # the bucket that is being filled ends where the one before it begins
        for lo, _ in self.network.backward(self.g, arrays, gy):
            if begin - lo >= self.bucket or not lo:
                bucket = self.g[lo:begin]
                requests.append(self.communicator.Iallreduce(bucket.copy(), bucket))
                begin = lo
        for request in requests:
            request.Wait()
        self.network.w -= self.rate * self.g
        losses = np.empty(1)
        self.communicator.Allreduce(np.array([loss]), losses)
        return float(losses[0])

"""Compressed gradients: fewer bytes between ranks, at the price of noise or delay.

    trainer = DistributedDataParallel(network, loss, SGD(0.1), communicator, compressor=parse("topk:0.01"))

| method | file | a gradient in a message | keeps |
|---|---|---|---|
| none | dense.py | itself | |
| fp16 | half.py | 16 bits | |
| qsgd:levels | quantization.py | log2(2 levels + 1) bits | |
| terngrad | quantization.py | 1.6 bits | |
| onebit, signsgd | signs.py | 1 bit | error |
| topk:ratio, threshold:limit | sparsification.py | value and 16 bits, for those that are sent | error |
| dgc:ratio | sparsification.py | the same | momentum u, velocity v |
| powersgd:rank | low_rank.py | rank (rows + columns) numbers a matrix | error, Q |

base.py has what they share, compressed.py the sums, packing.py and wire.py the messages.
"""

from __future__ import annotations

from parallel.sync.compression.base import Compressor, parse
from parallel.sync.compression.dense import Dense
from parallel.sync.compression.half import Half
from parallel.sync.compression.low_rank import PowerSGD
from parallel.sync.compression.quantization import QSGD, TernGrad
from parallel.sync.compression.signs import OneBit, SignSGD
from parallel.sync.compression.sparsification import DGC, Threshold, TopK

__all__ = [
    "DGC",
    "QSGD",
    "Compressor",
    "Dense",
    "Half",
    "OneBit",
    "PowerSGD",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "parse",
]

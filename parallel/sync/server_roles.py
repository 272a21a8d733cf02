"""The roles of ranks around parameter servers: who computes, who serves, and which slice each server has."""

from __future__ import annotations

from parallel.sync.base import GradientSync
from parallel.sync.compression.base import Compressor, check_compressor
from parallel.sync.compression.compressed import CompressedReduceScatter, Memories
from parallel.sync.push_pull import roles, server_slices


class ServerRoles(GradientSync):
    """Ranks that are workers, servers, or both; served.py and asynchronous/served.py say what these do.

    Parameters
    ----------
    size : int
        Ranks.
    servers, place
        As for push_pull.roles.
    compressor : Compressor or None
        Of what is pushed; not attached yet, one with messages of single ranks.

    Attributes
    ----------
    workers, hosts : sequences of int
        Ranks that compute, and that serve.
    is_worker, is_server : bool
        Whether this rank computes, and whether it serves.
    slices : list of (lo, hi)
        Of every server in a vector of the parameters and, behind them, the running statistics.
    shares : list of slice
        The same, of the parameters alone.
    regions : list of Region
        What is in the shares.
    own_slice : slice
        Of this server, in the parameters.
    pushes : int
        How often this rank has pushed.
    """

    def __init__(self, size: int, servers: int, place: str, compressor: Compressor | None = None):
        check_compressor(compressor)
        self.workers, self.hosts = roles(size, servers, place)
        self.place, self.compressor = place, compressor

    def divide_parameters(self) -> None:
        """Give every server a slice of `layout`, the whole network's."""
        layout, mesh = self.layout, self.mesh
        self.is_worker, self.is_server = mesh.index is not None, mesh.rank in self.hosts
        self.slices = server_slices(layout.size + self.undivided.buffer_layout.size, len(self.hosts))
        self.shares = [slice(lo, max(lo, min(hi, layout.size))) for lo, hi in self.slices]
        self.regions = [layout.region(share.start, share.stop) for share in self.shares]
        self.pushes = 0
        if self.is_server:
            self.own_slice = self.shares[self.hosts.index(mesh.rank)]

    def _allocate_pieces(self, maximum) -> None:
        """Make the coded pieces; `maximum` as for Compressor.encode."""
        mesh, self.memories, self.pieces = self.mesh, None, None
        compressor = self.compressor
        mesh.agree({"compression": repr(compressor)})
        if compressor:
            compressor.check_messages(len(self.hosts))
            compressor.check(self.optimizer)
            arguments = self.regions, self.hosts, self.workers, self.dtype, self.seed, maximum
            self.pieces = CompressedReduceScatter(mesh.communicator, compressor, *arguments)
            sends = mesh.rank in self.workers
            flat = {name: self.layout.zeros(self.dtype) if sends else None for name in compressor.memories}
            for encoder, share in zip(self.pieces.encoders, self.shares if sends else (), strict=True):
                encoder.memory = {name: memory[share] for name, memory in flat.items()}
            self.memories = Memories(mesh, self.layout, flat, {})

    def set_epoch_steps(self, steps):
        if self.pieces:
            self.pieces.set_epoch_steps(steps)

    def bytes_sent(self):
        if not self.pieces:
            return {}
        sent = self.mesh.communicator.allreduce(self.pieces.sent) / len(self.workers) / max(1, self.pushes)
        pairs = sum(host != worker for worker in self.workers for host in self.hosts)
        whole = self.layout.size * self.dtype.itemsize
        return {"bytes_sent": sent, "bytes_dense": whole * pairs / (len(self.hosts) * len(self.workers))}

    def describe(self):
        one, own = len(self.hosts) == 1, self.hosts[0] not in self.workers
        place = ("on a rank of its own" if one else "on ranks of their own") if own else "on workers"
        servers = "1 parameter server" if one else f"{len(self.hosts)} parameter servers"
        workers = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        how = f"; pushed as {self.compressor!r}" if self.compressor else ""
        return f"{workers}, {servers} {place}, {self.slices[0][1]:,} values each{how}"

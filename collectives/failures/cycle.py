"""Who waits for whom, in a circle."""


def find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """A cycle of the graph rank -> ranks it waits for, the first rank repeated at the end; [] where there is none."""
    waiting = dict(waits)
    while ends := [r for r, peers in waiting.items() if not any(p in waiting for p in peers)]:
        for r in ends:
            del waiting[r]
    if not waiting:
        return []
    path = [min(waiting)]  # each waits for another one of them, so that this walk must return to itself
    while True:
        peer = next(p for p in waiting[path[-1]] if p in waiting)
        if peer in path:
            return path[path.index(peer) :] + [peer]
        path.append(peer)

"""Who waits for whom, in a circle."""


def find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """A cycle of the graph rank -> ranks it waits for, the first rank repeated at the end; [] where there is none."""
    left = dict(waits)
    while ends := [r for r, peers in left.items() if not any(p in left for p in peers)]:
        for r in ends:
            del left[r]
    if not left:
        return []
    path = [min(left)]  # every rank left waits for another one left, so that this walk must return to itself
    while True:
        peer = next(p for p in left[path[-1]] if p in left)
        if peer in path:
            return path[path.index(peer) :] + [peer]
        path.append(peer)

"""Run schedules on SimGrid's flow model: /usr/bin/python3 simgrid_replay.py < cases.json > seconds.json

A program of its own, for the Python that Debian's python3-simgrid belongs to; it imports nothing of this project. A
case holds the channels of a network, the routes between hosts, and what every rank sends and receives in each round:

    {"channels": [[bandwidth, latency], ...], "routes": [[source, dest, [channel, ...]], ...],
     "ranks": [[[["send", peer, bytes], ["recv", peer]], ...rounds], ...]}

SimGrid's plain fluid model shares links max-min fairly where all latencies of competing routes are equal. Its
corrections for TCP are switched off. Messages start as soon as they are sent; those from one rank to another go one
after the other.
"""

import json
import os
import sys


def replay(case):
    """Seconds until the last rank has finished."""
    from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone

    options = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0"]
    engine = Engine(["replay", *(f"--cfg={option}" for option in options), "--log=root.thresh:critical"])
    zone = NetZone.create_full_zone("network")
    ranks = case["ranks"]
    hosts = [zone.create_host(f"h{i}", 1e12).seal() for i in range(len(ranks))]
    channels = [
        zone.create_link(f"c{i}", bandwidth).set_latency(latency).seal()
        for i, (bandwidth, latency) in enumerate(case["channels"])
    ]
    for source, dest, numbers in case["routes"]:
        links = [LinkInRoute(channels[i]) for i in numbers]
        zone.add_route(hosts[source].netpoint, hosts[dest].netpoint, None, None, links, False)
    zone.seal()

    def connection(rank, peer):
        return Mailbox.by_name(f"{rank}-{peer}")

    def one_after_the_other(rank, peer, sizes):
        for nbytes in sizes:
            connection(rank, peer).put("", nbytes)

    def run(rank):
        for peer in {step[1] for steps in ranks[rank] for step in steps if step[0] == "recv"}:
            connection(peer, rank).set_receiver(Actor.self())  # messages need not wait for their receive
        for steps in ranks[rank]:
            sizes, waits, joins = {}, [], []
            for kind, peer, *nbytes in steps:
                if kind == "send":
                    sizes.setdefault(peer, []).extend(nbytes)
            for peer, all_sizes in sizes.items():
                if len(all_sizes) == 1:
                    waits.append(connection(rank, peer).put_async("", all_sizes[0]))
                else:
                    joins.append(Actor.create("connection", hosts[rank], one_after_the_other, rank, peer, all_sizes))
            kept = []  # what has been received must outlive its wait
            for kind, peer, *_ in steps:
                if kind == "recv":
                    comm, data = connection(peer, rank).get_async()
                    waits.append(comm)
                    kept.append(data)
            for comm in waits:
                comm.wait()
            for actor in joins:
                actor.join()

    for rank, host in enumerate(hosts):
        Actor.create(f"rank {rank}", host, run, rank)
    engine.run()
    return Engine.clock if not callable(Engine.clock) else engine.clock


def main():
    seconds = []
    for case in json.load(sys.stdin):  # an engine cannot be used twice: a process for each
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(reader)
            os.write(writer, json.dumps(replay(case)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as result:
            text = result.read()
        os.wait()
        seconds.append(json.loads(text) if text else None)
    json.dump(seconds, sys.stdout)


if __name__ == "__main__":
    main()

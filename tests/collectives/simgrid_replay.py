"""Run schedules on SimGrid's flow model: /usr/bin/python3 simgrid_replay.py < cases.json > seconds.json

A program of its own, for the Python that Debian's python3-simgrid belongs to; it imports nothing of this project. A
case holds the channels of a network, the routes between hosts, and what every rank sends and receives in each round:

    {"channels": [[bandwidth, latency], ...], "routes": [[source, dest, [channel, ...], latency], ...],
     "ranks": [[[["send", peer, bytes], ["recv", peer]], ...rounds], ...]}

SimGrid's plain fluid model, with its corrections for TCP switched off. It shares channels max-min fairly where all
latencies of competing routes are equal, else by their reciprocals; its sender waits until the message has arrived, and
so does the next message of the same two ranks. LogGP's sender goes on when the message has left. So latencies may be
given twice: those of channels are SimGrid's own; that of a route is added here, at the receiver.
"""

import json
import os
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor


def replay(case):
    """Seconds until the last rank has finished."""
    options = ["network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0"]
    # SimGrid 3.32 otherwise divides only what has changed, and with latencies gives more than a channel has: three
    # messages half of it each (double_tree, 8 ranks, 3 MiB on a star).
    options += ["network/optim:Full"]
    # Its clock otherwise joins what is less than a nanosecond apart. Where messages share channels, such a difference
    # doubles from round to round: 4e-4 after the 63 of a pairwise reduce-scatter on a dragonfly, 1e-10 with this.
    options += ["surf/precision:1e-12"]
    engine = Engine(["replay", *(f"--cfg={option}" for option in options), "--log=root.thresh:critical"])
    zone = NetZone.create_full_zone("network")
    ranks = case["ranks"]
    hosts = [zone.create_host(f"h{i}", 1e12).seal() for i in range(len(ranks))]
    channels = [
        zone.create_link(f"c{i}", bandwidth).set_latency(latency).seal()
        for i, (bandwidth, latency) in enumerate(case["channels"])
    ]
    latencies = {}
    for source, dest, numbers, latency in case["routes"]:
        links = [LinkInRoute(channels[i]) for i in numbers]
        zone.add_route(hosts[source].netpoint, hosts[dest].netpoint, None, None, links, False)
        latencies[source, dest] = latency
    zone.seal()

    def connection(rank, peer):
        return Mailbox.by_name(f"{rank}-{peer}")

    def one_after_the_other(rank, peer, sizes):
        for nbytes in sizes:
            connection(rank, peer).put("", nbytes)

    def run(rank):
        for steps in ranks[rank]:
            sizes, sends, joins = {}, [], []
            for kind, peer, *nbytes in steps:
                if kind == "send":
                    sizes.setdefault(peer, []).extend(nbytes)
            for peer, all_sizes in sizes.items():
                if len(all_sizes) == 1:
                    sends.append(connection(rank, peer).put_async("", all_sizes[0]))
                else:
                    joins.append(Actor.create("connection", hosts[rank], one_after_the_other, rank, peer, all_sizes))
            receives = [
                (*connection(peer, rank).get_async(), latencies[peer, rank])
                for kind, peer, *_ in steps
                if kind == "recv"
            ]
            there = 0.0
            for comm, _data, latency in receives:  # the data must outlive the wait
                comm.wait()
                there = max(there, comm.finish_time + latency)
            for comm in sends:
                comm.wait()
            for actor in joins:
                actor.join()
            this_actor.sleep_until(there)

    for rank, host in enumerate(hosts):
        actor = Actor.create(f"rank {rank}", host, run, rank)
        for peer in {step[1] for steps in ranks[rank] for step in steps if step[0] == "recv"}:
            connection(peer, rank).set_receiver(actor)  # messages need not wait for their receive
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

"""The lab of several hosts: what runs in it sees hosts and slow cables, and nothing of it stays behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

from collectives.pricing.networks import Network

ROOT = Path(__file__).parents[2]
NETLAB = ROOT / "scripts" / "netlab.py"
sys.path.insert(0, str(NETLAB.parent))
import netlab  # noqa: E402

MPIEXEC = Path(sys.executable).with_name("mpiexec")
needs_a_lab = pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against()))
needs_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")


def lab(*arguments, **options):
    command = [sys.executable, str(NETLAB), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **options)


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


@needs_a_lab
def test_hosts_have_names_addresses_and_nothing_stays(disk_path):
    before = interfaces(), Path("/proc/mounts").read_text(), os.uname().nodename
    script = """
        hostname; cat $NETLAB/hosts
        for h in h1 h2 h3; do
            $NETLAB/agent -x $h 'hostname; getent hosts h3; ls /dev/shm; touch /dev/shm/$(hostname); echo $$'
        done
        exit 7
    """
    done = lab("run", "--hosts", 3, "--slots", 2, "--", "sh", "-c", script)
    assert done.returncode == 7, done.stderr
    lines = done.stdout.split("\n")
    assert lines[:4] == ["head", "h1 slots=2", "h2 slots=2", "h3 slots=2"]
    for i in range(3):
        name, address, shared, pid = lines[4 + 4 * i : 8 + 4 * i]
        assert name == f"h{i + 1}" and address.split() == ["10.77.0.3", "h3"]
        assert shared == "netlab", "sees what others put into its memory file system"
        assert int(pid) < 100  # processes of its own
    assert before == (interfaces(), Path("/proc/mounts").read_text(), os.uname().nodename)


SINK = """
import socket, sys, threading
server = socket.create_server(("", 7000))
print("up", flush=True)
for senders in map(int, sys.argv[1:]):
    clients = [server.accept()[0] for _ in range(senders)]
    def drain(client):
        client.send(b"!")
        while client.recv(1 << 16):
            pass
        client.send(b"!")
    threads = [threading.Thread(target=drain, args=[client]) for client in clients]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
"""
SEND = """
import socket, time
client = socket.create_connection(("h2", 7000), 60)
client.recv(1)
start = time.monotonic()
client.sendall(bytes(4_000_000)), client.shutdown(socket.SHUT_WR), client.recv(1)
print(time.monotonic() - start)
"""
HEAD = """
import os, subprocess, sys
netlab, sink, send = sys.argv[1:]
def on(host, *command):
    agent, line = os.environ["NETLAB"] + "/agent", " ".join([sys.executable, *command])
    return subprocess.Popen([agent, host, line], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
ALONE, BOTH = ["h1"], ["h1", "h3"]
receiver = on("h2", sink, "1", "1", "1", "1", "1", "2")
receiver.stdout.readline()
for turns in (5 * [ALONE], [BOTH]):
    print(min(max(float(s.communicate()[0]) for s in [on(host, send) for host in hosts]) for hosts in turns))
receiver.wait()
subprocess.run([sys.executable, netlab, "cut", "h3"], check=True)
print(on("h3", "-c", "'import socket; socket.create_connection((chr(104) + chr(50), 22), 0.3)'").communicate()[1][-30:])
subprocess.run([sys.executable, netlab, "crash", "h1"], check=True)
print(on("h1", "-V").wait())
"""


@needs_a_lab
def test_cables_have_their_rate_and_can_be_cut(disk_path):
    """4 MB at 80 Mbit/s take 0.4 s; what h1 and h3 send to h2 at once shares the cable of h2 and takes twice that.

    The quickest of five: on a busy machine some are late.
    """
    for name, text in (("sink", SINK), ("send", SEND), ("head", HEAD)):
        (disk_path / f"{name}.py").write_text(text)
    files = [disk_path / f"{name}.py" for name in ("head", "sink", "send")]
    files.insert(1, NETLAB)
    done = lab("run", "--hosts", 3, "--rate", "80mbit", "--", sys.executable, *files)
    assert done.returncode == 0, done.stderr
    one, both, cut, crashed = done.stdout.splitlines()
    assert float(one) > 0.39 and float(both) > 0.75 and float(one) < 0.75 * float(both), (one, both)
    assert "timed out" in cut or "No route" in cut
    assert int(crashed) != 0


OVER_THE_TRUNK = """
import os, subprocess, sys
from pathlib import Path
sink, send = sys.argv[1:]
def on(host, *command):
    agent, line = os.environ["NETLAB"] + "/agent", " ".join([sys.executable, *command])
    return subprocess.Popen([agent, host, line], stdout=subprocess.PIPE)
def carried():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return next(int(words[9]) for words in lines if words[0] == "trunk1:")  # bytes sent
receivers = [on(host, sink, *turns) for host, turns in (("h2", "1"), ("h3", "1"), ("h4", "11"))]
for receiver in receivers:
    receiver.stdout.readline()
for pairs in ([("h1", "h2")], [("h1", "h4")], [("h2", "h3"), ("h1", "h4")]):
    before = carried()
    senders = [on(source, send, dest) for source, dest in pairs]
    times = [tuple(map(float, sender.communicate()[0].split())) for sender in senders]
    print(max(end for start, end in times) - min(start for start, end in times), carried() - before)
"""


@needs_a_lab
def test_a_trunk_is_shared(disk_path):
    """4 MB at 80 Mbit/s take 0.4 s on one switch, over a trunk of 20 Mbit/s 1.6 s, and two at once 3.2.

    A busy machine makes that longer, nothing makes it shorter: the time of two counts from the start of the first to
    the end of the last. What crossed the trunk is counted.
    """
    send = SEND.replace('"h2"', "sys.argv[1]").replace("import socket", "import sys, socket")
    files = {"sink": SINK, "send": send.replace("print(time.monotonic() - start)", "print(start, time.monotonic())")}
    for name, text in (files | {"head": OVER_THE_TRUNK}).items():
        (disk_path / f"{name}.py").write_text(text)
    files = [disk_path / f"{name}.py" for name in ("head", "sink", "send")]
    done = lab("run", "--hosts", 4, "--rate", "80mbit", "--trunk", "20mbit", "--", sys.executable, *files)
    assert done.returncode == 0, done.stderr
    times, carried = zip(*(map(float, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert times[0] > 0.39 and times[1] > 1.55 and times[2] > 3.1, times
    assert carried[0] < 1e6 and 4e6 < carried[1] < 5e6 and 8e6 < carried[2] < 10e6, carried
    for wrong in (["--trunk", "much"], ["--trunk", "1mbit", "--hosts", 1]):
        assert "--trunk" in lab("run", *wrong, "--", "true").stderr


@needs_a_lab
def test_the_head_is_found_where_it_was_when_hosts_have_crashed():
    """With another hardware address hosts would look for it at the old one, for a minute."""
    script = "ip -brief link show switch; for h in h1 h2 h3 h3; do $0 $1 crash $h; done; ip -brief link show switch"
    done = lab("run", "--hosts", 3, "--", "sh", "-c", script, sys.executable, NETLAB)
    before, after = done.stdout.splitlines()
    assert done.returncode == 0 and before.split()[2] == after.split()[2], done.stdout + done.stderr
    assert "netlab: no host h3 here, or it has crashed" in done.stderr and "Traceback" not in done.stderr


@needs_a_lab
@needs_mpi
def test_ranks_run_across_hosts():
    program = """
        import json, socket
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        told = world.gather((socket.gethostname(), node.Get_size(), world.allreduce(world.Get_rank())))
        if world.Get_rank() == 0:
            print(json.dumps(told))
    """
    command = [MPIEXEC, "-n", 4, "--map-by", "node", sys.executable, "-m", "mpi4py", "-c", textwrap.dedent(program)]
    done = lab("run", "--hosts", 2, "--slots", 2, "--", *command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["h1", 2, 6], ["h2", 2, 6], ["h1", 2, 6], ["h2", 2, 6]]


@needs_a_lab
@needs_mpi
@pytest.mark.exhaustive
def test_measured_between_hosts(disk_path):
    """A cable of 80 Mbit/s takes 100 ns a byte (beyond a burst of 13 KB), far more than memory inside a host."""
    program = """
        import sys
        from mpi4py import MPI
        from collectives.pricing.measure import measure_network
        for _ in range(10):  # on a busy machine some measurements find less; after a pause a burst finds more
            network = MPI.COMM_WORLD.bcast(measure_network(MPI.COMM_WORLD, sizes=(8, 1 << 18, 1 << 20), seconds=0.1))
            if 0.7e-7 < network.between.beta < 1.5e-7:
                break
        if MPI.COMM_WORLD.Get_rank() == 0:
            network.save(sys.argv[1])
    """
    (disk_path / "program.py").write_text(textwrap.dedent(program))
    ranks = [MPIEXEC, "-n", 3, sys.executable, "-m", "mpi4py", disk_path / "program.py", disk_path / "network.json"]
    done = lab("run", "--hosts", 2, "--slots", 2, "--rate", "80mbit", "--", *ranks)
    assert done.returncode == 0, done.stderr
    network = Network.load(disk_path / "network.json")
    assert network.ranks_per_node == 2
    assert 0.7e-7 < network.between.beta < 1.5e-7
    assert network.between.beta > 20 * network.inside.beta


@needs_a_lab
def test_nothing_stays_after_a_kill(disk_path):
    mark = f"{97_000 + os.getpid() % 1000}.{time.time_ns() % 10**6}"  # seconds to sleep, found in command lines
    script = f"$NETLAB/agent h1 'sleep {mark}' & $NETLAB/agent h2 'sleep {mark}' & touch {disk_path}/up; wait"
    before = interfaces()
    process = subprocess.Popen([sys.executable, str(NETLAB), "run", "--hosts", "2", "--", "sh", "-c", script])

    def alive():
        found = 0
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += file.read_bytes() == f"sleep\0{mark}\0".encode()
            except OSError:
                continue
        return found

    deadline = time.monotonic() + PATIENCE
    while alive() < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive() == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    while alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive() == 0 and interfaces() == before


@needs_a_lab
def test_a_command_that_takes_too_long_or_is_not_there():
    done = lab("run", "--hosts", 1, "--timeout", 0.3, "--", "sleep", "60")
    assert done.returncode == 124 and "ended after 0.3 s" in done.stderr
    done = lab("run", "--hosts", 1, "--", "no-such-program")
    assert done.returncode == 127 and "no-such-program: No such file" in done.stderr


def test_refusals_are_clear(monkeypatch, capsys):
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="netlab: needs root"):
        netlab.main(["run", "--", "true"])
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(SystemExit, match=r"netlab: needs tc \(packages iproute2"):
        netlab.main(["run", "--", "true"])
    with pytest.raises(SystemExit):
        netlab.main(["run", "--rate", "100", "--", "true"])
    assert "--rate 100: expected a number above 0 and kbit, mbit or gbit" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no host h1 here"):
        netlab.main(["crash", "h1"])

#!/usr/bin/env python3
"""Several hosts on one Linux machine: names, addresses and slow links of their own, to run MPI across.

    netlab.py run --hosts 4 --rate 400mbit -- mpiexec -n 4 python -m mpi4py program.py
    netlab.py run --hosts 4 --rate 400mbit --trunk 100mbit -- ...
    netlab.py run --hosts 2 --slots 2 -- sh -c 'mpiexec -n 4 ...; cat $NETLAB/hosts'
    netlab.py crash h2            within a lab: kill all of a host at once
    netlab.py cut h2              within a lab: pull its network cable

A host is a set of Linux namespaces: network, host name, processes, shared memory. All hosts hang on a switch, each by
a cable of the given rate in both directions. With --trunk the second half of them has a switch of its own, and a trunk
of that rate leads to the first. The command runs on the head, which is on the switch too; mpiexec (of Open
MPI, or hydra of MPICH) finds the hosts in its environment and starts ranks on them through an agent in place of ssh.

All of it lives below one process that is the first of a process namespace. When that ends (with the command, with
netlab.py, by SIGKILL), the kernel ends every process and takes back every interface and every file: nothing is ever
made outside. Needs root, iproute2 and util-linux. Up in 0.2 to 0.4 s.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

SUBNET = "10.77.0."
HEAD = 254  # the address of the head in the subnet; host i has address i
MAC = "02:00:0a:4d:00:fe"  # of the head: a bridge without one of its own has a port's, and another when that host dies
STATE = Path("/dev/shm/netlab")  # within a lab only, where head and hosts each have a /dev/shm of their own
RATE = re.compile(r"(\d*[1-9]\d*(?:\.\d+)?)([kmg])bit")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
LATE, LEAST_BURST = 1.3e-3, 8 << 10  # seconds, bytes: what the token bucket of a cable holds, at least a packet
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
AGENT = """#!/bin/sh
# Called as ssh is: agent [-options] HOST COMMAND...
while :; do case "$1" in -*) shift;; *) break;; esac; done
host=$1; shift
pid=$(cat {state}/$host.pid) || exit 255
exec nsenter -t "$pid" -n -u -i -m -p --wd="$PWD" sh -c "$*"
"""


def main(argv=None) -> int:
    options = parse(argv)
    if options.verb == "run":
        return run(options)
    if options.verb == "inside":
        return inside(options)
    if not (pid := STATE / f"{options.host}.pid").exists():
        raise SystemExit(
            f"netlab: no host {options.host} here, or it has crashed: crash and cut work within a lab, on its head"
        )
    if options.verb == "crash":
        number = int(pid.read_text())
        pid.unlink()  # another process may get the number
        os.kill(number, signal.SIGKILL)
    else:
        shell(f"ip link set port{options.host[1:]} down")
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("run", "inside"):  # inside: what run starts in the new namespaces
        sub = verbs.add_parser(
            verb, help="bring up a lab, run a command in it, take it down" if verb == "run" else None
        )
        sub.add_argument("--hosts", type=int, default=4)
        sub.add_argument("--slots", type=int, default=1, help="ranks per host (default 1)")
        sub.add_argument(
            "--rate", default="400mbit", help="of each cable, each way: kbit, mbit, gbit (default 400mbit)"
        )
        sub.add_argument("--trunk", help="two switches with half of the hosts each, joined by a trunk of this rate")
        sub.add_argument("--timeout", type=float, default=300, help="seconds until the command is ended (default 300)")
        sub.add_argument("command", nargs="+", help="after --")
    for verb, does in (("crash", "kill all of a host at once"), ("cut", "pull the cable of a host")):
        verbs.add_parser(verb, help=does).add_argument("host")
    options = parser.parse_args(argv)
    if options.verb == "run" and not (1 <= options.hosts < HEAD and options.slots >= 1):
        parser.error(f"need 1 to {HEAD - 1} hosts and at least one slot")
    for name in ("rate", "trunk") if options.verb == "run" else ():
        if (rate := getattr(options, name)) and not RATE.fullmatch(rate):
            parser.error(f"--{name} {rate}: expected a number above 0 and kbit, mbit or gbit, such as 400mbit")
    if options.verb == "run" and options.trunk and options.hosts < 2:
        parser.error("--trunk needs at least 2 hosts, one on each of its switches")
    return options


# ------------------------------------------------------------------------------------------------ from outside


def reason_against() -> str | None:
    """What this machine lacks for a lab; None if nothing."""
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "needs root: namespaces, interfaces and their rates are made"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux, hostname)"
    probe = (
        "ip link add port0 type veth peer name port1 && tc qdisc add dev port0 root tbf rate 1mbit burst 8kb limit 8kb"
    )
    done = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "sh", "-c", probe], capture_output=True, text=True
    )
    if done.returncode:
        return f"this kernel or container does not let namespaces and interfaces be made: {done.stderr.strip()}"
    return None


def run(options) -> int:
    """Start `inside` as the first process of new namespaces; it dies with us, and all of the lab with it."""
    if reason := reason_against():
        raise SystemExit(f"netlab: {reason}")
    unshare = ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc"]
    again = [sys.executable, os.path.abspath(__file__), "inside", "--hosts", str(options.hosts)]
    again += ["--slots", str(options.slots), "--rate", options.rate, "--timeout", str(options.timeout)]
    again += ["--trunk", options.trunk] if options.trunk else []
    libc = ctypes.CDLL(None)  # loaded here: little is safe between fork and exec
    process = subprocess.Popen(
        [*unshare, *again, "--", *options.command], preexec_fn=lambda: libc.prctl(1, signal.SIGKILL)
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------------------------ from inside


def inside(options) -> int:
    """Build the lab, run the command on the head."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # the first process ignores what it does not handle
    shell(f"mount -t tmpfs shm /dev/shm; mkdir {STATE}; hostname head; ip link set lo up")
    hosts = [f"h{i}" for i in range(1, options.hosts + 1)]
    names = [f"127.0.0.1 localhost\n{SUBNET}{HEAD} head\n"]
    names += [f"{SUBNET}{i} {host}\n" for i, host in enumerate(hosts, 1)]
    (STATE / "names").write_text("".join(names))
    (STATE / "hosts").write_text("".join(f"{host} slots={options.slots}\n" for host in hosts))
    (STATE / "hosts.hydra").write_text("".join(f"{host}:{options.slots}\n" for host in hosts))
    (STATE / "agent").write_text(AGENT.format(state=STATE))
    (STATE / "agent").chmod(0o755)
    shell(
        f"mount --bind {STATE}/names /etc/hosts;"
        f"ip link add switch address {MAC} type bridge; ip addr add {SUBNET}{HEAD}/24 dev switch; ip link set switch up"
    )
    if options.trunk:
        shell(
            "ip link add switch2 type bridge; ip link set switch2 up;"
            "ip link add trunk1 type veth peer name trunk2;"
            "ip link set trunk1 master switch up; ip link set trunk2 master switch2 up"
        )
        for device in ("trunk1", "trunk2"):
            shape("", device, options.trunk)
    for i, host in enumerate(hosts, 1):
        second = options.trunk and i > (len(hosts) + 1) // 2
        start_host(i, host, options.rate, "switch2" if second else "switch")
    # How ranks are mapped on one machine (one core each, or more than there are) is not how they are mapped on hosts.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PRTE_MCA_", "OMPI_MCA_"))}
    environment = outside | mpi_environment()
    try:
        code = subprocess.run(options.command, env=environment, timeout=options.timeout).returncode
    except subprocess.TimeoutExpired:
        print(f"netlab: the command was ended after {options.timeout:g} s", file=sys.stderr)
        code = 124
    except OSError as error:
        print(f"netlab: {options.command[0]}: {error.strerror}", file=sys.stderr)
        code = 127
    return code if code >= 0 else 128 - code


def start_host(i, host, rate, switch="switch"):
    """A process that does nothing in namespaces of its own, and a cable from there to the switch."""
    # Its own /dev/shm hides the lab's, but the agent and the list of hosts must be where they were: bound by ".".
    setup = f"""cd {STATE} && mount -t tmpfs shm /dev/shm && mkdir {STATE} && mount -c --bind . {STATE} &&
                hostname {host} && ip link set lo up && echo up; cd /; sleep infinity & wait"""
    namespaces = ["unshare", "-n", "-u", "-i", "-m", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", setup]
    outer = subprocess.Popen(namespaces, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if outer.stdout.readline() != "up\n":
        raise SystemExit(f"netlab: host {host} did not start")
    pid = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
    (STATE / f"{host}.pid").write_text(str(pid))
    within = f"nsenter -t {pid} -n"
    # BBR, where that is the machine's own, paces itself below the rate of so short a cable.
    shell(f"{within} sh -c 'echo reno > /proc/sys/net/ipv4/tcp_congestion_control'")
    shell(
        f"ip link add port{i} type veth peer name eth0 netns {pid}; ip link set port{i} master {switch} up;"
        f"{within} ip addr add {SUBNET}{i}/24 dev eth0; {within} ip link set eth0 up"
    )
    # Both ends are shaped, so that several senders to one host share its rate too.
    for prefix, device in ((within, "eth0"), ("", f"port{i}")):
        shape(prefix, device, rate)


def shape(prefix, device, rate):
    """Give what leaves over a device a rate: `prefix` enters the namespace that it is in.

    The token bucket holds what a busy core may be late by, and no more: what it saves up while ranks compute goes in no
    time, which no cable does. The queue holds what is in flight, so that nothing is lost and sent again.
    """
    number, unit = RATE.fullmatch(rate).groups()
    burst = max(LEAST_BURST, round(float(number) * UNITS[unit] / 8 * LATE))
    shell(
        f"{prefix} ip link set {device} gso_max_size 6000;"
        f"{prefix} tc qdisc add dev {device} root tbf rate {rate} burst {burst} limit 4mb"
    )


def mpi_environment() -> dict[str, str]:
    """What makes mpiexec start ranks on the hosts, and talk over their cables only."""
    agent, subnet = str(STATE / "agent"), f"{SUBNET}0/24"
    settings = {
        "NETLAB": str(STATE),
        "TMPDIR": "/dev/shm",  # the hosts share /tmp, and their daemons have equal process numbers
        # Open MPI
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_prte_default_hostfile": str(STATE / "hosts"),
        "PRTE_MCA_prte_if_include": subnet,
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # or every host binds its first rank to the same core
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,sm,self",
        "OMPI_MCA_btl_tcp_if_include": subnet,
        "OMPI_MCA_btl_tcp_sndbuf": "131072",  # or queues of 80 ms build up at the switch
        "OMPI_MCA_btl_tcp_rcvbuf": "131072",
        "OMPI_MCA_btl_tcp_links": "2",  # or exchanges in pairs run in one direction at a time
        "OMPI_MCA_mpi_yield_when_idle": "1",  # or 8 ms of latency where ranks outnumber cores
        "OMPI_MCA_coll": "^han",  # which swallows errors of fault tolerance
        # MPICH
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_HOST_FILE": str(STATE / "hosts.hydra"),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    for who in ("OMPI", "PRTE"):
        settings |= {f"{who}_ALLOW_RUN_AS_ROOT": "1", f"{who}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return settings


def shell(commands):
    done = subprocess.run(["sh", "-ec", commands], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"netlab: {done.stderr.strip() or done.stdout.strip()} (in: {commands})")


if __name__ == "__main__":
    sys.exit(main())

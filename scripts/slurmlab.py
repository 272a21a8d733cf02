#!/usr/bin/env python3
"""A Slurm cluster on one Linux machine: a controller, and nodes that are the hosts of a lab (netlab.py).

    slurmlab.py run --hosts 2 -- sbatch --wait scripts/slurm/many_nodes.sbatch --epochs 2
    slurmlab.py run --hosts 2 -- sh -c 'sinfo; srun --mpi=list; srun -N 2 hostname'
    slurmlab.py run --hosts 2 -- bash       a shell on the head, for sbatch, squeue, scancel
    netlab.py crash h2                      within a lab: a node fails

The command runs on the head, as root. Jobs see files as the machine has them; only /dev/shm is of a node alone. Nodes
are said to have --cpus cores each, however many there are: what is tried here is how jobs start, end and go on, not how
fast they are.

Slurm's files (configuration, key, state, logs: /etc/slurm/*.log) lie in a memory file system that only the lab sees,
and its daemons are among the lab's processes: with the lab all of it ends (netlab.py says how), and nothing of the
machine's own /etc/slurm is read or changed. Needs root and Debian's packages slurm-wlm and munge. Up in 2 s.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import netlab

HOME = Path("/etc/slurm")  # within a lab the memory file system: head and hosts see the same one
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
STARTING = 60.0  # seconds in which all nodes must be there
POLL = 0.1  # seconds between two looks
OF_HOSTS = re.compile(r"(PRTE_MCA|OMPI_MCA|HYDRA)_")  # netlab's, for ranks on all hosts: here Slurm places them
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: seconds that a job waits that goes back into the queue (on a cluster 120, unless set).
AuthInfo=socket={home}/munge.socket,cred_expire=5
# Seconds between two looks at the queue (60 unless set).
SchedulerParameters=sched_interval=1
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
# Each node has a /dev/shm of its own: where two nodes would share the directory of their sockets, steps fail.
SlurmdSpoolDir=/dev/shm/slurmd
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmdLogFile={home}/%n.log
SlurmdTimeout=10
# Neither control groups nor cores are handed out: a lab has no more than the machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=h[1-{hosts}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def main(argv=None) -> int:
    options = parse(argv)
    return run(options) if options.verb == "run" else inside(options)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("run", "inside"):  # inside: what run starts on the head of the lab
        sub = verbs.add_parser(verb, help="bring up a cluster, run a command on its head" if verb == "run" else None)
        sub.add_argument("--hosts", type=int, default=2, help="nodes (default 2)")
        sub.add_argument("--cpus", type=int, default=16, help="cores that a node is said to have (default 16)")
        sub.add_argument("--rate", default="1gbit", help="of each node's cable: kbit, mbit, gbit (default 1gbit)")
        sub.add_argument("--timeout", type=float, default=3600, help="seconds until all is ended (default 3600)")
        sub.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(argv)
    if options.cpus < 1:
        parser.error(f"--cpus {options.cpus}: a node has at least one")
    return options


# ------------------------------------------------------------------------------------------------ from outside


def reason_against() -> str | None:
    """What this machine lacks for a cluster, in a sentence; None if nothing."""
    if reason := netlab.reason_against():
        return reason
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (Debian's packages slurm-wlm and munge)"
    if not HOME.is_dir():
        return f"needs a Slurm that reads {HOME}, as that of Debian's package slurm-wlm does"
    return None


def run(options):
    """Become the lab, with a memory file system over /etc/slurm that head and hosts share."""
    if reason := reason_against():
        raise SystemExit(f"slurmlab: {reason}")
    lab = [sys.executable, netlab.__file__, "run", "--hosts", options.hosts, "--rate", options.rate]
    again = [sys.executable, os.path.abspath(__file__), "inside", "--hosts", options.hosts, "--cpus", options.cpus]
    command = [*lab, "--timeout", options.timeout, "--", *again, "--", *options.command]
    mount = f'mount -t tmpfs slurmlab {HOME}; exec "$@"'
    os.execvp("unshare", ["unshare", "-m", "sh", "-ec", mount, "sh", *map(str, command)])


# ------------------------------------------------------------------------------------------------ from inside


def inside(options) -> int:
    """Start the daemons, wait for all nodes, run the command; the lab ends with this process."""
    (HOME / "state").mkdir()
    key = HOME / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    words = {"home": HOME, "head": f"{netlab.SUBNET}{netlab.HEAD}", "hosts": options.hosts, "cpus": options.cpus}
    (HOME / "slurm.conf").write_text(CONFIGURATION.format(**words))
    (HOME / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
    # One for all: its socket is a file.
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    daemon("munged", "--force", *(f"--{option}={HOME}/munge.{ending}" for option, ending in files.items()))
    daemon("slurmctld")
    hosts = [f"h{i}" for i in range(1, options.hosts + 1)]
    for host in hosts:
        daemon(netlab.STATE / "agent", host, f"slurmd -N {host}")
    wait_for(hosts)
    try:
        code = subprocess.run(options.command, env=environment()).returncode
    except OSError as error:
        print(f"slurmlab: {options.command[0]}: {error.strerror}", file=sys.stderr)
        code = 127
    return code if code >= 0 else 128 - code


def environment() -> dict[str, str]:
    """What a user of a cluster has, and jobs inherit: nothing that tells MPI where to start ranks.

    The command `module` loads nothing: this machine's MPI library is where programs are looked for. It is a file, as
    not every shell passes functions on.
    """
    module = HOME / "bin" / "module"
    module.parent.mkdir()
    module.write_text("#!/bin/sh\n")
    module.chmod(0o755)
    function = "BASH_FUNC_module%%"  # the machine's own
    mine = {name: value for name, value in os.environ.items() if not OF_HOSTS.match(name) and name != function}
    # There are more ranks than cores, which neither Slurm nor the MPI library knows.
    path = f"{module.parent}{os.pathsep}{mine.get('PATH', os.defpath)}"
    return mine | {"PATH": path, "OMPI_MCA_mpi_yield_when_idle": "1"}


def daemon(*command):
    """Start a program that goes on by itself."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"slurmlab: {Path(command[0]).name}: {(done.stderr or done.stdout).strip()}")


def wait_for(hosts):
    """Return when all nodes can take jobs."""
    end = time.monotonic() + STARTING
    while (seen := nodes()) != dict.fromkeys(hosts, "idle"):
        if time.monotonic() > end:
            logs = [line for log in sorted(HOME.glob("*.log")) for line in log.read_text().splitlines()[-5:]]
            raise SystemExit("\n".join([f"slurmlab: nodes are not there after {STARTING:g} s: {seen}", *logs]))
        time.sleep(POLL)


def nodes() -> dict[str, str]:
    """Name and state of each node; nothing while the controller does not answer."""
    asked = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], capture_output=True, text=True)
    return dict(line.split() for line in asked.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())

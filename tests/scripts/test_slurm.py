"""The templates for Slurm, as bash runs them, with programs in place of srun, scontrol and Python."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

TEMPLATES = Path(__file__).parents[2] / "scripts/slurm"
# In place of Python: what train.py does when it is told to end, if the file "endless" is there.
TRAIN = """#!/bin/bash
echo "$@" >> called
trap 'touch saved; exit 143' TERM
out=$(grep -oE -- '--(out|resume) [^ ]+' <<< "$*" | tail -1 | cut -d' ' -f2)
mkdir -p "$out/checkpoints"; touch "$out/checkpoints/manifest.json" begun
while [ -e endless ]; do sleep 0.05; done
exit "$(cat status)"
"""
FAKES = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "$@" >> scontrolled\n',
}


@pytest.fixture
def submit(tmp_path):
    """A function that starts a template as Slurm does, as job 7."""
    for name, text in FAKES.items() | {(".venv/bin/python", TRAIN), (".venv-site/bin/python", TRAIN)}:
        file = tmp_path / (name if "/" in name else f"bin/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "status").write_text("0")
    # a function that reads an unset variable, as some sites' do
    environment = {"BASH_FUNC_module%%": '() { [ -z "$NEVER_SET" ]; }'}
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}

    def start(template):
        command = ["bash", TEMPLATES / template, "--model", "lenet5"]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | environment, start_new_session=True)

    return start


def begin_endless(directory, submit, template):
    """A job that trains until it is told to end."""
    (directory / "endless").touch()
    job = submit(template)
    end = time.monotonic() + PATIENCE
    while not (directory / "begun").exists():
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.01)
    return job


@pytest.mark.parametrize("template", ["one_node.sbatch", "many_nodes.sbatch"])
def test_a_job_at_its_time_limit_saves_goes_back_and_continues(tmp_path, submit, template):
    job = begin_endless(tmp_path, submit, template)
    if "B:USR1" in (TEMPLATES / template).read_text():
        job.send_signal(signal.SIGUSR1)  # to the script
    else:  # to the steps
        for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
    assert job.wait(PATIENCE) == 143 and (tmp_path / "saved").exists()
    assert (tmp_path / "scontrolled").read_text() == "requeue 7\n"
    (tmp_path / "endless").unlink()
    assert submit(template).wait(PATIENCE) == 0
    first, second = (tmp_path / "called").read_text().splitlines()
    assert first.endswith("--model lenet5 --out runs/slurm-7")
    assert second.endswith("--model lenet5 --resume runs/slurm-7")
    assert (tmp_path / "scontrolled").read_text() == "requeue 7\n", "a job that is done does not go back"


def test_a_cancelled_job_saves_and_does_not_go_back(tmp_path, submit):
    job = begin_endless(tmp_path, submit, "one_node.sbatch")
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE) == 143 and (tmp_path / "saved").exists() and not (tmp_path / "scontrolled").exists()


@pytest.mark.parametrize("template", ["one_node.sbatch", "many_nodes.sbatch"])
def test_directives_are_options_and_nothing_else_also_without_a_hash(template):
    lines = [line for line in (TEMPLATES / template).read_text().splitlines() if line.lstrip("#").startswith("SBATCH")]
    assert sum(line.startswith("##") for line in lines) == 3
    for line in lines:
        assert re.fullmatch(r"##?SBATCH --[a-z-]+(=\S+)?", line), line


@pytest.mark.parametrize("template", ["one_node.sbatch", "many_nodes.sbatch"])
def test_a_job_that_fails_does_not_go_back(tmp_path, submit, template):
    (tmp_path / "status").write_text("1")
    assert submit(template).wait(PATIENCE) == 1 and not (tmp_path / "scontrolled").exists()

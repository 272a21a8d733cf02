"""The package as it is installed: a wheel with its command and scripts, types, and a word where others hide it.

python tests/test_installed.py      write parallel/__init__.pyi, what type checkers read of its public names
"""

import argparse
import configparser
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import PATIENCE

import parallel
import ringprop
from parallel.command import commands

ROOT = Path(__file__).parents[1]
SOURCES = (
    "nn",
    "collectives",
    "parallel",
    "scripts",
    "ringprop.py",
    "pytest_ringprop.py",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


STUB = ROOT / "parallel" / "__init__.pyi"
HEAD = '"""The public names for type checkers; `__init__.py` imports each when it is first used."""\n\n'


def stub() -> str:
    """A line for every public name of `parallel`, in the order that ruff has."""
    modules = {name: getattr(parallel, name).__module__ for name in parallel.__all__}
    names = sorted((module, 2 - name.isupper() - name[0].isupper(), name) for name, module in modules.items())
    return HEAD + "".join(f"from {module} import {name} as {name}\n" for module, _, name in names)


def call(*command, cwd=ROOT, status=0, **environment):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, capture_output=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"} | {name: str(value) for name, value in environment.items()},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def test_a_wheel_has_all_that_it_takes_to_train(tmp_path):
    """Built from the sources, installed elsewhere, used from a third place."""
    pytest.importorskip("setuptools")
    source, place, here = (tmp_path / name for name in ("source", "place", "here"))
    source.mkdir()
    here.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    call(sys.executable, "-c", build, tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("ringprop-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("nn/py.typed", "parallel/py.typed", "parallel/__init__.pyi", "nn/data/digits.npz", "ringprop.py"):
        assert wanted in names
    plugin = next(name for name in names if name.endswith("entry_points.txt"))
    assert "[pytest11]\npytest_ringprop = pytest_ringprop" in zipfile.ZipFile(wheel).read(plugin).decode()
    assert {"pytest_ringprop.py", "parallel/testing/plugin.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "scripts", "notebooks"))]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(*pip, "--no-deps", "--no-index", "--no-compile", "--target", place, wheel)
    command, python = (sys.executable, place / "bin" / "ringprop"), {"PYTHONPATH": place}
    said = call(*command, "--help", cwd=here, **python)
    assert {"train", "bench", "data", "report", "sample", "predict"} <= set(re.findall(r"^  ([\w-]+)", said, re.M))
    options = ("--model", "mlp:64,10", "--epochs", "1", "--limit", "60", "--no-pictures", "--out", "run")
    plan = ("mlp:64,10", "--input", "8,8,1", "--ranks", "2", "--network", "gigabit")
    assert "\n    ringprop train --model mlp:64,10 " in call(*command, "estimate", *plan, cwd=here, **python)
    said = call(*command, "train", *options, cwd=here, **python)
    assert "ringprop train --resume run --epochs 11" in said, "how to go on"
    assert (here / "run" / "network.npz").exists()
    environment = json.loads((here / "run" / "environment.json").read_text())
    assert environment["command"] == f"ringprop train {' '.join(options)}"
    call(*command, "report", "run", cwd=here, **python)
    (here / "data_parallel.py").write_text("")
    said = call(*command, "grade", "data_parallel", ".", cwd=here, status=2, **python)
    assert "graders are in the source tree, not in an installed package" in said
    where = "import nn, parallel, collectives; print(nn.__file__, parallel.__file__, collectives.__file__)"
    said = call(sys.executable, "-c", where, cwd=here, **python)
    assert said.count(str(place)) == 3, "control: it is not the checkout that was used"


def test_the_image_has_all_that_the_wheel_is_made_of():
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "containers/Dockerfile").read_text(), re.MULTILINE)
    assert sorted(name for names in copied for name in names.split()) == sorted(SOURCES)
    files = (ROOT / "containers/ringprop.def").read_text().partition("%files\n")[2].partition("\n\n")[0]
    assert [line.split() for line in files.splitlines()] == [
        [name, f"/src/{name}"] for names in copied for name in names.split()
    ]


def test_the_recipe_for_spack_wants_what_the_wheel_wants():
    """Version and least versions of containers/spack are those of setup.cfg."""
    setup, recipe = configparser.ConfigParser(), (ROOT / "containers/spack/packages/py-ringprop/package.py").read_text()
    setup.read(ROOT / "setup.cfg")
    wanted = dict(line.split(">=") for line in setup["options"]["install_requires"].split())
    wanted["python"] = setup["options"]["python_requires"].removeprefix(">=")
    given = {name.removeprefix("py-"): least for name, least in re.findall(r'depends_on\("(\S+)@(\S+):"', recipe)}
    assert given.pop("setuptools") in (ROOT / "pyproject.toml").read_text()
    given["pillow"] = given.pop("pil")
    assert given == wanted
    assert f'version("{setup["metadata"]["version"]}")' in recipe


def test_the_command_finds_what_is_there(capsys, tmp_path, monkeypatch):
    assert commands.main([]) == 2
    said = capsys.readouterr().out
    for name, file in commands.COMMANDS.items():
        assert (f"\n  {name} " in said) == (ROOT / "scripts" / file).exists(), name
    assert "..." not in said and "scripts/" not in said, "whole sentences, of what is installed"
    assert commands.main(["--version"]) == 0
    assert re.match(r"ringprop \d+\.\d+\.\d+", capsys.readouterr().out)
    assert commands.main(["trian"]) == 2
    assert "no command 'trian': did you mean train?" in capsys.readouterr().err
    (tmp_path / "entry_point.py").write_text("")
    (tmp_path / "train.py").write_text('"""Trains."""\nimport sys\nsys.exit(len(sys.argv))\n')
    monkeypatch.setattr(commands, "places", lambda: [tmp_path / "none", tmp_path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RINGPROP_COMMAND", "")
    (tmp_path / "supervise.py").write_text('"""Supervises."""\n')
    assert commands.main(["supervise"]) == 0
    assert not os.environ["RINGPROP_COMMAND"], "what it starts says how it was called itself"
    (tmp_path / "supervise.py").unlink()
    assert commands.there() == {"train": tmp_path / "train.py"}
    assert commands.main(["report"]) == 2
    assert "its script is not installed here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        commands.main(["train", "--epochs", "2"])
    assert end.value.code == 3 and ringprop.main is not commands.main
    assert os.environ["RINGPROP_COMMAND"] == "ringprop train"


def test_a_reader_that_leaves_is_no_error():
    """`ringprop --help | true`, with a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ringprop", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("name", ["estimate", "report", "predict", "sample", "bench", "workload", "grade"])
def test_ctrl_c_ends_a_command_without_a_traceback(name, monkeypatch):
    """As a script and by `ringprop`, at the first thing that it does; `train` and `data` have tests of their own."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    script = str(ROOT / "scripts" / commands.COMMANDS[name])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupted)
    monkeypatch.setattr(sys, "path", [os.path.dirname(script), *sys.path])
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 130
    monkeypatch.setattr(commands, "main", interrupted)
    assert ringprop.main() == 130


@pytest.mark.parametrize("name", ["nn", "collectives", "parallel"])
def test_what_hides_a_package_is_named(name, tmp_path):
    """A file of the user's with that name comes first: the script and the command both say so, in one line."""
    (tmp_path / f"{name}.py").write_text("")
    (here := tmp_path / "here").mkdir()
    scripts = ROOT / "scripts"
    programs = [(scripts / "train.py", "--help"), ("-m", "ringprop", "train", "--help"), (scripts / "estimate.py",)]
    for program in [*programs, *[(scripts / "workload.py",)] * (name == "nn")]:
        said = call(sys.executable, *program, cwd=here, status=2, PYTHONPATH=tmp_path)
        assert said.startswith(f"error: {tmp_path / name}.py hides ringprop's {name}") and said.count("\n") == 1, said
    (directory := tmp_path / "directories" / name).mkdir(parents=True)  # without an __init__.py, it is joined
    train = [sys.executable, str(scripts / "train.py"), "--epochs", "0", "--out", str(tmp_path / "run")]
    env = os.environ | {"PYTHONPATH": str(directory.parent)}
    done = subprocess.run(train, cwd=here, env=env, timeout=PATIENCE, text=True, capture_output=True, check=False)
    hidden = done.stderr.startswith(f"error: {directory} hides ringprop's {name}") and done.returncode == 2
    assert hidden or done.returncode == 0, done.stderr  # how the project is installed decides which comes first
    package = tmp_path / "other" / "nn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    said = call(sys.executable, "-c", "import parallel", cwd=here, status=1, PYTHONPATH=tmp_path / "other")
    assert f"{package}/__init__.py hides ringprop's nn, which is in {ROOT}" in said


def test_type_checkers_see_the_names_that_are_there():
    assert STUB.read_text() == stub(), "run: python tests/test_installed.py"
    for package in ("nn", "collectives", "parallel"):
        assert (ROOT / package / "py.typed").exists()


if __name__ == "__main__":
    STUB.write_text(stub())

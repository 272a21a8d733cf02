"""Wrong options are refused before any rank is started: in one message, with status 2, however the run is started."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE

from parallel.command import main, run_directory
from parallel.command.factory import prepare
from parallel.command.options import FIELDS, TYPES, Options
from parallel.command.parsing import parse
from parallel.command.rules import check_directory, check_started
from parallel.launch import launcher
from parallel.settings import OptionError, flag

ROOT = Path(__file__).parents[2]
TEXT = "--data stdlib --model transformer:8,2,1"
# (command line after --ranks 4, what is said of it): each can be known wrong without ranks.
WRONG = [
    ("--model mpl:64,10", "did you mean 'mlp'"),
    ("--model mlp:65,10", "expected 64"),
    ("--model transformer", "transformer takes sequences of ids"),
    ("--tensorboard {file}.npz/board", "--tensorboard {file}.npz/board: {file}.npz is a file, no directory"),
    ("--data dgits", "no data set 'dgits'; known: digits"),
    ("--data {file}.npz", "not an .npz file; expected the arrays x_train"),
    ("--data=", "--data must not be empty: leave it out"),
    ("--model mlp --data stdlib", "--model mlp takes numbers, and stdlib holds ids: use --model transformer"),
    ("--model encoder:8,2 --data {floats} --loss mse", "only sequences of ids can be masked"),
    ("--model transformer:8,2 --data {floats} --loss mse", "takes ids, and {floats} holds numbers: use --model mlp"),
    ("epochs 3", "no option 'epochs': did you mean --epochs?"),
    ("foo", "no option 'foo' (--help"),
    ("--learning-rate 1", "no option '--learning-rate' (--help"),
    ("--config {file}.toml", "no option '--epoch': did you mean --epochs?"),
    ("--config {file}.npz", "{file}.npz is not TOML (Expected '=' after a key"),
    ("--config {floats}", "{floats} is not TOML ('utf-8' codec can't decode"),
    ("--config {table}.toml", "options stand in no table: leave out [train]"),
    ("--accumulate 33", "--accumulate must be at most the 32 samples of --batch, given 33"),
    ("--reproducible 64", "--reproducible must be at most the 32 samples of --batch, given 64"),
    ("--data mnist --data-dir nowhere", "get_data.py mnist --data-dir nowhere"),
    ("--length 5", "--length has no effect with --data digits: leave it out, or use stdlib"),
    ("--mask 0.5", "--mask: cnn predicts the next byte"),
    ("--activation sigmoyd", "did you mean 'sigmoid'"),
    ("--init hee", "did you mean 'he'"),
    (
        f"{TEXT} --mesh context=4 --context ulysses --length 8",
        "use --context ring, --context ring:2,ulysses:2, or a mul",
    ),
    (
        f"{TEXT} --mesh context=2,tensor=2 --context ulysses",
        "2 ranks of the axis context for each of 2 of tensor evenly",
    ),
    (f"{TEXT} --mesh context=4 --length 3", "use at most 3 ranks on the axis context"),
    (f"{TEXT} --mesh context=2,tensor=2 --tensor sequence --length 3", "use longer sequences, or --tensor pairs"),
    (f"{TEXT} --mesh context=3", "each axis needs one of 1, 2, 4 ranks, and all of them multiplied 4"),
    (f"{TEXT} --mesh context=4 --context ring:3", "use ring:1,ulysses:4, ring:2,ulysses:2, ring:4,ulysses:1"),
    (f"{TEXT} --mesh context=4 --context rings", 'is "ring", "ulysses", or both'),
    (f"{TEXT} --context ulysses", "--context ulysses needs an axis: use --mesh context=2"),
    (f"{TEXT} --mesh context=2,space=2", "the axes space and context cannot be combined"),
    (f"{TEXT} --mesh context=2,pipeline=2 --strategy local-sgd", "--strategy local-sgd has no axis context"),
    (f"{TEXT} --mesh context=2,pipeline=2 --pipeline pipedream", "leave out --mesh data, expert, context, tensor"),
    (f"{TEXT} --mesh context=4 --reproducible 4", "--reproducible cannot be combined with --mesh context=4"),
    ("--data stdlib --model lstm:8 --mesh context=4", "only attention may look at those of other ranks"),
    ("--mesh context=4", "an axis context cuts sequences (T,) or (T, features)"),
    ("--loss mse", "the targets of digits are classes: use cross-entropy"),
    ("--nesterov --lr 0.1", "nesterov needs a momentum above 0"),
    ("--clip norm:-1", "ClipNorm: limit must be in (0, inf), given -1"),
    ("--augment crip:4", "unknown part 'crip:4'; expected crop:PIXELS"),
    ("--augment crop:0", "unknown part 'crop:0'; expected crop:PIXELS"),
    ("--augment crop:8", "shifted by 8 pixels nothing is left of an image of 8 x 8"),
    ("--augment crop:99 --data stdlib --model transformer", "RandomCrop: expects images"),
    ("--augment flip --data stdlib --model transformer", "RandomFlip: expects images"),
    ("--schedule cosin", "unknown schedule 'cosin'"),
    ("--schedule cosine --linear-scaling 16 --epochs 5", "5 epochs of warm-up leave none of 5"),
    (
        "--schedule cosine --epochs 0",
        "its length is that of training, which has 0 epochs: use at least one, or no schedule",
    ),
    ("--schedule plateau:metric=los", "no metric 'los'; use metric=loss, validation_loss, validation_accuracy"),
    ("--schedule plateau --validation 0", "no metric 'validation_loss' without validation data (--validation 0); use"),
    ("--patience 3 --validation 0", "--patience chooses by validation data, and --validation 0 holds none out"),
    ("--validation 1437", "of 1,437 training samples 1,437 cannot be held out for validation"),
    ("--validation 1.5", "a fraction above 0 and below 1, or a number of samples, given 1.5"),
    ("--validation -0.1", "--validation must be at least 0 and finite, given -0.1"),
    ("--linear-scaling 16 --schedule cosine:base_batch=8", "say the same: leave one out"),
    ("--sync-batch-norm", "cnn has no batch normalisation"),
    ("--from /nowhere", "--from /nowhere: No such file or directory"),
    ("--from setup.cfg", "--from setup.cfg: File is not a zip file"),
    ("--freeze 99", "--freeze 99: rates: no parameter of cnn is called '99'"),
    ("--clip value:0", "--clip value:0: ClipValue: limit must be"),
    ("--schedule step:every=0", "--schedule step:every=0: learning rate 'step:every=0': Step: every must be"),
    ("--strategy local-sgd:x", "--strategy local-sgd:x: every must be a whole number, given 'x'"),
    ("--strategy ps --consistency ssp:x", "--consistency ssp:x: bound must be a whole number, given 'x'"),
    ("--freeze 0,2,", "--freeze 0,2,: expected names of layers with commas between, such as 0,2"),
    ("--freeze ,", "--freeze ,: expected names of layers"),
    ("--rates =0.5", "--rates =0.5: expected LAYER=FACTOR"),
    ("--batch 3", "a global batch of 3 samples cannot be cut among 4 ranks"),
    ("--batch 2 --strategy ps", "a global batch of 2 samples cannot be cut among 3 ranks"),
    ("--batch 3 --strategy dp", "cannot be cut among 4 ranks"),
    ("--ranks 1000000", "cannot be cut among 1000000 ranks"),
    ("--strategy ps --servers 4", "room for at most 3 beside one worker"),
    ("--strategy ps --servers 5 --server-place workers", "room for at most 4 among the workers"),
    ("--allreduce rung", "no allreduce algorithm 'rung': there are auto"),
    ("--compress foo", "unknown compressor 'foo': known are dgc, fp16, none"),
    ("--compress fp16:3", "what is '3'? fp16 takes nothing"),
    ("--compress qsgd:x", "levels must be a whole number, given 'x'"),
    ("--compress qsgd:0", "levels must be 1 to 32767, given 0"),
    ("--compress dgc:0.1,clip=1 --strategy ps --servers 2", "dgc: clip=1 is for the norm of the whole gradient"),
    ("--compress topk:2", "topk: the ratio must be above 0 and at most 1"),
    ("--compress topk:0.1,foo=3", "topk takes ratio=NUMBER"),
    ("--compress threshold:-1", "the limit must not be negative"),
    ("--compress powersgd:0", "the rank must be at least 1"),
    ("--compress powersgd:2 --strategy ps", "its factors are sums over all ranks; use --strategy ddp"),
    ("--compress dgc:0.01 --momentum 0.9", "dgc has the momentum itself (0.9)"),
    ("--compress dgc:0.01 --optimizer adam", "use SGD, RMSprop or LARS with momentum 0"),
    ("--compress dgc:0.01,momentum=2", "momentum must be in [0, 1), given 2.0"),
    (
        "--compress topk:0.1 --strategy fsdp",
        "--compress topk:0.1 cannot be combined with --strategy fsdp: a method keeps",
    ),
    ("--compress topk:0.1 --reproducible 4", "--reproducible cannot be combined with --compress"),
    ("--offload {file} --strategy fsdp", "is a file, no directory"),
    ("--offload {file}/below --strategy zero1", "is a file, no directory"),
    ("--reproducible 3", "3 virtual shards for 4 ranks: 1 would have nothing to do"),
    ("--reproducible 2 --strategy ps", "2 virtual shards for 3 ranks"),
    ("--reproducible 4 --strategy fsdp --clip global:1", "needs norms of whole tensors"),
    ("--reproducible 4 --strategy zero1 --optimizer lars", "needs norms of whole tensors"),
    ("--reproducible 4 --strategy ps --servers 2 --clip norm:1", "needs norms of whole tensors"),
    ("--out {file}", "is a file, no directory"),
    ("--resume {list}", "config.json holds no options"),
    ("--resume {text}", "config.json: lr must be a number, given 'x'"),
    ("--resume {cut}", "manifest.json is not JSON"),
    ("--resume {odd}", "manifest.json: format None, but this ringprop reads 1"),
    ("--resume {unknown}", "config.json: no option '--momentun': did you mean --momentum?"),
    ("--resume {changed}", "config.json has --lr 0.1, but that run was made with 0.001: put that back"),
    ("--resume {dropped}", "config.json has --clip None, but that run was made with norm:1: put that back"),
    ("--resume {added}", "config.json has --seed 7, but that run was made with 0: put that back"),
    ("--resume {facts}", "manifest.json: facts must be an object, given [1]"),
    ("--out {run}", "already holds a run: continue it with --resume"),
    ("--resume {best}", "no checkpoint was saved there; start again"),
    ("--resume {begun}", "no checkpoint was saved there; start again"),
    ("--find-lr --resume {run}", "--find-lr tries rates on a network that has not learned yet"),
    ("--lr -1", "--lr must be above 0 and finite, given -1.0 (--help lists the options)"),
    ("--allreduce ring --node-memory on", "--allreduce ring has no effect with --node-memory on where all ranks share"),
    ("--lr 0", "--lr must be above 0 and finite, given 0.0"),
    ("--batch 99999999999999999999", "--batch must be at most 9,223,372,036,854,775,807, given 99999999999999999999"),
    ("--threads 100000", "--threads must be at most 1,024, given 100000"),
    ("--out /proc/ringprop", "--out /proc/ringprop: nothing can be written into /proc"),
    ("--out /proc/self/ringprop/run", "nothing can be written into /proc/self"),
    ("--strategy fsdp --offload /proc/ringprop", "--offload /proc/ringprop: nothing can be written into /proc"),
    ("--model mlp:64,99999999999,10", "parameters and their gradients take 55,879 GiB, and there are"),
    ("--model mlp:64,9999999999999999999999,10", "parameters and their gradients take"),
    ("--model transformer:128,4,1000000000 --data stdlib", "transformer has at most 1000 blocks, given 1000000000"),
    ("--strategy pps", "--strategy pps: expected one of ddp"),
]
# What the environment says: variable, value, words.
SURROUNDINGS = [
    ("RINGPROP_WATCH", "abc", "RINGPROP_WATCH=abc in the environment: expected seconds"),
    ("RINGPROP_WATCH", "nan", "RINGPROP_WATCH=nan in the environment: expected seconds"),
    ("RINGPROP_ALLREDUCE", "nosuch", "RINGPROP_ALLREDUCE in the environment: no allreduce algorithm 'nosuch'"),
    ("RINGPROP_SCAN", "nosuch", "RINGPROP_SCAN in the environment: no scan algorithm 'nosuch'"),
    ("RINGPROP_TUNE", "/nowhere/table.json", "/nowhere/table.json: no table of algorithms"),
    ("OMPI_COMM_WORLD_RANK", "x", "OMPI_COMM_WORLD_RANK=x in the environment: expected a whole number"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "x", "OMPI_COMM_WORLD_LOCAL_SIZE=x in the environment"),
]


MANIFEST = '{"format": 1, "checkpoints": [{"file": "step-1.npz", "sha256": "", "named": false}]}'
NUMBERS = [name for name in FIELDS if TYPES[name] in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range(name):
    wrong = ["-1", "-3"] if TYPES[name] is int else ["-1", "-1e-3", "-.5", "nan", "inf", "-inf", "1e999"]
    for value in wrong:
        with pytest.raises(OptionError, match=rf"^{flag(name)} must be .*, given {TYPES[name](value)} \(--help"):
            parse([flag(name), value])


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A file, the directory of a run, and that of one that was ended before it saved anything."""
    where = tmp_path_factory.mktemp("places")
    (where / "file").write_text("")
    (where / "file.npz").write_text("hello")
    (where / "file.toml").write_text("epoch = 3")
    (where / "table.toml").write_text("[train]\nepochs = 3")
    x, y = np.zeros((40, 3)), np.zeros(40)
    np.savez(where / "floats.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for name in ("run", "begun"):
        (where / name / "checkpoints").mkdir(parents=True)
        (where / name / "config.json").write_text("{}")
    made = MANIFEST[:-1] + ', "facts": %s}'
    broken = {
        "list": ("[]", "{}"), "text": ('{"lr": "x"}', "{}"), "cut": ("{}", "{"), "odd": ("{}", "[]"),
        "unknown": ('{"lr": 0.1, "momentun": 0.9}', "{}"), "facts": ("{}", made % "[1]"),
        "changed": ('{"lr": 0.1, "epochs": 3}', made % '{"lr": 0.001}'), "dropped": ("{}", made % '{"clip": "norm:1"}'),
        "best": ("{}", '{"format": 1, "checkpoints": [{"file": "best.npz", "sha256": "", "named": true}]}'),
        "added": ('{"seed": 7}', made % '{"lr": 0.1}'),
    }  # fmt: skip
    for name, (config, manifest) in broken.items():
        (where / name / "checkpoints").mkdir(parents=True)
        (where / name / "config.json").write_text(config)
        (where / name / "checkpoints" / "manifest.json").write_text(manifest)
    (where / "run" / "checkpoints" / "manifest.json").write_text(MANIFEST)
    names = "file", "table", "run", "begun", *broken
    return {name: str(where / name) for name in names} | {"floats": str(where / "floats.npz")}


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_no_rank_is_started_for_a_wrong_option(line, words, places, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    out = [] if "--out" in line or "--resume" in line else ["--out", str(tmp_path / "run")]
    assert main.main(["--ranks", "4", *out, *line.format(**places).split()]) == main.WRONG_OPTION
    said, words = capsys.readouterr(), words.format(**places)
    assert said.err.startswith("error: ") and said.err.count("error: ") == 1 and words in said.err and not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value", "words"), SURROUNDINGS)
def test_no_rank_is_started_in_wrong_surroundings(name, value, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setenv(name, value)
    assert main.main(["--ranks", "2", "--out", str(tmp_path / "run")]) == main.WRONG_OPTION
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {words}") and said.err.count("\n") == 1 and not said.out


def test_a_variable_that_another_launcher_has_left_is_named(monkeypatch):
    for name in (*launcher.processes.RANK, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(OptionError, match=r"^--ranks 2, but PMI_RANK=0 in the environment .* or unset PMI_RANK if"):
        check_started(Options(ranks=2), 1)
    check_started(Options(ranks=2), 2)


def test_a_directory_that_must_not_be_written_into_is_refused(tmp_path, monkeypatch):
    """As root there is none."""

    def denied(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    check_directory("--out", str(tmp_path / "a" / "b"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    with pytest.raises(OptionError, match=rf"^--out {tmp_path}/a/b: nothing .* into {tmp_path} \(Permission denied\)$"):
        check_directory("--out", str(tmp_path / "a" / "b"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--strategy ps", "needs ranks for workers and servers"),
        ("--compress fp16", "one process sends"),
        ("--strategy fsdp --offload there", "one process has no shards"),
    ],
)
def test_what_one_process_cannot_do(line, words):
    with pytest.raises(OptionError, match=words):
        prepare(parse(line.split()))


def test_one_process_goes_on_with_what_ranks_began():
    """What only says how ranks do it has no effect; what is part of the result is refused in other words."""
    options = parse(["--strategy", "fsdp", "--offload", "there"])
    assert prepare(dataclasses.replace(options, resume="run")).network
    with pytest.raises(OptionError, match="--ranks"):
        prepare(dataclasses.replace(parse(["--compress", "fp16"]), resume="run"))


def test_what_can_be_done_is_prepared(monkeypatch, tmp_path):
    """Nothing is refused that works; and that it works is shown by the tests of each strategy."""
    started = []
    monkeypatch.setattr(main, "start_ranks", lambda options, argv: started.append(options) or 0)
    lines = (
        "--batch 4", "--batch 3 --strategy ps", "--strategy ps --servers 4 --server-place workers --batch 4",
        "--compress dgc:0.01", "--compress none", "--compress qsgd:4 --strategy ps", "--reproducible 4 --strategy fsdp",
        "--reproducible 4 --strategy zero2 --clip value:1", "--strategy fsdp --offload " + str(tmp_path / "a" / "b"),
        "--schedule plateau:metric=validation_accuracy", "--augment crop:1,flip --model mlp:64,10",
        "--allreduce doubling", "--sync-batch-norm --model resnet20", "--schedule plateau:metric=loss --validation 0",
    )  # fmt: skip
    for line in lines:
        assert main.main(["--ranks", "4", "--out", str(tmp_path / "run"), *line.split()]) == 0, line
    assert len(started) == len(lines) and not any(path.is_file() for path in tmp_path.rglob("*"))


def test_runs_of_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory.time, "strftime", lambda _: "20260102-030405")
    made = [run_directory.default_directory(Options(model="mlp:64,10")) for _ in range(3)]
    assert made == [f"runs/20260102-030405-digits-mlp-64-10{more}" for more in ("", "-2", "-3")]
    assert all(os.path.isdir(directory) for directory in made)
    monkeypatch.chdir("/proc")
    with pytest.raises(OptionError, match=r"^runs/.* cannot be made \(.*\): give another place by --out"):
        run_directory.default_directory(Options())


def test_what_is_prepared_is_of_the_options():
    options = Options(model="mlp:64,8,10", dtype="float64", optimizer="adam", lr=0.5)
    data, network, loss, optimizer = prepare(options)
    assert network.name == options.model and network.dtype == np.float64 and optimizer.lr == options.lr
    assert data.classes == 10 and repr(loss).startswith("CrossEntropyLoss")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([["--compress", "topk:2"]] * 3, "error: topk: the ratio must be above 0"),
        ([[], ["--lr", "-1"]], "error on rank 1: --lr must be above 0"),
        ([["--allreduce", "ring", "--node-memory", "on"]] * 2, "error: --allreduce ring has no effect"),
    ],
)
def test_under_mpiexec_it_is_said_once(tmp_path, ranks, words):
    """By rank 0 where all are wrong, by the one that is where the others would wait for it."""
    mpiexec = launcher.find_mpiexec()
    program = [sys.executable, "-m", "mpi4py", "scripts/train.py", "--limit", "64", "--out", str(tmp_path / "run")]
    command = [str(mpiexec)]
    for i, more in enumerate(ranks):
        command += [":"] * bool(i) + ["-n", "1", *program, *more]
    env = launcher.settings(len(ranks), mpiexec) | os.environ
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    said = (done.stdout + done.stderr).replace("\0", "")  # prterun writes one where it is signalled
    assert done.returncode == main.WRONG_OPTION and words in said and "Traceback" not in said, said
    assert sum(line.startswith("error") for line in said.splitlines()) == 1, said
    assert not (tmp_path / "run").exists()


def test_nothing_that_is_asked_before_there_are_ranks_starts_mpi():
    """It takes a second; and --watch, which is to end ranks that wait for one that does not come, begins later."""
    lines = (
        "", "--strategy owt", "--strategy tensor", "--strategy pipeline", "--pipeline pipedream:micro=4",
        "--mesh data=1,tensor=2", "--strategy ps", "--strategy downpour", "--strategy ps --consistency ssp:2",
        "--consistency stale:1", "--strategy local-sgd:4", "--strategy diloco", "--strategy easgd", "--dtype mixed",
        "--strategy sandblaster --optimizer lbfgs --server-place workers", "--strategy zero2 --reproducible 4",
        "--compress dgc:0.1", "--strategy dp", "--strategy fsdp --limit 100", "--strategy zero1 --mesh pipeline=2",
    )  # fmt: skip
    program = "import sys; from parallel.command.factory import prepare; from parallel.command.parsing import parse\n"
    for line in lines:
        asked = ["--ranks", "3" if "ps" in line or "downpour" in line else "2", *line.split()]
        program += f"prepare(parse({asked}))\nassert 'mpi4py.MPI' not in sys.modules, {line!r}\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr

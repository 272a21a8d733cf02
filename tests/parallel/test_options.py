"""Options: help by topic, at once; types from annotations; what files of earlier versions say still counts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.command import options, resuming, rules
from parallel.command.options import FIELDS, TOPICS, TYPES, Options, names_of, off_flag
from parallel.command.parsing import help_text, parse, parser
from parallel.launch.blas import THREADS
from parallel.settings import OptionError, flag
from parallel.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
# What config.json files, TOML files and manifests have: none of these names may go, all stand at the top of the file.
TODAY = """
model data data_dir limit validation normalise augment length mask activation init dtype seed epochs batch
loss label_smoothing optimizer lr momentum nesterov weight_decay clip schedule linear_scaling sync_batch_norm accumulate
patience ranks strategy allreduce node_memory overlap bucket first_bucket compress servers server_place unit prefetch
consistency delay_compensation offload reproducible check_replicas watch threads checkpoint_steps checkpoint profile
find_lr inspect timeline memory pictures out resume mesh pipeline tensor context owt elastic
memory_limit from_ freeze rates tensorboard
""".split()  # noqa: SIM905


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h(?: \[TOPIC\])?, )?(--[a-z-]+)", text, re.MULTILINE))


def test_help_answers_without_numpy_or_mpi():
    for topic in ([], ["data"], ["all"]):
        code = (
            f"import sys, parallel.command.main\ntry: parallel.command.main.main(['--help', *{topic}])\n"
            "except SystemExit as end:\n"
            "    print(end.code, [m for m in ('numpy', 'mpi4py', 'matplotlib') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
        assert done.stdout.endswith("0 []\n") and "--data" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "imported"), [("", False), ("--mesh data=2", True), ("--checkpoint async:keep=3", True)]
)
def test_threads_are_as_many_as_asked_whatever_the_options_needed(arguments, imported):
    """Without an option with keys NumPy comes after the environment is set; with one its pool is told."""
    code = (
        "import sys; from parallel.command.main import blas as b, parse, set_threads; parse(sys.argv[1:])\n"
        "print('numpy' in sys.modules); set_threads(1); import numpy, os, threadpoolctl\n"
        "print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()}, {os.environ[n] for n in b.THREADS})"
    )
    free = {name: value for name, value in os.environ.items() if name not in THREADS}
    for given, found in (({}, "{1} {'1'}"), ({"OPENBLAS_NUM_THREADS": "2"}, "{2} {'2', '1'}")):
        said = subprocess.run(
            [sys.executable, "-c", code, *arguments.split()], cwd=ROOT, env=free | given, text=True,
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        assert said.splitlines()[0] == str(imported), "control: so it is imported then"
        if not given or len(os.sched_getaffinity(0)) > 1:  # what the user has set stays; no more than there are cores
            assert said.splitlines()[1] in (found, found.replace("'2', '1'", "'1', '2'"))


def test_help_is_short_and_help_of_all_topics_is_complete():
    shared = {"--help", "--config"}
    assert flags_in(help_text("all")) == {*map(flag, FIELDS)} | shared
    everyday = flags_in(help_text()) - shared
    assert 18 <= len(everyday) <= 24 and {"--data", "--model", "--ranks", "--strategy", "--resume"} <= everyday
    assert all(f"\n  {topic} " in help_text() for topic in TOPICS), "and the list of topics"
    for topic in TOPICS:
        assert flags_in(help_text(topic)) == {*map(flag, names_of(topic))} | shared
    for name in everyday:
        metadata = FIELDS[name[2:].replace("-", "_")].metadata
        assert " ".join(metadata["help"].split())[:40] in " ".join(help_text().split())


def test_help_of_strategies_has_the_compression_that_each_declares():
    described = dict(text.split(":", 1) for text in help_text("strategies").strip().split("\n\n"))
    for name, strategy in STRATEGIES.items():
        methods = ", ".join(strategy.supports.compress)
        assert (f"--compress: {methods}\n" in described[name]) == bool(methods), name
    assert "--compress" not in described["owt"] and "--compress: none, fp16, qsgd, terngrad\n" in described["zero1"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("learnin", "no topic 'learnin': did you mean learning?; there are data, network, "),
        ("zzz", "no topic 'zzz'; there are data, network, "),
    ],
)
def test_a_topic_that_does_not_exist_is_refused(asked, words, capsys):
    for argv in (["--help", asked], [f"--help={asked}"], ["-h", asked]):
        with pytest.raises(OptionError, match=re.escape(words)):
            parse(argv)
    assert not capsys.readouterr().out


def test_ranks_other_than_the_first_say_nothing(monkeypatch, capsys):
    from parallel.command.main import main

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    for argv in (["--help"], ["-h", "data"], ["--help=all"]):
        assert main(argv) == 0
    assert not capsys.readouterr().out


def test_every_option_is_in_one_topic():
    assert sorted(name for topic in TOPICS for name in names_of(topic)) == sorted(FIELDS)
    assert set(TODAY) <= set(FIELDS)
    assert list(Options.__dataclass_fields__) == [name for topic in TOPICS for name in names_of(topic)]


def test_types_come_from_annotations():
    assert TYPES["ranks"] is int and TYPES["validation"] is float and TYPES["out"] is str and TYPES["inspect"] is bool
    assert options.plain_type(int | None) is int and options.plain_type(float) is float
    with pytest.raises(ValueError):
        options.plain_type(int | str)  # no flag could read it
    for name, kind in TYPES.items():
        assert FIELDS[name].default is None or type(FIELDS[name].default) is kind, name


def test_a_run_of_today_goes_on(tmp_path):
    """Flat keys in config.json, in any order, those of an older run missing; the facts in the manifest are flat too."""
    earlier = {"no_pictures": True, "strategy": "ps", "server_place": "own"}  # --no-pictures, dedicated today
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    found = parse(["--resume", str(tmp_path)])
    assert (found.pictures, found.server_place) == (False, "dedicated")
    old = {name: FIELDS[name].default for name in TODAY} | {"lr": 0.25, "model": "mlp:64,10", "validation": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(old))
    found = parse(["--resume", str(tmp_path), "--epochs", "31"])
    assert (found.lr, found.model, found.validation, found.epochs) == (0.25, "mlp:64,10", 0.2, 31)
    assert resuming.result_options(found) == {name: old[name] for name in TODAY if name not in resuming.FREE_ON_RESUME}
    assert dataclasses.asdict(found).keys() == set(TODAY)
    with pytest.raises(OptionError, match=r"that run has --lr 0.25, given 0.5: leave it out"):
        parse(["--resume", str(tmp_path), "--lr", "0.5"])


def test_how_positions_are_shared_goes_with_the_mesh(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"mesh": "context=2", "context": "ulysses", "ranks": 2}))
    again = ["--resume", str(tmp_path), "--ranks"]
    assert parse([*again, "2"]).context == "ulysses"
    assert parse([*again, "2", "--context", "ring"]).context == "ring"
    fewer = parse([*again, "1"])
    assert (fewer.mesh, fewer.context) == (None, "ring")


def test_a_toml_file_of_today_is_read(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text('weight-decay = 0\nlinear_scaling = 16\nstrategy = "zero1"\nnesterov = true\nmomentum = 0.9\n')
    found = parse(["--config", str(file)])
    assert (found.weight_decay, found.linear_scaling, found.strategy, found.nesterov) == (0.0, 16, "zero1", True)
    assert type(found.weight_decay) is float


def test_tables_of_rules_name_options_and_values_that_exist():
    named = {
        *rules.BETWEEN_RANKS,
        *resuming.EARLIER_DEFAULTS,
        *resuming.FREE_ON_RESUME,
        *rules.EXCLUDES,
        *rules.READ_BY,
    }
    named |= {name for others in rules.EXCLUDES.values() for name in others}
    assert named <= set(FIELDS)
    for name, (other, values) in rules.READ_BY.items():
        assert set(values) < set(FIELDS[other].metadata["choices"]), name


def test_every_switch_and_every_option_without_a_default_can_be_taken_back(tmp_path):
    """On the command line over a TOML file and the config.json of a run; there, and in the file, as no_x."""
    taken_back = [name for name in FIELDS if TYPES[name] is bool or FIELDS[name].default is None]
    assert {"elastic", "timeline", "memory", "inspect", "pictures", "mesh", "compress"} < set(taken_back)
    for name in taken_back:
        given = [flag(name)] if TYPES[name] is bool else [flag(name), {int: "3", str: "x"}[TYPES[name]]]
        found = vars(parser().parse_args([*given, off_flag(name)]))
        assert found == {name: False if TYPES[name] is bool else FIELDS[name].default}, name
        assert vars(parser().parse_args([off_flag(name), *given])) != found, "the last one counts"
    for name in set(FIELDS) - set(taken_back):
        assert not off_flag(name)
    file, run = tmp_path / "some.toml", tmp_path / "run"
    run.mkdir()
    on = {"elastic": "shrink:min=1", "timeline": True, "memory": True, "inspect": True}
    off = ["--no-elastic", "--no-timeline", "--no-memory", "--no-inspect"]
    (run / "config.json").write_text(json.dumps({"lr": 0.25, "ranks": 2} | on))
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in on.items()))
    for place in (["--config", str(file)], ["--resume", str(run)]):
        kept, dropped = parse(place), parse([*place, *off])
        assert all(getattr(kept, name) == value for name, value in on.items())
        assert not any(getattr(dropped, name) for name in on)
    file.write_text("no-elastic = true\nno_timeline = true\nno-memory = false\npictures = true\n")
    found = parse(["--resume", str(run), "--config", str(file)])
    assert (found.elastic, found.timeline, found.memory, found.pictures) == (None, False, True, True)
    assert found.inspect and parse(["--resume", str(run), "--no-resume"]).resume is None
    for text, words in (
        ("no-elastic = 1", "no_elastic must be true or false, given 1"),
        ('elastic = "shrink"\nno-elastic = true', "no_elastic and elastic contradict each other"),
    ):
        file.write_text(text)
        with pytest.raises(OptionError, match=words):
            parse(["--config", str(file)])
    with pytest.raises(OptionError, match="--seed 5"):
        (run / "config.json").write_text(json.dumps({"seed": 5}))
        parse(["--resume", str(run), "--seed", "0"])
    with pytest.raises(OptionError, match="--clip norm:1"):
        (run / "config.json").write_text(json.dumps({"clip": "norm:1"}))
        parse(["--resume", str(run), "--no-clip"])


def test_ranks_need_only_have_alike_what_their_sums_depend_on(monkeypatch):
    """A supervisor, mpiexec or a shell gives each host an environment of its own."""
    here, there = Options(), Options(out="elsewhere", ranks=4)
    monkeypatch.setenv("RINGPROP_SUPERVISED", "a")
    monkeypatch.delenv("RINGPROP_TUNE", raising=False)
    first = rules.settings(here)
    for name in ("RINGPROP_SUPERVISED", "RINGPROP_COMMAND", "RINGPROP_JOB", "RINGPROP_RECORD", "RINGPROP_DATA"):
        monkeypatch.setenv(name, "another")
    rules.check_alike([first, rules.settings(there)])
    for name in ("RINGPROP_ALLREDUCE", "RINGPROP_REDUCE_SCATTER", "RINGPROP_TUNE", "RINGPROP_WATCH"):
        with monkeypatch.context() as patch, pytest.raises(OptionError, match=f"disagree on {name}: .* has None, .* x"):
            patch.setenv(name, "x")
            rules.check_alike([first, rules.settings(there)])


@pytest.mark.parametrize("name", ["lr", "model", "data", "strategy", "loss", "mesh", "schedule", "augment", "x" * 9000])
def test_values_of_thousands_of_characters_are_not_repeated_whole(name, capsys):
    from parallel.command.main import WRONG_OPTION, main

    assert main([f"--{name}", "y" * 9000, "--ranks", "2"]) == WRONG_OPTION
    assert len(capsys.readouterr().err) < 2000


def test_memory_is_asked_of_the_strategies_that_keep_the_network_whole(monkeypatch):
    """Strategies that divide a network may train one that no machine holds; ZeRO-1 and 2 keep it whole on each."""
    from types import SimpleNamespace

    from parallel.command import rules
    from parallel.command.options import Options

    monkeypatch.setattr(rules.limits, "memory", lambda: 2**20)
    network = SimpleNamespace(layout=SimpleNamespace(size=2**19, count=2**19), dtype=SimpleNamespace(itemsize=4))

    def fits(inside, **options):
        monkeypatch.setattr(rules.launcher, "inside", lambda: inside)
        try:
            rules.check_memory(Options(**options), network)
        except rules.OptionError:
            return False
        return True

    for strategy in "ddp", "zero1", "zero2", "ps":
        assert not fits(True, strategy=strategy) and not fits(False, strategy=strategy), strategy
    for case in {"strategy": "pipeline"}, {"strategy": "tensor"}, {"strategy": "fsdp"}, {"mesh": "pipeline=16"}:
        assert fits(True, **case) and not fits(False, **case), case
    assert fits(False, strategy="fsdp", offload="/tmp") and not fits(False, strategy="zero1", offload="/tmp")


def test_two_dashes_are_no_value():
    """argparse makes an empty list of them."""
    for field in dataclasses.fields(Options):
        name = f"--{field.name.replace('_', '-')}"
        with pytest.raises(OptionError, match=f"{name} --: expected a value"):
            parse([f"{name}=--"])


def test_who_says_nothing_of_the_rate_gets_the_usual_one(tmp_path):
    """Of SGD with momentum, which rises on the default data where the same rate without jumps up and down."""
    rate = lambda *words: (parse(list(words)).lr, parse(list(words)).momentum)
    assert rate() == rate("--strategy", "zero1") == (0.01, 0.9)
    assert rate("--momentum", "0") == rate("--compress", "dgc") == (0.01, 0)
    assert rate("--lr", "0.1") == (0.1, 0) and rate("--lr", "0.1", "--momentum", "0.5") == (0.1, 0.5)
    assert rate("--optimizer", "adam") == (0.001, 0) and rate("--optimizer", "lars") == (1, 0)
    (tmp_path / "mine.toml").write_text("lr = 0.3\n")
    assert rate("--config", str(tmp_path / "mine.toml")) == (0.3, 0)


@pytest.mark.parametrize("name", ["elastic", "batch", "out", *(n for n, f in FIELDS.items() if f.metadata.get("keys"))])
def test_an_option_without_its_value_says_what_it_takes(name):
    help_words = FIELDS[name].metadata["help"].split()[0].replace("%%", "%")
    with pytest.raises(OptionError, match=f"^{flag(name)} needs a value: {re.escape(help_words)}"):
        parse([flag(name)])

"""--mesh and --pipeline: what they take, what is refused before ranks start, and a run that goes on in another way."""

import json
import re
from pathlib import Path

import pytest
from conftest import PATIENCE

from parallel.command.factory import prepare
from parallel.command.options import Options
from parallel.command.parsing import parse, resumed
from parallel.launch import launcher
from parallel.settings import OptionError
from parallel.strategies import axes
from parallel.strategies.pipeline.option import arguments

ROOT = Path(__file__).parents[2]
ONE = dict.fromkeys(axes.AXES, 1)  # rank along each axis
TEXT = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
REFUSED = {
    "--mesh data=2,pipeline=2 --ranks 3": "does not make 3 ranks: each axis needs one of 1, 3 ranks",
    "--mesh expert=2 --ranks 2": "cnn has no experts that 2 ranks could have",
    "--mesh expert=2,space=2 --ranks 4": "axes space and expert cannot be combined: experts are chosen for positions",
    "--mesh expert=2,pipeline=2 --ranks 4": "cnn has no experts that 2 ranks could have",
    "--pipeline pipedream --mesh expert=2 --ranks 4": "leave out --mesh data, expert, context, tensor",
    "--mesh pipelines=2 --ranks 2": "what is 'pipelines=2'? it takes data=NUMBER, expert=NUMBER, pipeline=NUMBER",
    "--mesh data=0 --ranks 2": "data must have at least 1 rank",
    "--mesh , --ranks 2": "--mesh , names no axis; such as --mesh data=2,pipeline=2",
    "--mesh tensor=2 --tensor sequence --ranks 2": "cnn has nothing to be cut along the places of a sequence by 2",
    "--mesh pipeline=2,tensor=2 --tensor sequence --ranks 4": "would be computed as by pairs: use that way",
    "--mesh data=2": "data 2 does not make 1 ranks",
    "--mesh data=2 --strategy ps --ranks 2": "--mesh data=2 has no effect with --strategy ps",
    "--mesh pipeline=2 --strategy fsdp --ranks 2": "a stage would reduce its gradients, and gather",
    "--pipeline 1f1b --mesh data=2,pipeline=1 --ranks 2": "--pipeline 1f1b needs ranks on its axis",
    "--pipeline 1f1b --strategy ps --ranks 3": "--pipeline 1f1b with --strategy ps: synchronous push and pull",
    "--pipeline 2f2b --ranks 2": "no schedule '2f2b'; use one of naive, gpipe, 1f1b",
    "--pipeline 1f1b:chunks=2 --ranks 2": "what is 'chunks=2'? 1f1b takes micro=NUMBER",
    "--pipeline 1f1b:micro=0 --ranks 2": "micro must be at least 1",
    "--pipeline 1f1b:micro=17 --mesh data=2 --ranks 4": "17 micro-batches do not fit into the 16 samples",
    "--pipeline 1f1b:cuts=1.5 --ranks 2": "cuts are numbers of layers",
    "--pipeline 1f1b:cuts=inf --ranks 2": "cuts are numbers of layers",
    "--pipeline pipedream:replicas=nan/1 --ranks 2": "replicas are ranks of each stage, such as 3/1",
    "--pipeline 1f1b:cuts=99 --ranks 2": "it can be cut before 1 to 9",
    "--pipeline interleaved:chunks=9 --ranks 2": "cnn has 10 layers, too few for 18 stages",
    "--strategy pipeline --ranks 11": "--strategy pipeline: cnn has 10 layers, too few for 11 stages: use at most 10",
    "--mesh pipeline=3 --model mlp:64,10 --ranks 3": "--mesh pipeline=3: mlp:64,10 has 2 layers, too few for 3 stages",
    "--pipeline 1f1b --model encoder:8,2,1 --data stdlib --ranks 2": "use --strategy ddp or tensor, or an Embedding",
    "--strategy pipeline --reproducible 4 --ranks 2": "stages add up micro-batches as they pass",
    "--strategy pipeline --accumulate 2 --ranks 2": "set their number by --pipeline NAME:micro=N",
    "--pipeline 1f1b --compress qsgd --ranks 2": "must be rounded equally on all",
    "--pipeline 1f1b --compress fp16 --ranks 2": "--compress fp16: every rank has another part of the network",
    "--pipeline pipedream --compress fp16 --ranks 2": "replicas of a stage sum their gradients as they are: leave",
    "--mesh tensor=2 --compress fp16 --ranks 2": "--compress fp16: every rank has another part of the network",
    "--mesh pipeline=2,tensor=2 --compress fp16 --ranks 4": "no gradients are sent along the axis data: leave it out",
    "--mesh tensor=2 --compress topk --ranks 2": "must be rounded equally on all",
    "--mesh tensor=2 --strategy zero1 --compress fp16 --ranks 2": "arrays that several ranks have in full must be",
    "--mesh tensor=2 --strategy zero2 --offload . --ranks 2": "--offload cannot be combined with layers that ranks",
    "--mesh tensor=2 --reproducible 4 --ranks 2": "--reproducible cannot be combined with",
    "--mesh pipeline=2,tensor=2 --ranks 6": "tensor 2 does not make 6 ranks",
    "--mesh pipeline=2,tensor=3 --model transformer:16,4,2 --data stdlib --ranks 6": "heads cannot be dealt out to 3",
    "--pipeline pipedream --mesh tensor=2 --ranks 4": "several ranks with a stage would have to wait for",
    "--pipeline 1f1b --consistency stale:1 --ranks 2": "--consistency cannot be combined with stages on",
    "--pipeline 1f1b --node-memory on --ranks 2": "gradients of stages are summed by messages",
    "--pipeline pipedream --mesh data=2 --ranks 4": "every mini-batch has an update of its own",
    "--pipeline pipedream --strategy zero1 --ranks 2": "every mini-batch has an update of its own",
    "--pipeline pipedream:replicas=2/1 --ranks 4": "replicas: expected numbers of ranks, in all 4, given (2, 1)",
    "--pipeline pipedream:replicas=1.5/1 --ranks 2": "replicas are ranks of each stage, such as 3/1",
    "--pipeline 1f1b:replicas=2/1 --ranks 3": "what is 'replicas=2/1'? 1f1b takes",
    "--pipeline pipedream --clip global:1 --ranks 2": "the norm of the whole gradient is never known",
    "--pipeline pipedream:replicas=2/1 --model resnet20 --sync-batch-norm --ranks 3": "each replica has another batch",
    "--pipeline pipedream --dtype mixed --ranks 2": "cannot be skipped by all stages: use float32",
    "--pipeline pipedream:recompute --ranks 2": "what is 'recompute=1'? pipedream takes micro=NUMBER",
    "--pipeline mine.csv:micro=2 --ranks 2": "what is 'micro=2'?",
    "--pipeline none.csv --ranks 2": "--pipeline none.csv: No such file",
    "--pipeline late.csv --ranks 2": "1B0 cannot run: it needs 1F0, which comes later on this rank",
    "--pipeline hang.csv --ranks 2": "2 of 2 ranks wait for ever",
    "--pipeline rubbish.csv --ranks 2": "rank 0, column 1: 'x' is no action",
    "--pipeline bytes.csv --ranks 2": "byte 4 is no text in UTF-8; a schedule is CSV, a row of actions such as 0F0,0B0",
    "--pipeline empty.csv --ranks 2": "a schedule has a row for each rank; this text has none",
    "--pipeline twice.csv --ranks 2": "rank 1, column 0: 0F0 cannot run: 0F0 on rank 0, column 0 has done that",
    "--pipeline many.csv --ranks 2": (
        "33 micro-batches do not fit into the 32 samples that each of 1 pipelines has of --batch 32: write a schedule "
        "of 32 or less, or train with --batch 33"
    ),
    "--pipeline mine.csv --ranks 3": "the schedule has 2 rows, one for each rank, but there are 3 ranks",
}
FILES = {
    "mine.csv": TEXT,
    "late.csv": TEXT.replace("1F0,1F1,1B0", "1B0,1F1,1F0"),
    "hang.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "rubbish.csv": "0F0,x\n",
    "empty.csv": "\n",
    "twice.csv": "0F0,0B0\n0F0,0B0\n",
    "many.csv": "\n".join(",".join(f"{s}{kind}{i}" for kind in "FB" for i in range(33)) for s in range(2)),
    "from-a-spreadsheet.csv": "\ufeff" + TEXT.replace("\n", "\r\n"),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    (tmp_path / "bytes.csv").write_bytes(b"0F0,\xff\n")
    return tmp_path


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_before_ranks_start(words, files):
    with pytest.raises(OptionError, match=re.escape(REFUSED[words])):
        prepare(parse([*words.split(), "--limit", "60"]))


def test_texts_become_arguments(files):
    options = Options(pipeline="interleaved:micro=6,chunks=3,cuts=1/2/3", batch=12)
    assert axes.is_pipeline(options) and axes.sizes(options, 4) == ONE | {"pipeline": 4}
    found = arguments(options, 2)
    assert found == {"schedule": "interleaved", "micro_batches": 6, "chunks": 3, "cuts": [1, 2, 3], "recompute": False}
    assert arguments(Options(pipeline="gpipe:recompute", batch=12), 2)["recompute"]
    assert arguments(Options(strategy="pipeline", batch=12), 2)["micro_batches"] == 6
    written = arguments(Options(pipeline="mine.csv"), 1)
    assert written["micro_batches"] == 2 and len(written["schedule"]) == 2
    assert arguments(Options(pipeline="pipedream:vertical_sync"), 1)["vertical_sync"]
    assert arguments(Options(pipeline="pipedream:replicas=3/1,cuts=4"), 1)["replicas"] == [3, 1]
    assert axes.sizes(Options(mesh="data=2,pipeline=3"), 6) == ONE | {"data": 2, "pipeline": 3}
    assert not axes.is_pipeline(Options(mesh="data=2"))
    for file in "mine.csv", "from-a-spreadsheet.csv":
        prepare(parse(["--pipeline", file, "--ranks", "2", "--limit", "60"]))


@pytest.mark.exhaustive
def test_a_run_goes_on_without_its_pipeline(files, nothing_left):
    """Two ranks after a schedule of one's own, then the same two with the whole network each."""
    script, out = str(ROOT / "scripts/train.py"), str(files / "run")
    common = [script, "--out", out, "--limit", "60", "--no-pictures", "--model", "mlp:64,9,10"]
    with open(files / "said", "w") as said:
        more = ["--pipeline", str(files / "mine.csv"), "--epochs", "1", "--memory", "--timeline"]
        assert launcher.run([*common, *more], 2, timeout=PATIENCE, cwd=ROOT, stdout=said) == 0
        again = [script, "--resume", out, "--epochs", "2", "--strategy", "ddp"]
        assert launcher.run(again, 2, timeout=PATIENCE, cwd=ROOT, stdout=said) == 0
    told = (files / "said").read_text()
    assert "2 ranks, Pipeline: " in told and "2 stages on 2 ranks, cut before 2, 2 micro-batches" in told
    assert "2 ranks, DistributedDataParallel" in told and "epoch 2/2" in told
    assert (files / "run" / "pipeline.png").stat().st_size > 10000, "a step as it was, and as its schedule says"
    assert json.loads((files / "run" / "result.json").read_text())["epochs"] == 2


def test_a_run_keeps_its_mesh_on_as_many_ranks(tmp_path):
    """Then it goes on as it was; on other numbers of ranks, or by another strategy, without."""
    config = {"strategy": "ddp", "mesh": "data=2,tensor=2", "tensor": "sequence", "model": "transformer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"resume": str(tmp_path)}
    same = resumed(asked | {"ranks": 4})
    assert (same["mesh"], same["tensor"]) == ("data=2,tensor=2", "sequence")
    for more in {"ranks": 2}, {"ranks": 8}, {}, {"ranks": 4, "strategy": "fsdp"}:
        found = resumed(asked | more)
        assert "mesh" not in found and "tensor" not in found, more
    config["mesh"] = "pipeline=2"  # the others are data
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [resumed(asked | {"ranks": n}).get("mesh") for n in (2, 3, 4)] == ["pipeline=2", None, "pipeline=2"]

"""A trained network is used: image files are told apart, text goes on, and what was done to an image is said."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE

import nn
from nn.analysis import sampling
from nn.data import images
from nn.data.text import text_datasets
from nn.models import build
from parallel.command import predict, sample, trained_run
from parallel.command.options import Options
from parallel.command.training_run import train

ROOT = Path(__file__).parents[2]


def script(name, *args, status=0):
    done = subprocess.run(
        [sys.executable, f"scripts/{name}.py", *map(str, args)], cwd=ROOT, text=True, timeout=PATIENCE,
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the digits, as a user makes it."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    with np.errstate():  # which a run sets for its process
        train(Options(model="mlp", epochs=2, limit=300, normalise=True, pictures=False, out=str(out)))
    return out


def write(path, image):
    """A PNG of an image in 0 .. 1."""
    from matplotlib.image import imsave

    image = np.asarray(image, float)
    imsave(path, np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image, vmin=0, vmax=1)
    return str(path)


def predicted(*arguments):
    return predict.main([str(a) for a in arguments])


def test_images_are_told_apart_as_the_samples_are(run, tmp_path, capsys):
    """The same shares as for the data set's own sample, through a file with 256 steps of grey, enlarged or not."""
    data = nn.data.load("digits", normalise=True, validation=0.1, limit=300)
    trained = nn.load(run / "network.npz")
    x, _ = data.test.batch(slice(0, 6))
    z = trained.predict(x)
    share = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    raw = data.test.x[:6] / 16
    files = [write(tmp_path / f"{i}.png", image) for i, image in enumerate(raw)]
    lines = script("predict", run, *files, "--top", 2).splitlines()
    for i, file in enumerate(files):
        assert lines[3 * i] == f"{file} (8x8 colour, made grey)"
        told = re.fullmatch(r" +([\d.]+)%  (\d)", lines[3 * i + 1])
        assert int(told[2]) == z[i].argmax() and float(told[1]) == pytest.approx(100 * share[i].max(), abs=1.5)
    large = np.kron(raw[0], np.ones((4, 4, 1)))
    assert predicted(run / "network.npz", write(tmp_path / "large.png", large)) == 0
    said = capsys.readouterr().out
    assert "(32x32 colour, made grey, scaled to 8x8)" in said and f"  {z[0].argmax()}\n" in said


def test_what_was_done_to_an_image_is_said(run, tmp_path, capsys):
    image = np.full((30, 20, 3), 0.9)
    image[10:20, 8:12] = 0.1
    negative = write(tmp_path / "dark-on-light.png", image)
    assert predicted(run, negative) == 0
    said = capsys.readouterr().out
    assert "(20x30 colour, made grey, cropped to 20x20, scaled to 8x8)" in said
    assert "its border is light, and dark in the training samples: try --invert" in said
    assert predicted(run, negative, "--invert", "--fit", "pad") == 0
    said = capsys.readouterr().out
    assert "padded to 30x30, scaled to 8x8, inverted)" in said and "border is" not in said
    assert predicted(run, negative, "--fit", "stretch") == 0
    assert "made grey, scaled to 8x8)" in capsys.readouterr().out


def test_what_cannot_be_predicted_gets_a_sentence(run, tmp_path, capsys):
    (tmp_path / "text.png").write_text("no image")
    text = nn.Network(nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256)), (6,), name="text")
    nn.save(nn.Model(text, text.layout.zeros(np.float32)), tmp_path / "text.npz")
    image = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), (2, 2, 3), name="image")
    wrong = ({"class_names": ["cat"]}, {"scale": "x"}, {"scale": [1, 2]}, {"shift": None}, {"white": [1, 2, 3]})
    for number, about in enumerate(wrong):
        nn.save(nn.Model(image, image.layout.zeros(np.float32)), tmp_path / f"{number}.npz", about)
    for arguments, said in (
        *(((tmp_path / f"{i}.npz", "x.png"), f"{next(iter(about))} must be ") for i, about in enumerate(wrong)),
        ((run, tmp_path / "text.png"), "text.png: no image that can be read"),
        ((run, tmp_path / "none.png"), "No such file"),
        ((tmp_path, "x.png"), "neither the directory of a run nor a file that nn.save wrote"),
        ((tmp_path / "text.npz", "x.png"), "this program is for images"),
        ((tmp_path / "text.png", "x.png"), "text.png: File is not a zip file"),
    ):
        assert predicted(*arguments) == 1
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and told.count("\n") == 1, told
    assert sample.main([str(run)]) == 1
    assert "for networks that tell the next byte" in capsys.readouterr().err


def test_a_run_that_was_stopped_is_used_from_its_best_checkpoint(run, tmp_path, capsys):
    """What nn.save wrote at its end, and what its files say before that, are the same network."""
    (tmp_path / "checkpoints").mkdir()
    for file in ("config.json", *(f"checkpoints/{path.name}" for path in (run / "checkpoints").iterdir())):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    whole, rebuilt = trained_run.opened(str(run)), trained_run.opened(str(tmp_path))
    np.testing.assert_array_equal(whole.flat_parameters, rebuilt.flat_parameters)
    assert whole.about == json.loads(json.dumps(rebuilt.about)) and whole.about["outputs"] == "logits"
    (tmp_path / "checkpoints" / "manifest.json").unlink()
    assert predicted(tmp_path, "x.png") == 1
    assert "nothing was saved yet" in capsys.readouterr().err


def test_images_of_every_kind_are_read(tmp_path):
    from matplotlib.image import imsave
    from PIL import Image

    image = np.linspace(0, 1, 48).reshape(4, 4, 3)
    imsave(tmp_path / "colour.png", image)
    np.testing.assert_allclose(images.read_image(tmp_path / "colour.png")[0][..., :3], image, atol=1 / 255)
    Image.fromarray((image[..., 0] * 255).astype(np.uint8)).save(tmp_path / "grey.jpg", quality=100)
    grey = images.read_image(tmp_path / "grey.jpg")[0]
    assert grey.shape == (4, 4, 1) and np.abs(grey[..., 0] - image[..., 0]).max() < 0.03
    clear = np.zeros((2, 2, 4))
    clear[0, 0] = (1, 0, 0, 1)
    imsave(tmp_path / "clear.png", clear)
    np.testing.assert_array_equal(
        images.read_image(tmp_path / "clear.png")[0], [[[1, 0, 0], [1, 1, 1]], [[1, 1, 1]] * 2]
    )


def test_scaling_keeps_means_and_lines():
    ramp = np.linspace(0, 1, 12)[None, :, None] * np.ones((6, 1, 1))
    assert images.resized(ramp, 6, 12) == pytest.approx(ramp)
    for height, width in ((3, 4), (6, 3), (13, 30)):
        other = images.resized(ramp, height, width)
        assert other.shape == (height, width, 1) and other.mean() == pytest.approx(0.5)
        assert (np.diff(other[0, :, 0]) >= -1e-12).all()


# --------------------------------------------------------------------------------------------------------- text


LINE = "a parrot says: "


@pytest.fixture(scope="module", params=["transformer:32,2,1", "lstm:32,1"])
def parrot(request, tmp_path_factory):
    """A network that has learned one line by heart."""
    text = np.frombuffer(LINE.encode() * 40, np.uint8)
    train, _ = text_datasets(text, "line", 8)
    network = build(request.param, (8,), 256)
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), nn.Adam(lr=0.005))
    training = nn.fit(trainer, train, 40, batch=16)
    assert training.history[-1]["loss"] < 0.3
    return nn.save(trainer, tmp_path_factory.mktemp("parrot") / "parrot.npz", {"outputs": "logits"})


def test_text_goes_on(parrot, capsys):
    said = script("sample", parrot, "--prompt", LINE[:9], "--length", 30, "--temperature", 0)
    assert said == (LINE * 3)[: 9 + 30] + "\n"
    texts = {}
    for arguments in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "1", "--top-k", "1"]):
        assert sample.main([str(parrot), "--temperature", "3", "--length", "50", *arguments]) == 0
        texts.setdefault(" ".join(arguments), []).append(capsys.readouterr().out)
    assert texts["--seed 1"][0] == texts["--seed 1"][1] != texts["--seed 2"][0]
    assert predict.main([str(parrot), "x.png"]) == 1
    assert "scripts/sample.py is for texts" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"temperature must be in \[0, inf\), given -1\.0"):
        sampling.generate(None, b"x", 8, temperature=-1.0)


def test_a_file_of_others_does_not_steer_the_terminal(run, parrot, tmp_path, capsys):
    """Names of classes, of networks, and what a network says are told with their control characters escaped."""
    trained = nn.load(run / "network.npz")
    trained.about["class_names"] = ["\x1b[2J"] * 10
    file = nn.save(trained, tmp_path / "network.npz", trained.about)
    assert predicted(file, write(tmp_path / "x.png", np.zeros((8, 8, 1)))) == 0
    assert r"  \x1b[2J" in capsys.readouterr().out
    assert sample.main([str(file)]) == 1
    talker = nn.load(parrot)
    talker.flat_parameters[:] = 0
    talker.network.name = "\x1b]0;x\x07"
    file = nn.save(talker, tmp_path / "talker.npz", talker.about)
    assert sample.main([str(file), "--length", "2000", "--temperature", "9"]) == 0
    assert predicted(file, "x.png") == 1
    shown = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", shown.out + shown.err)
    assert r"\x1b" in shown.out and r"\x1b]0;x\x07 takes samples" in shown.err


def test_draws_follow_the_probabilities():
    logits, rng = np.log(np.array([0.5, 0.3, 0.2, 1e-9])), np.random.default_rng(0)
    counts = np.bincount([sampling.draw(logits, 1.0, None, rng) for _ in range(2000)], minlength=4) / 2000
    assert counts == pytest.approx([0.5, 0.3, 0.2, 0], abs=0.05)
    counts = np.bincount([sampling.draw(logits, 0.5, 2, rng) for _ in range(2000)], minlength=4) / 2000
    assert counts == pytest.approx([25 / 34, 9 / 34, 0, 0], abs=0.05)
    assert {sampling.draw(logits, 0, None, rng) for _ in range(5)} == {0}


def test_what_comes_next_depends_on_the_last_places_only():
    seen = []

    def predict(window):
        seen.append(window.copy())
        return np.eye(5)[(window + 1) % 5]  # counts on

    ids = sampling.generate(predict, [7, 1, 2, 3], 3, temperature=0)
    assert [next(ids) for _ in range(4)] == [4, 0, 1, 2]
    assert [window.tolist() for window in seen[:2]] == [[[1, 2, 3]], [[2, 3, 4]]]
    short = sampling.generate(predict, [2], 3, temperature=0)
    assert [next(short) for _ in range(3)] == [3, 4, 0] and seen[4].tolist() == [[2, 0, 0]]
    with pytest.raises(ValueError, match="at least one id"):
        sampling.generate(predict, [], 3)

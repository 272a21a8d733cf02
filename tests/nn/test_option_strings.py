"""Texts with keys: what is read, and what is refused by name."""

import pytest

from nn.option_strings import convert, join, split

KINDS = {"ratio": float, "clip": int, "masking": bool, "at": tuple, "metric": str}


@pytest.mark.parametrize("text", ["fp16", "topk:0.01", "mlp:784,30,10", "cosine:warmup=5,end=0.1", "mlp:64,,10"])
def test_a_text_is_taken_apart_and_put_together(text):
    name, parts = split(text)
    assert ":" not in name and join(name, parts) == text


def test_values_come_by_place_and_by_key():
    assert convert("dgc", ["0.5", "clip=3"], KINDS) == {"ratio": 0.5, "clip": 3}
    assert convert("dgc", ["0.5", "3", "0"], KINDS) == {"ratio": 0.5, "clip": 3, "masking": False}
    assert convert("dgc", ["metric=loss", "at=1/2.5"], KINDS) == {"metric": "loss", "at": (1.0, 2.5)}
    assert convert("mesh", ["data=2", "pipeline=4"], {"data": int, "pipeline": int}, positional=False) == {
        "data": 2,
        "pipeline": 4,
    }
    assert convert("fp16", [], {}) == convert("fp16", [""], {}) == {}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["foo=3"], "what is 'foo=3'\\? dgc takes ratio=NUMBER, clip=NUMBER, .*, metric=TEXT"),
        (["clip=3", "0.5"], "what is '0.5'"),  # by place only before those with keys
        (["0.5", "ratio=0.1"], "what is 'ratio=0.1'"),
        (["clip=3", "clip=3"], "what is 'clip=3'"),
        (["ratio="], "what is 'ratio='"),
        (["0.1", "2", "1", "3", "a", "b"], "what is 'b'"),
        (["clip=1.5"], "clip must be a whole number, given '1.5'"),
        (["x"], "ratio must be a number, given 'x'"),
        (["masking=yes"], "masking must be 0 or 1, given 'yes'"),
        (["at=1/x"], "at must be a number, or some as 30/60, given '1/x'"),
    ],
)
def test_what_makes_no_sense_is_named(parts, words):
    with pytest.raises(ValueError, match=words):
        convert("dgc", parts, KINDS)
    with pytest.raises(ValueError, match="what is '1'\\? fp16 takes nothing"):
        convert("fp16", ["1"], {})

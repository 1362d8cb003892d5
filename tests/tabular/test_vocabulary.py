"""Vocabularies: rows of ids against plain Python, saved files, options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.ids.keys import id_keys
from recsys_topk.tabular.ids.options import AUTO_DENSE_ROWS, VocabularyOptions, vocabulary_options
from recsys_topk.tabular.ids.vocabulary import (
    CompactVocabulary,
    DenseVocabulary,
    HashVocabulary,
    Vocabulary,
    fit_vocabulary,
    load_vocabularies,
    save_vocabularies,
)

WORD = 2**64 - 1
ALL: list[Vocabulary] = [
    DenseVocabulary(50),
    DenseVocabulary(50, offset=0, padding=2),
    CompactVocabulary.fit([5, 900, 7], oov_rows=3),
    HashVocabulary(20, seed=4),
]


def splitmix(value: int, seed: int) -> int:
    """SplitMix64 of Steele, Lea and Flood, with Python integers."""
    z = (value + (seed + 1) * 0x9E3779B97F4A7C15) & WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def key_by_loop(text: str) -> int:
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and str(int(text)) == text and abs(int(text)) < 2**63:
        return int(text)
    state = 0
    for letter in text:
        state = (state ^ ord(letter)) * 0x9E3779B97F4A7C15 & WORD
        state ^= state >> 32
    found = splitmix((state + len(text)) & WORD, 1)
    return found - 2**64 if found >= 2**63 else found


def test_keys_of_texts_equal_loop() -> None:
    texts = ["", "a", "ab", "ba", "42", "-7", "007", "-0", "0", "-", "1a", "é世", "9" * 18, "9" * 19, "x" * 128, "²"]
    texts += [str(number) for number in (10**18, 2**63 - 1, 2**63, 1 - 2**63, 2**64 - 1, 2**64 + 7, 10**20)]
    assert id_keys(texts).keys.tolist() == [key_by_loop(text) for text in texts]
    wide = np.array(texts, dtype="U100")
    assert id_keys(wide[:5]).keys.tolist() == id_keys(np.array(texts[:5])).keys.tolist()
    assert id_keys(np.array(texts[1:5], dtype="S")).keys.tolist() == id_keys(texts[1:5]).keys.tolist()
    assert id_keys(np.array([42, "42", None, float("nan")], dtype=object)).missing.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_64_bit_integer_and_its_text_are_one_id() -> None:
    numbers = [1234567890123456789, -1234567890123456789, 2**63 - 1]
    assert id_keys([str(number) for number in numbers]).keys.tolist() == numbers == id_keys(numbers).keys.tolist()


def test_one_long_text_does_not_pad_the_others() -> None:
    texts = np.array(["short"] * 60_000 + ["y" * 100_000], dtype=object)  # 24 GB as one fixed-width array
    keys = id_keys(texts).keys
    assert len(np.unique(keys)) == 2
    assert keys[-1] != id_keys(["y" * 99_999]).keys[0]


def test_hash_equals_splitmix_in_any_process() -> None:
    vocabulary = HashVocabulary(1000, seed=3)
    ids = [0, 1, 75_000_000, -5]
    rows = vocabulary.encode(np.array(ids)).tolist()
    assert rows == [1 + splitmix(i & WORD, 3) % 999 for i in ids]
    code = (
        "import sys, recsys_topk.tabular.ids.vocabulary as v, recsys_topk.tabular.schema;"
        "print(v.HashVocabulary(1000, seed=3).encode(['user', '75000000']).tolist(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[vocabulary.encode(['user'])[0].item(), rows[2]]} False"


def test_hash_spreads_ids_evenly() -> None:
    counts = np.bincount(HashVocabulary(101).encode(np.arange(100_000)), minlength=101)
    assert counts[0] == 0
    expected = 1000.0
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 180  # chi-square, 99 degrees of freedom: p < 1e-6


@pytest.mark.parametrize("oov_rows", [1, 5])
def test_compact_rows_equal_those_of_a_dict(oov_rows: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-(10**12), 10**12, 3000)
    ids = np.concatenate([ids, ids[::2], ids[::4]])
    vocabulary = CompactVocabulary.fit(ids, min_count=2, oov_rows=oov_rows)
    often = sorted(i for i, times in Counter(ids.tolist()).items() if times >= 2)
    rows = {i: 1 + oov_rows + place for place, i in enumerate(often)}
    queries = np.concatenate([ids, rng.integers(0, 10**6, 500)]).reshape(10, -1)
    expected = [rows.get(i, 1 + splitmix(i & WORD, 0) % oov_rows) for i in queries.ravel().tolist()]
    assert vocabulary.encode(queries).ravel().tolist() == expected
    assert vocabulary.rows == 1 + oov_rows + len(often) == max(rows.values()) + 1
    assert vocabulary.known(queries).ravel().tolist() == [i in rows for i in queries.ravel().tolist()]


def test_counter_in_parts_equals_counter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 500, 400) for _ in range(20)]
    counter, plain = IdCounter(), IdCounter(counting=False)
    for part in parts:
        counter.add(part)
        plain.add(part)
        counter._merge()
    expected = Counter(np.concatenate(parts).tolist())
    for least in (1, 10, 20, 10_000):
        assert counter.keys(least).tolist() == sorted(i for i, times in expected.items() if times >= least)
    assert plain.keys().tolist() == sorted(expected)
    weighted = IdCounter()
    weighted.add([4, 9, 4], counts=[1, 5, 2], missing=[False, False, True])
    assert weighted.keys(2).tolist() == [9]
    with pytest.raises(ValueError, match="min_count"):
        plain.keys(2)


@pytest.mark.parametrize("vocabulary", ALL, ids=repr)
def test_any_id_has_a_row(vocabulary: Vocabulary) -> None:
    extremes = np.array([0, -1, 2**63 - 1, -(2**63), 5, 900])
    texts = ["", "user", "5", "9" * 40]
    for ids in (extremes, np.array([2**64 - 1], dtype=np.uint64), texts, [], np.zeros((0, 3), dtype=np.int64)):
        rows = vocabulary.encode(ids)
        assert rows.dtype == np.int64
        assert rows.shape == np.shape(ids)
        assert ((rows >= 0) & (rows < vocabulary.rows)).all()
    missing = [True, False, True, False, False, False]
    rows = vocabulary.encode(extremes, missing)
    assert rows[[0, 2]].tolist() == [vocabulary.padding] * 2
    assert rows[4] == vocabulary.encode("5")  # a number is one id in any type


@pytest.mark.parametrize("vocabulary", ALL, ids=repr)
def test_loaded_vocabulary_equals_the_saved_one(vocabulary: Vocabulary, tmp_path: Path) -> None:
    vocabulary.save(tmp_path)
    again = Vocabulary.load(tmp_path)
    assert again == vocabulary
    assert again.fingerprint == vocabulary.fingerprint
    assert again.encode([5, 8]).tolist() == vocabulary.encode([5, 8]).tolist()
    assert not list(tmp_path.glob(".*"))


def test_different_vocabularies_have_different_fingerprints() -> None:
    others = [CompactVocabulary.fit([5, 900, 8], oov_rows=3), HashVocabulary(20, seed=5), DenseVocabulary(51)]
    assert len({vocabulary.fingerprint for vocabulary in [*ALL, *others]}) == len(ALL) + len(others)


def test_damaged_files_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vocabularies\.json is missing"):
        load_vocabularies(tmp_path)
    save_vocabularies(tmp_path, {"a": ALL[2], "b": ALL[3]})
    (ids,) = tmp_path.glob("*.npy")
    np.save(ids, np.array([5, 7, 901]))
    with pytest.raises(ValueError, match="do not match their fingerprint"):
        load_vocabularies(tmp_path)
    np.save(ids, np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be used"):
        load_vocabularies(tmp_path)
    ids.unlink()
    with pytest.raises(ValueError, match="cannot be used"):
        load_vocabularies(tmp_path)
    content = json.loads((tmp_path / "vocabularies.json").read_text())
    content["tables"]["a"]["ids"] = "../elsewhere.npy"
    (tmp_path / "vocabularies.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a file beside it"):
        load_vocabularies(tmp_path)
    (tmp_path / "vocabularies.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be used"):
        load_vocabularies(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1.0, float("nan")]), "got float64"),
        (np.array(["2024-01-01"], dtype="datetime64[D]"), "got datetime64"),
        (np.array(["a", 1.5], dtype=object), "got 1.5 of type float"),
        (np.array([["a"], ["b"]], dtype=object), None),
    ],
)
def test_types_that_are_no_ids_raise(ids: Any, message: str | None) -> None:
    if message is None:
        assert HashVocabulary(9).encode(ids).shape == (2, 1)
        return
    with pytest.raises(TypeError, match=message):
        HashVocabulary(9).encode(ids)


def test_auto_is_dense_up_to_a_size() -> None:
    assert fit_vocabulary(None, [0, AUTO_DENSE_ROWS - 3]).kind == "dense"
    assert fit_vocabulary("auto", [0, AUTO_DENSE_ROWS - 2]).kind == "compact"
    assert fit_vocabulary("auto", ["a"]).kind == "compact"
    assert fit_vocabulary("auto", [-4, 2]).kind == "compact"
    assert fit_vocabulary("auto", dense=DenseVocabulary(AUTO_DENSE_ROWS)).kind == "dense"
    assert fit_vocabulary("dense", [0, 10**7]).rows == 10**7 + 3
    assert fit_vocabulary("compact:min_count=2,oov_rows=4", [1, 1, 2]).rows == 6
    assert fit_vocabulary({"kind": "hash", "rows": 100, "seed": 2}) == HashVocabulary(100, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("compakt", "one of auto, dense, compact, hash"),
        ("hash", "hash:rows=1000000"),
        ("hash:min_count=2", "hash takes rows, seed, got 'min_count'"),
        ("compact:min_count=two", "min_count must be an integer, got 'two'"),
        ("compact:oov_rows=0", "at least 1, got 1 and 0"),
        ({"video": "compact"}, "names table 'video'; there are video_id, user_id"),
    ],
)
def test_invalid_options_raise(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocabulary_options(given, ["video_id", "user_id"])


def test_options_per_table() -> None:
    found = vocabulary_options({"video_id": {"kind": "compact", "min_count": 3}}, ["video_id", "user_id"])
    assert found == {"video_id": VocabularyOptions("compact", min_count=3), "user_id": VocabularyOptions("auto")}


def test_dense_vocabulary_of_texts_raises() -> None:
    with pytest.raises(ValueError, match="user holds texts or ids below 0"):
        fit_vocabulary("dense", ["a"], name="user")

"""The user's q, k, v: every accepted form is read to the bit, every other gets one clear line."""

from __future__ import annotations

import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fa4gen.codegen.inputs import InputError, read_qkv

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"q": (2, 3, 4, 64), "k": (2, 5, 2, 64), "v": (2, 5, 2, 64)}


def arrays(dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("to", [BF16, np.dtype(np.float16)], ids=str)
def test_reads_and_converts(tmp_path, dtype, suffix, to):
    given = arrays(dtype)
    path = tmp_path / f"qkv{suffix}"
    if suffix == ".npz":
        np.savez(path, **given)
    else:
        safetensors.numpy.save_file(given, path)
    for array, name in zip(read_qkv(path, depth=64, dtype=to), "qkv", strict=True):
        assert array.dtype == to
        assert array.tobytes() == given[name].astype(to).tobytes()


def test_extra_arrays_and_other_layouts_are_fine(tmp_path):
    given = arrays(np.float32)
    given["k"] = np.asfortranarray(given["k"])
    np.savez(tmp_path / "qkv.npz", mask=np.zeros(3), **given)
    _, k, _ = read_qkv(tmp_path / "qkv.npz", depth=64, dtype=BF16)
    assert k.flags.c_contiguous
    assert np.array_equal(k, given["k"].astype(BF16))


def changed(**changes):
    given = arrays(np.float32)
    for name, change in changes.items():
        given[name] = change(given[name])
    return {name: array for name, array in given.items() if array is not None}


def with_value(value):
    def change(array):
        array[0, 0, 0, 0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (changed(v=lambda a: None), ["v", "no array"]),
        (changed(q=lambda a: a[0]), ["q", "(3, 4, 64)", "[batch, q_len, q_heads, 64]"]),
        (changed(q=lambda a: a[..., :32]), ["q", "depth 32", "64"]),
        (changed(k=lambda a: a[:, :4]), ["k", "v", "(2, 4, 2, 64)"]),
        (changed(k=lambda a: a[:1], v=lambda a: a[:1]), ["batch"]),
        (changed(q=lambda a: a[:, :, :3]), ["heads", "multiple"]),
        (changed(q=lambda a: a[:, :0]), ["q", "shape"]),
        (changed(k=lambda a: a.astype(np.float64)), ["k", "float64"]),
        (changed(k=lambda a: a.astype(np.int32)), ["k", "int32"]),
        (changed(q=with_value(np.nan)), ["q", "finite"]),
        (changed(v=with_value(1e6)), ["v", "float16"]),
    ],
)
def test_refuses_arrays_in_one_line(tmp_path, given, words):
    path = tmp_path / "qkv.npz"
    np.savez(path, **given)
    with pytest.raises(InputError) as refused:
        read_qkv(path, depth=64, dtype=np.dtype(np.float16))
    assert "\n" not in str(refused.value)
    for word in [str(path), *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 not a zip", b"\xff" * 64, b"\x93NUMPY\x01\x00"])
def test_refuses_files_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"qkv{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_qkv(path, depth=64, dtype=BF16)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_refuses_a_truncated_archive_and_pickles(tmp_path):
    whole = tmp_path / "whole.npz"
    np.savez(whole, **arrays(np.float32))
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-200])
    np.savez(tmp_path / "objects.npz", **{name: np.array([{}], object) for name in "qkv"})
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npy").rename(tmp_path / "plain.npz")
    for name in ("cut.npz", "objects.npz", "plain.npz"):
        with pytest.raises(InputError, match=name):
            read_qkv(tmp_path / name, depth=64, dtype=BF16)


def test_refuses_members_that_are_no_arrays_and_absurd_headers(tmp_path):
    whole = arrays(np.float32)
    np.savez(tmp_path / "raw.npz", k=whole["k"], v=whole["v"])
    with zipfile.ZipFile(tmp_path / "raw.npz", "a") as archive:
        archive.writestr("q", b"not an array")
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 1), }"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("q.npy", header + text.ljust(117) + b"\n")
    for name in ("raw.npz", "huge.npz"):
        with pytest.raises(InputError, match=name) as refused:
            read_qkv(tmp_path / name, depth=64, dtype=BF16)
        assert "\n" not in str(refused.value)


def test_refuses_an_unknown_kind_of_file(tmp_path):
    with pytest.raises(InputError, match="safetensors"):
        read_qkv(tmp_path / "qkv.pt", depth=64, dtype=BF16)

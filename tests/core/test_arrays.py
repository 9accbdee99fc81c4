"""Named arrays: the same bytes as Flower's, no copies, nothing believed; layouts; and the arithmetic of cohorts."""

import io
import pickle
from itertools import product

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failures

from cloister.utils.arrays import NUMPY, Array, Layout, from_record, to_record, view
from cloister.utils.cohort import NORM_ERROR, Cohort, scratch_for, updates, weighted_sum
from cloister.utils.errors import FederationError
from cloister.utils.threads import spans

SAMPLES = {
    "0-d": np.array(3.5, np.float32),
    "0-d float64": np.array(-0.0),
    "empty": np.zeros((0, 3), np.float32),
    "vector": np.arange(5, dtype=np.float32),
    "matrix": np.arange(6, dtype=np.float64).reshape(2, 3),
    "4-d": np.arange(16, dtype=np.float32).reshape(2, 2, 1, 4),
    "half": np.ones(3, np.float16),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    "reversed": np.arange(4, dtype=np.float32)[::-1],
    "not finite": np.array([np.nan, np.inf, -np.inf], np.float32),
    "integers": np.arange(3),
    "booleans": np.array([True, False]),
    "read-only": np.broadcast_to(np.float32(2), (3, 2)),
}
FORTRAN = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))


def stock(data, dtype="float32", shape=(2,)):
    """An array as it comes off the network: labels and bytes need not agree."""
    return FlowerArray(dtype=dtype, shape=shape, stype=NUMPY, data=data)


def npy(ndarray):
    return FlowerArray(ndarray).data


def header(shape, descr="<f4", fortran_order=False):
    buffer = io.BytesIO()
    facts = {"descr": descr, "fortran_order": fortran_order, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right, equal_nan=True)


# Ours and Flower's.


def test_ours_has_flowers_labels_bytes_and_object_id():
    def check(ndarray):
        ours, theirs = Array(ndarray), FlowerArray(ndarray)
        assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
        assert ours.data == theirs.data
        assert ours.object_id == theirs.object_id

    assert failures(SAMPLES.values(), check) == []


def test_a_fortran_array_is_sent_in_c_order():
    assert Array(FORTRAN).data == npy(np.ascontiguousarray(FORTRAN)) != npy(FORTRAN)
    assert Array(FORTRAN).object_id == FlowerArray(np.ascontiguousarray(FORTRAN)).object_id
    assert same(Array(FORTRAN).numpy(), FORTRAN)


def test_flower_reads_what_ours_serialises():
    def check(ndarray):
        ours = Array(ndarray)
        theirs = FlowerArray.inflate(ours.deflate(), ours.children)
        assert type(theirs) is FlowerArray
        assert same(theirs.numpy(), ndarray)
        assert same(view(theirs), ndarray)

    assert failures(SAMPLES.values(), check) == []


def test_a_record_of_ours_crosses_the_wire_as_flowers():
    arrays = {"a/kernel": SAMPLES["matrix"], "a/bias": SAMPLES["vector"], "scale": SAMPLES["0-d"]}
    sent = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": 3})})
    plain = RecordDict({"arrays": ArrayRecord({k: FlowerArray(v) for k, v in arrays.items()})})
    plain["metrics"] = MetricRecord({"num-examples": 3})
    assert sent.object_id == plain.object_id
    contents = {name: item.deflate() for name, item in get_all_nested_objects(sent).items()}
    received = inflate_object_from_contents(sent.object_id, contents)
    assert list(received["arrays"]) == list(arrays)
    assert all(same(array, arrays[name]) for name, array in from_record(received["arrays"]).items())


def test_an_array_is_serialised_once_and_only_when_asked(monkeypatch):
    calls = []
    save = np.save
    monkeypatch.setattr(np, "save", lambda *args, **options: calls.append(1) or save(*args, **options))
    array = Array(SAMPLES["matrix"])
    view(array), array.numpy(), array.dtype, array.shape
    assert not calls
    assert array.data is array.data
    assert len(calls) == 1


def test_ours_holds_the_array_itself_and_nobody_can_write_to_it():
    ndarray = np.arange(4, dtype=np.float32)
    held = Array(ndarray).numpy()
    assert np.shares_memory(held, ndarray) and view(Array(ndarray)).base is not None
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1
    ndarray[0] = 7  # the caller's own array stays writable
    assert held[0] == 7


def test_objects_never_become_bytes():
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        Array(np.array([object()])).data  # noqa: B018


# Reading what came over the network.


def test_a_stock_array_is_viewed_without_a_copy():
    def check(ndarray):
        theirs = FlowerArray(np.ascontiguousarray(ndarray).reshape(ndarray.shape))
        seen = view(theirs)
        assert same(seen, ndarray)
        assert not seen.flags.writeable
        if seen.size:
            assert np.shares_memory(seen, np.frombuffer(theirs.data, np.uint8))

    assert failures(SAMPLES.values(), check) == []


def test_a_stock_fortran_array_is_read_too():
    assert same(view(FlowerArray(FORTRAN)), FORTRAN)


GOOD = npy(np.ones(2, np.float32))


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(2, np.float32))
    return buffer.getvalue()


def objects():
    buffer = io.BytesIO()
    np.save(buffer, np.array([1, 2], object), allow_pickle=True)
    return buffer.getvalue()


HOSTILE = {
    "nothing": b"",
    "magic only": GOOD[:6],
    "half a header": GOOD[:40],
    "truncated": GOOD[:-1],
    "header only": GOOD[:-8],
    "pickle": pickle.dumps(np.ones(2, np.float32)),
    "pickled objects in an npy file": objects(),
    "other dtype": npy(np.ones(2, np.float64)),
    "other byte order": npy(np.ones(2, ">f4")),
    "other shape": npy(np.ones((2, 1), np.float32)),
    "fewer numbers": npy(np.ones(1, np.float32)),
    "negative shape": header((-2,)) + bytes(8),
    "unknown version": GOOD[:6] + b"\x09\x00" + GOOD[8:],
    "zeros": bytes(len(GOOD)),
    "no header": GOOD[:10] + bytes(118) + GOOD[128:],
    "unclosed header": GOOD[:10] + b"(" * 60 + GOOD[70:],
    "zip archive": archive(),
    "broken zip archive": b"PK\x03\x04" + bytes(60),
    "more numbers than memory": header((10**13,)),
}


def test_bytes_that_are_not_what_they_are_labelled_as_are_refused():
    def check(data):
        with pytest.raises(ValueError):
            view(stock(data))

    assert failures(HOSTILE.values(), check) == []


def test_labels_that_are_no_numbers_are_refused():
    def check(dtype):
        with pytest.raises(ValueError):
            view(stock(GOOD, dtype=dtype))

    cases = [
        "object",
        "O",
        "",
        "nonsense",
        "f4,f4",
        "f4,(",
        "(2,)f4",
        "U3",
        "S3",
        "V8",
        "datetime64[s]",
        "complex64",
    ]
    assert failures(cases, check) == []


def test_shapes_that_the_bytes_do_not_have_are_refused():
    def check(shape):
        with pytest.raises(ValueError):
            view(stock(GOOD, shape=shape))

    cases = zip([(-1,), (2**32, 2**32), (2**62, 4), (2**70,), (0, 2**70), (1,) * 100, ()])
    assert failures(cases, check) == []


@given(st.binary(max_size=200), st.integers(0, 136), st.integers(0, 136))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_noise_in_the_bytes_gives_an_array_of_the_label_or_a_value_error(noise, start, stop):
    try:
        seen = view(stock(GOOD[:start] + noise + GOOD[stop:]))
    except ValueError:
        return
    assert seen.dtype == np.float32 and seen.shape == (2,)


# Layouts.

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
kinds = st.sampled_from([np.float16, np.float32, np.float64])
names = st.text(min_size=1, max_size=8)
models = st.dictionaries(names, st.tuples(shapes, kinds), min_size=1, max_size=5)


def filled(specification, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(kind) for name, (shape, kind) in specification.items()}


@given(models)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_model_survives_being_laid_out_flat(specification):
    model = filled(specification)
    layout = Layout.of(model)
    back = layout.named(layout.rows(model))
    assert list(back) == list(model)
    assert all(same(back[name], array) for name, array in model.items())


@given(models)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_offsets_say_where_each_array_lies(specification):
    model = filled(specification)
    layout = Layout.of(model)
    vector = np.concatenate(layout.rows(model), dtype=np.float64)
    assert layout.size == len(vector) == sum(array.size for array in model.values())
    for array, start, stop in zip(model.values(), layout.offsets, layout.offsets[1:], strict=False):
        assert np.array_equal(vector[start:stop], array.ravel())


@given(models)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_record_gives_back_the_names_and_the_arrays(specification):
    model = filled(specification)
    back = from_record(to_record(model))
    assert list(back) == list(model)
    assert all(same(back[name], array) for name, array in model.items())


def test_arithmetic_is_in_float32_unless_the_model_has_float64():
    assert Layout.of({"a": np.zeros(2, np.float16)}).dtype == np.float32
    assert Layout.of({"a": np.zeros(2, np.float32)}).dtype == np.float32
    assert Layout.of({"a": np.zeros(2, np.float32), "b": np.array(1.0)}).dtype == np.float64


def test_rows_come_in_the_layouts_order_whatever_the_order_of_the_arrays():
    layout = Layout.of({"a": np.zeros(2), "b": np.zeros(1)})
    rows = layout.rows({"b": np.array([3.0]), "a": np.array([1.0, 2.0])})
    assert [list(piece) for piece in rows] == [[1.0, 2.0], [3.0]]


def test_rows_are_views_of_contiguous_arrays():
    model = {"a": np.zeros((2, 3), np.float32), "b": np.array(1.0, np.float32)}
    layout = Layout.of(model)
    rows = layout.rows(model)
    assert all(np.shares_memory(piece, array) for piece, array in zip(rows, model.values(), strict=True))
    assert all(np.shares_memory(a, b) for a, b in zip(layout.named(rows).values(), rows, strict=True))


def test_arrays_that_cannot_carry_noise_are_refused_by_name():
    def check(array):
        with pytest.raises(FederationError, match=f"array 'steps' has dtype {array.dtype}; only float arrays"):
            Layout.of({"kernel": np.zeros(2, np.float32), "steps": array})

    assert failures([np.arange(3), np.array([True]), np.array([1j]), np.array(["a"])], check) == []


def test_a_model_without_arrays_is_refused():
    with pytest.raises(FederationError, match="no arrays"):
        Layout.of({})


# Cohorts. Arrays are wider than a block, so that every loop over blocks has a second turn and a rest.

SHAPES = {"kernel": (300, 301), "bias": (7,), "scale": (), "none": (0, 2), "odd": (1025,)}


def cohort_of(clients, dtype=np.float32, scale=1.0, seed=0, specification=SHAPES):
    rng = np.random.default_rng(seed)

    def model(size):
        return {
            name: np.asarray(size * rng.standard_normal(shape)).astype(dtype) for name, shape in specification.items()
        }

    sent = model(1.0)
    layout = Layout.of(sent)
    trained = [{name: sent[name] + change for name, change in model(scale).items()} for _ in range(clients)]
    return Cohort.of(layout, layout.rows(sent), tuple(layout.rows(arrays) for arrays in trained))


def matrix(cohort):
    """U, written down in float64."""
    sent = np.concatenate(cohort.sent, dtype=np.float64)
    return np.array([np.concatenate(row, dtype=np.float64) for row in cohort.rows]) - sent


def assembled(cohort, weights):
    """The weighted sum of a cohort, from its spans."""
    scratch = scratch_for(cohort.layout)
    total = np.full(cohort.layout.size, np.nan)
    for span in spans(cohort.layout.sizes):
        offset = cohort.layout.offsets[span.layer]
        total[offset + span.start : offset + span.stop] = weighted_sum(
            cohort, span, weights.astype(scratch.dtype), scratch, out=np.full(len(span), np.nan, scratch.dtype)
        )
    return total


def test_norms_are_those_of_float64():
    def check(clients, dtype, scale):
        cohort = cohort_of(clients, dtype, scale)
        expected = np.linalg.norm(matrix(cohort), axis=1)
        assert cohort.norms.dtype == np.float64
        assert np.all(np.abs(cohort.norms - expected) < NORM_ERROR * expected)

    half = product([1, 2, 9], [np.float16], [1.0])
    assert failures([*half, *product([1, 2, 9], [np.float32, np.float64], [1e-4, 1.0, 1e4])], check) == []


def test_norms_hold_for_updates_whose_rounding_errors_all_point_one_way():
    def check(value):
        layout = Layout.of({"a": np.zeros(100_003, np.float32)})
        row = (np.full(100_003, value, np.float32),)
        cohort = Cohort.of(layout, (np.zeros(100_003, np.float32),), (row,))
        expected = float(np.float32(value)) * np.sqrt(100_003)
        assert abs(cohort.norms[0] - expected) < NORM_ERROR * expected

    assert failures([0.1, 1 / 3, 1 + 2.0**-12, 1e-3, 3e5], check) == []


def test_norms_are_small_where_models_are_large_and_nearly_agree():
    cohort = cohort_of(3, scale=1e-3)
    assert np.all(np.linalg.norm(np.concatenate(cohort.sent)) > 100 * cohort.norms)
    assert np.allclose(cohort.norms, np.linalg.norm(matrix(cohort), axis=1), rtol=NORM_ERROR, atol=0)


def test_an_update_of_nothing_has_norm_zero_and_one_that_is_not_finite_has_no_finite_norm():
    layout = Layout.of({"a": np.zeros(3, np.float32)})
    sent = (np.ones(3, np.float32),)
    bad = [np.array([1, np.nan, 1], np.float32), np.array([np.inf, 1, 1], np.float32)]
    norms = Cohort.of(layout, sent, (sent, (bad[0],), (bad[1],))).norms
    assert norms[0] == 0 and not np.isfinite(norms[1:]).any()


def test_weighted_sums_are_those_of_brute_force():
    def check(dtype, error, clients):
        cohort = cohort_of(clients, dtype)
        weights = np.random.default_rng(1).uniform(-1, 1, clients)
        total = assembled(cohort, weights)
        assert np.isfinite(total).all()
        assert np.allclose(total, weights @ matrix(cohort), rtol=0, atol=error * np.sqrt(clients))

    cases = [(*first, last) for first, last in product([(np.float32, 1e-5), (np.float64, 1e-13)], [1, 5, 33])]
    assert failures(cases, check) == []


def test_updates_are_the_columns_of_the_matrix():
    cohort = cohort_of(3, np.float64)
    scratch = np.empty(3 * 100_000)
    for span in spans(cohort.layout.sizes):
        offset = cohort.layout.offsets[span.layer]
        columns = matrix(cohort)[:, offset + span.start : offset + span.stop]
        assert np.array_equal(updates(cohort.rows, cohort.sent, span, scratch), columns)


@given(st.dictionaries(names, st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1), st.integers(1, 50))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_spans_cover_every_parameter_once(specification, width):
    layout = Layout.of({name: np.zeros(shape, np.float32) for name, shape in specification.items()})
    covered = np.zeros(layout.size, int)
    for span in spans(layout.sizes, width):
        assert 0 < span.stop - span.start <= width
        assert span.stop <= layout.offsets[span.layer + 1] - layout.offsets[span.layer]
        covered[layout.offsets[span.layer] + span.start : layout.offsets[span.layer] + span.stop] += 1
    assert np.all(covered == 1)


def test_part_of_a_cohort_keeps_its_figures():
    cohort = cohort_of(4)
    part = cohort.take(np.array([2, 0]))
    assert len(part) == 2 and part.rows == (cohort.rows[2], cohort.rows[0])
    assert list(part.norms) == [cohort.norms[2], cohort.norms[0]]
    assert np.array_equal(matrix(part), matrix(cohort)[[2, 0]])


def test_an_empty_cohort_sums_to_nothing():
    cohort = cohort_of(0)
    assert len(cohort) == 0 and cohort.norms.shape == (0,)
    assert not assembled(cohort, np.zeros(0)).any()


@pytest.mark.parametrize(("dtype", "shape"), [("i1," * 10**6, (1,)), ("float32", (1,) * 10**6)], ids=["dtype", "shape"])
def test_a_dtype_or_shape_of_millions_of_parts_is_not_parsed(monkeypatch, dtype, shape):
    """NumPy took 14 seconds and 700 MB for one of 8 MB."""
    monkeypatch.setattr(np, "dtype", lambda _: pytest.fail("it is parsed"))
    with pytest.raises(ValueError, match="not that of an array of numbers"):
        view(FlowerArray(dtype, shape, "numpy.ndarray", b""))


def test_an_archive_is_no_array(monkeypatch):
    """A list of a million files in it took eleven seconds."""
    file = io.BytesIO()
    np.savez(file, array=np.zeros(3, np.float32))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it is opened"))
    with pytest.raises(ValueError, match=r"no \.npy file"):
        view(FlowerArray("float32", (3,), "numpy.ndarray", file.getvalue()))

"""Odd files among images: whatever one of them is, the images beside it are used."""

import gzip
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import cv2
import nibabel
import numpy as np
import pyarrow as pa
import pytest
from hospital import RAMP, dicom, scans, written
from mri import folders, grey, jpeg, mri, parquet, put, scan
from pyarrow import parquet as pq
from support import failures

from cloister.tasks.datasets.alzheimer_mri import CLASSES
from cloister.tasks.pictures import decode
from cloister.tasks.pictures import sources as parquet_files
from cloister.tasks.pictures.decode import MAX_SCANS, PNG, SCAN
from cloister.tasks.pictures.finding import every_picture


def a_link_to_no_name(place, _):
    (place / "x.png").symlink_to("n" * 300)


def a_link_beside(place, _):
    (place.parent / "scan").symlink_to("n" * 300)


def a_pipe(place, _):
    os.mkfifo(place / "x.png")


def a_device(place, _):
    (place / "x.png").symlink_to("/dev/zero")


def an_endless_file(place, _):
    with (place / "x.png").open("wb") as file:
        file.truncate(10**11)


def a_folder_of_its_kind(place, _):
    (place / "x.png").mkdir()


def a_table_that_is_none(place, _):
    (place.parent / "x.parquet").write_bytes(b"no parquet")


def a_table(place, _):
    parquet(place.parent / "x.parquet", [1])


def a_pipe_for_a_table(place, _):
    os.mkfifo(place.parent / "x.parquet")


def an_image_above(place, _):
    put(place.parent.parent / place.name / "x.png", jpeg(scan(0, 0)))


def a_scan_without_a_suffix(place, _):
    put(place / "ST0" / "IM0", written(dicom(RAMP.astype(np.uint8), 8)))


def a_scan_without_a_scale(place, _):
    put(place / "1.2.840.1", written(dicom()))


def a_list_of_a_medium(place, _):
    put(place / "DICOMDIR", written(dicom()))


def a_picture_of_unstated_bits(place, _):
    put(place / "x.png", cv2.imencode(".png", RAMP)[1].tobytes())


def a_picture_of_two_pages(place, _):
    put(place / "x.tif", bytes(cv2.imencodemulti(".tiff", [RAMP.astype(np.uint8)] * 2)[1]))


def a_picture_of_glass(place, _):
    put(place / "x.png", cv2.imencode(".png", np.zeros((4, 4, 4), np.uint8))[1].tobytes())


def a_volume(place, _):
    put(place / "x.nii.gz", gzip.compress(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), None).to_bytes()))


def a_folder_that_is_closed(_, monkeypatch):
    listed = Path.iterdir

    def closed(folder):
        if folder.name == "others":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", closed)


def a_link_to_all(place, _):
    (place.parent / "train").symlink_to(".")


def a_link_to_its_class(place, _):
    (place.parent / place.name.upper()).symlink_to(place.name)


def table_of(image, label=1, metadata=None):
    """An oddity: a parquet file with one row."""

    def odd(place, _):
        columns = {"image": pa.array([image[0]], image[1]), "label": pa.array([label], *image[2:])}
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), place.parent / "x.parquet")

    return odd


INNER = pa.struct([("bytes", pa.binary())])
COLUMNS = {
    "a list": table_of(([{"bytes": b"x"}], pa.list_(INNER))),
    "other bytes": table_of(({"nbytes": 3}, pa.struct([("nbytes", pa.int64())]))),
    "inner bytes": table_of(({"a": {"bytes": b"x"}}, pa.struct([("a", INNER)]))),
    "an image of no date": table_of((2**30, pa.date32())),
    "a label of no date": table_of((b"x", pa.binary(), pa.date32()), 2**30),
    "a label of no time": table_of((b"x", pa.binary(), pa.timestamp("us")), 2**62),
    "names without end": table_of((b"x", pa.binary()), 1, {"huggingface": "[" * 100_000}),
}

ODD = [
    a_link_to_no_name,
    a_link_beside,
    a_pipe,
    a_device,
    an_endless_file,
    a_folder_of_its_kind,
    a_table_that_is_none,
    a_table,
    a_pipe_for_a_table,
    an_image_above,
    a_scan_without_a_suffix,
    a_scan_without_a_scale,
    a_list_of_a_medium,
    a_picture_of_unstated_bits,
    a_picture_of_two_pages,
    a_picture_of_glass,
    a_volume,
    a_folder_that_is_closed,
    a_link_to_all,
    a_link_to_its_class,
]


@pytest.mark.parametrize(
    "odd",
    [
        *(pytest.param(odd, id=odd.__name__) for odd in ODD),
        *(pytest.param(odd, id=name) for name, odd in COLUMNS.items()),
    ],
)
def test_whatever_lies_in_a_folder_the_images_beside_it_are_used(tmp_path, monkeypatch, odd):
    root = folders(tmp_path / "published" / "images")
    put(root / "others" / "x.jpg", jpeg(scan(0, 0)))
    whole = mri("").rows(root)
    odd(root / CLASSES[0], monkeypatch)
    found = mri("").rows(root)
    good = np.isfinite(found.x[:, 0, 0, 0])
    assert 0 <= len(found.x) - len(whole.x) <= 1
    kept = iter([row.tobytes() for row in found.x[good]])
    assert all(row.tobytes() in kept for row in whole.x), "all of them, in their order"


def nifti(shape):
    return nibabel.Nifti1Image(np.zeros(shape, np.uint8), np.eye(4)).to_bytes()


BYTES = (RAMP // 16).astype(np.uint8)
COLOURS = np.stack([BYTES] * 3, axis=-1)
MISSHAPEN = {
    "no rows": nifti((0, 5, 6)),
    "no columns": nifti((4, 0, 6)),
    "no slices": nifti((4, 5, 0)),
    "a flat file of nothing": nifti((0, 5)),
    "unstated frames": written(dicom(BYTES, 8, PixelData=BYTES.tobytes() * 2)),
    "three unstated frames": written(dicom(BYTES[:, :3].copy(), 8, PixelData=BYTES[:, :3].tobytes() * 3)),
    "unstated frames in colour": written(dicom(COLOURS, 8, PixelData=COLOURS.tobytes() * 2)),
}
"""Images that libraries read as arrays of another number of axes, or of no pixels."""
FORMATS = {
    **{suffix: cv2.imencode(suffix, COLOURS)[1].tobytes() for suffix in (".png", ".jpg", ".tiff", ".bmp")},
    ".pgm": cv2.imencode(".pgm", BYTES)[1].tobytes(),
    ".dcm": written(dicom(BYTES, 8)),
    ".nii": nifti((4, 5, 1)),
    ".nii.gz": gzip.compress(nifti((4, 5, 1)), mtime=0),
}


def flipped(content, rng):
    """The bytes of a file, one to three of which have another value; most of them are in the header."""
    changed = bytearray(content)
    for place in rng.integers(min(len(changed), rng.choice([64, 400, 2**20])), size=rng.integers(1, 4)):
        changed[place] ^= rng.integers(1, 256)
    return bytes(changed)


@pytest.mark.parametrize("slices", [None, 1, 2])
def test_images_beside_malformed_ones_keep_their_rows(tmp_path, monkeypatch, slices):
    """One exception beside `Unreadable` would leave the client without examples."""
    monkeypatch.setenv("CLOISTER_CACHE", str(tmp_path / "caches"))
    root, rng, task = tmp_path / "images", np.random.default_rng(slices or 0), scans(slices=slices, window=(0, 1))
    for name, shade in (("b", 50), ("y", 200)):
        put(root / "ill" / name, written(dicom(np.full((slices or 1, 4, 4), shade, np.uint8), 8)))
    whole = task.rows(root).x
    for number, content in enumerate(MISSHAPEN.values()):
        put(root / "ill" / f"m{number:02}{'.dcm' if content[128:132] == b'DICM' else '.nii'}", content)
    for suffix, content in FORMATS.items():
        for number in range(14):
            put(root / "ill" / f"n{number:02}{suffix}", flipped(content, rng))
    found = task.rows(root).x
    assert len(found) == 2 + len(MISSHAPEN) + 14 * len(FORMATS)
    np.testing.assert_array_equal(found[[0, -1]], whole)
    assert np.isnan(found[1 : 1 + len(MISSHAPEN)]).all()


def test_any_failure_of_a_library_is_one_damaged_image(monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(decode, "_fitted", fails)
    assert all(grey(content, (4, 4)) is None for content in FORMATS.values())


def test_images_of_one_parquet_file_that_cannot_be_read_are_left_out_alone(tmp_path, monkeypatch):
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", [0, 1, 2, 3])
    opened = parquet_files._opened

    class Torn:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def iter_batches(self, *given, columns, **others):
            if columns != ["label"]:
                raise OSError("a page is damaged")
            return self._file.iter_batches(*given, columns=columns, **others)

    whole = mri("").rows(tmp_path)
    (tmp_path / "b.parquet").touch()
    monkeypatch.setattr(
        parquet_files, "_opened", lambda path: (Torn if path.stem == "b" else lambda it: it)(opened(path))
    )
    found = mri("").rows(tmp_path)
    np.testing.assert_array_equal(found.x[:4], whole.x[:4])
    assert len(found.x) == 8 and np.isnan(found.x[4:]).all()


@pytest.mark.parametrize(("width", "length"), [(2**23, 100), (8, 0x7FFFFF00)], ids=["pixels", "a part"])
def test_an_image_that_says_it_is_huge_takes_no_memory(width, length):
    """One of a few bytes took four gigabytes, and would have had a small node killed."""
    header = PNG + b"\0\0\0\rIHDR" + width.to_bytes(4) + (128).to_bytes(4) + b"\x08\0\0\0\0" + bytes(4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert grey(header + length.to_bytes(4) + b"IDAT" + bytes(104), (8, 8)) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "in kilobytes"


def test_an_image_that_the_decoder_leaves_in_colour_is_damaged():
    """Its numbers would lie in the rows of other images."""
    assert grey(b"PF\n4 4\n-1.0\n" + np.full(48, 25500.0, np.float32).tobytes(), (4, 4)) is None


def test_images_beside_folders_without_end_are_used(tmp_path):
    root = folders(tmp_path / "images")
    deepest = root / CLASSES[-1]
    for _ in range(1500):
        deepest /= "d"
        os.mkdir(deepest)
    try:
        put(deepest / "x.png", jpeg(scan(0, 0)))
        assert len(every_picture(root, CLASSES).pictures) == 5 * len(CLASSES) + 1
    finally:
        subprocess.run(["rm", "-r", root / CLASSES[-1] / "d"], check=True)  # Python's own ways recurse


def progressive(scans):
    """A JPEG whose last scan stands this many times."""
    whole = cv2.imencode(".jpg", scan(0, 0), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    last = whole[whole.rindex(SCAN) : -2]
    return whole[:-2] + last * (scans - whole.count(SCAN)) + whole[-2:]


def test_a_jpeg_of_endless_scans_is_damaged():
    """One of 265 kB took 2.8 s, and more with each hundred bytes."""
    assert grey(progressive(MAX_SCANS), (8, 8)) is not None
    assert grey(progressive(MAX_SCANS + 1), (8, 8)) is None


def test_a_png_of_endless_parts_is_damaged(monkeypatch):
    whole = cv2.imencode(".png", scan(0, 0))[1].tobytes()
    empty = bytes(4) + b"teXt" + zlib.crc32(b"teXt").to_bytes(4)
    many = whole[:33] + 20 * empty + whole[33:]
    assert grey(many, (8, 8)) is not None
    monkeypatch.setattr(decode, "MAX_CHUNKS", 20)
    assert grey(many, (8, 8)) is None


def jpeg_2000(side, precinct):
    """An empty grey image, of which every `2 ** precinct` pixels squared are coded by themselves: 146 bytes."""
    size = struct.pack(">HIIIIIIIIH3B", 0, side, side, 0, 0, side, side, 0, 0, 1, 7, 1, 1)
    coded = struct.pack(">BBHBBBBBBB", 1, 0, 1, 0, 0, 0, 0, 0, 1, precinct)
    parts = [(b"\xff\x51", size), (b"\xff\x52", coded), (b"\xff\x5c", b"\x40\x40")]
    head = b"".join(mark + struct.pack(">H", len(part) + 2) + part for mark, part in parts)
    tile = struct.pack(">HHIBB", 10, 0, 12 + 2 + 64, 0, 1)
    return b"\xff\x4f" + head + b"\xff\x90" + tile + b"\xff\x93" + bytes(64) + b"\xff\xd9"


def test_other_kinds_of_images_are_damaged():
    """Refuse JPEG 2000: 146 bytes of one took 13 s and 2 GB at 2048 by 2048, and 36 s and 6 GB at 4096 by 4096."""
    assert cv2.imdecode(np.frombuffer(jpeg_2000(16, 0), np.uint8), cv2.IMREAD_GRAYSCALE) is not None
    assert grey(jpeg_2000(16, 0), (8, 8)) is None
    for kind in (".jp2", ".webp", ".gif", ".avif", ".hdr", ".ras"):
        if cv2.haveImageWriter(kind):
            whole = np.asarray(cv2.imencode(kind, np.repeat(scan(0, 0)[:, :, None], 3, axis=2))[1]).tobytes()
            assert grey(whole, (8, 8)) is None


KNOWN = {
    "png": (".png", []),
    "jpeg": (".jpg", []),
    "bmp": (".bmp", []),
    "pgm": (".pgm", []),
    "pgm in words": (".pgm", [cv2.IMWRITE_PXM_BINARY, 0]),
    "tiff as it is": (".tiff", [cv2.IMWRITE_TIFF_COMPRESSION, 1]),
    "tiff, LZW": (".tiff", [cv2.IMWRITE_TIFF_COMPRESSION, 5]),
    "tiff, deflate": (".tiff", [cv2.IMWRITE_TIFF_COMPRESSION, 32946]),
    "tiff, the new deflate": (".tiff", [cv2.IMWRITE_TIFF_COMPRESSION, 8]),
    "tiff, PackBits": (".tiff", [cv2.IMWRITE_TIFF_COMPRESSION, 32773]),
}


def test_kinds_that_programs_write_are_read():
    def check(kind):
        image = scan(0, 0)
        whole = cv2.imencode(KNOWN[kind][0], image, KNOWN[kind][1])[1].tobytes()
        found = grey(whole, image.shape)
        assert found is not None and abs(255 * found - image).max() <= (20 if kind == "jpeg" else 0.001)
        assert grey(b"", (8, 8)) is grey(b"x" + whole, (8, 8)) is None

    assert not failures(KNOWN, check)


def tiff(way, order="<", kind=3, count=1):
    """A grey image of one pixel, stored in this way."""
    fields = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 8), (278, 3, 1, 1)]
    fields += [(279, 4, 1, 1), *([] if way is None else [(259, kind, count, way)])]
    packed = [
        struct.pack(order + "HHI", *field[:3]) + struct.pack(order + ("I" if field[1] == 4 else "H2x"), field[3])
        for field in sorted(fields)
    ]
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HI", 42, 10) + b"\x80\0"
    return head + struct.pack(order + "H", len(fields)) + b"".join(packed) + bytes(4)


def test_a_tiff_that_holds_images_of_another_kind_is_damaged():
    """One JPEG may be every one of its tiles: 16 by 16 pixels of 90 scans, for each of a quarter of a million."""

    def check(order):
        for read in (None, 1):
            assert grey(tiff(read, order), (1, 1)) == np.float32(128 / 255)
        assert not any(
            decode.is_safe_to_decode(tiff(way, order)) for way in (0, 2, 3, 4, 6, 7, 34712, 34925, 50000, 50001)
        )
        assert not decode.is_safe_to_decode(tiff(1, order, kind=4)) and not decode.is_safe_to_decode(
            tiff(1, order, count=2)
        )
        assert not decode.is_safe_to_decode(tiff(1, order).replace(b"\0*", b"\0+").replace(b"*\0", b"+\0"))

    assert not failures(["<", ">"], check)


def test_an_image_of_one_endless_row_is_damaged():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from mri import grey; import cv2, numpy as np\n"
        "found = [grey(cv2.imencode('.bmp', np.zeros(shape, np.uint8))[1].tobytes(), (8, 8)) for shape in SHAPES]\n"
        "print([each is not None for each in found])"
    )
    shapes = [(1, 8), (1, 2**16), (1, 2**16 + 1), (2**16, 1), (2**16 + 1, 1)]
    # In a process of its own: OpenCV asks for the limits once, when it is loaded.
    said = subprocess.run(
        [sys.executable, "-c", code.replace("SHAPES", str(shapes))], check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == "[True, True, False, True, False]"


@pytest.mark.parametrize("kind", [pa.binary(), INNER])
def test_a_cell_that_is_too_large_is_damaged_by_itself(tmp_path, monkeypatch, kind):
    images = [jpeg(scan(0, number)) for number in range(3)]
    images[1] += bytes(10_000)
    cells = images if kind == pa.binary() else [{"bytes": each} for each in images]
    pq.write_table(pa.table({"image": pa.array(cells, kind), "label": [0, 1, 2]}), tmp_path / "x.parquet")
    monkeypatch.setattr(parquet_files, "MAX_BYTES", 10_000)
    assert [bool(each) for each in every_picture(tmp_path, CLASSES).contents()] == [True, False, True]


def test_rows_that_would_take_too_much_memory_together_are_damaged(tmp_path, monkeypatch):
    """A gigabyte of zeros has 33 kB in a file."""
    images = [jpeg(scan(0, 0))] * 7 + [bytes(10**6)] * 7
    parquet(tmp_path / "x.parquet", [0] * 14, images=images)  # in two groups of rows
    monkeypatch.setattr(parquet_files, "MAX_IMAGE_BYTES", 10**5)
    assert [bool(each) for each in every_picture(tmp_path, CLASSES).contents()] == [True] * 7 + [False] * 7


@pytest.mark.parametrize(("column", "limit"), [("image", "MAX_IMAGE_BYTES"), ("label", "MAX_LABEL_BYTES")])
def test_a_cell_that_is_stored_once_for_many_rows_is_not_read_for_all_of_them_at_once(
    tmp_path, monkeypatch, column, limit
):
    """One of 16 MB for 64 rows has 1 kB in a file, and took 1.6 GB as an image and 3.1 GB as a label."""
    cells = {"image": [jpeg(scan(0, 0))] * 64, "label": [0] * 64}
    cells[column] = [{"image": bytes(3000), "label": "x" * 3000}[column]] * 64
    pq.write_table(pa.table(cells), tmp_path / "x.parquet", use_dictionary=True)
    monkeypatch.setattr(parquet_files, limit, 10_000)
    sizes, batches = [], parquet_files._batches

    def weighed(file, number, name, rows):
        for batch in batches(file, number, name, rows):
            sizes.append(batch.nbytes if name.startswith(column) else 0)
            yield batch

    monkeypatch.setattr(parquet_files, "_batches", weighed)
    found = every_picture(tmp_path, CLASSES)
    assert len(list(found.contents())) == len(found.pictures) == 64
    assert 0 < max(sizes) <= 1.2 * 10_000


def test_labels_of_a_file_that_take_too_much_memory_leave_it_out_alone(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", [0, 1])
    long = pa.table({"image": [jpeg(scan(0, 0))] * 2, "label": ["x" * 3000, "y" * 3000]})
    pq.write_table(long, tmp_path / "b.parquet")
    monkeypatch.setattr(parquet_files, "MAX_LABEL_BYTES", 5000)
    assert len(every_picture(tmp_path, CLASSES).pictures) == 2


@pytest.mark.parametrize("rows", [1, 9])
def test_a_file_that_lies_about_its_rows_moves_no_others(tmp_path, monkeypatch, rows):
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", [0, 1, 2, 3])
    images = list(every_picture(tmp_path, CLASSES).contents())
    monkeypatch.setattr(
        parquet_files, "_images", lambda path: iter((images * 2)[:rows] if path.stem == "a" else images[4:])
    )
    found = list(every_picture(tmp_path, CLASSES).contents())
    assert len(found) == 8 and found[4:] == images[4:]

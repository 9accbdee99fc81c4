"""Images as hospitals have them: each is read with its full depth, or refused with a remedy."""

import gzip
import struct
import sys

import cv2
import nibabel
import numpy as np
import pytest
from hospital import RAMP, SIDE, dicom, written
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless
from support import failures

from cloister.tasks.pictures.decode import MAX_SCANS, decode
from cloister.tasks.pictures.form import Form, Unreadable
from cloister.utils.errors import ConfigError

SHARES = RAMP / 4095
COLOURS = np.stack([RAMP // 16, RAMP[::-1] // 16, RAMP.T // 16], axis=-1).astype(np.uint8)
"""Red, green and blue."""


def encoded(suffix, image, *options):
    return cv2.imencode(suffix, image, list(options))[1].tobytes()


def read(content, **form):
    return decode(content, Form((SIDE, SIDE), **form))[0]


def reason(content, **form):
    with pytest.raises(Unreadable) as refused:
        read(content, **form)
    return str(refused.value)


def close(found, expected):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=1e-6)
    return True


# PNG, TIFF, PGM


def test_twelve_bits_in_files_of_sixteen_keep_their_depth():
    def check(suffix):
        content = encoded(suffix, RAMP)
        assert close(read(content, bits=12), SHARES) and len(np.unique(read(content, bits=12))) == RAMP.size
        assert close(read(content, bits=16), RAMP / 65535)
        assert "such as bits = 12" in reason(content)
        assert "samples above 1023, the largest of 10 bits" in reason(content, bits=10)

    assert not failures([".png", ".tiff"], check)


def test_a_pgm_states_its_own_white():
    for white in (15, 255, 4095):
        samples = (np.arange(16) * white // 15).reshape(SIDE, SIDE)
        head = b"P5 # a scan\n4 4\n%d\n" % white
        content = head + samples.astype(">u2" if white > 255 else np.uint8).tobytes()
        assert close(read(content), samples / white) and close(read(content, bits=16), samples / white)


def test_eight_bits_and_twelve_of_one_picture_are_the_same():
    ramp = np.arange(16, dtype=np.uint16).reshape(SIDE, SIDE)
    assert close(read(encoded(".png", ramp.astype(np.uint8) * 17), bits=12), read(encoded(".png", ramp * 273), bits=12))


def test_colours_are_red_green_and_blue_or_grey():
    wide = COLOURS.astype(np.uint16) * 257
    for suffix, colours in ((".png", COLOURS), (".bmp", COLOURS), (".png", wide), (".tiff", wide)):
        content = encoded(suffix, colours[..., ::-1])
        assert close(read(content, channels=3, bits=16), COLOURS / 255)
        assert close(read(content, bits=16), COLOURS / 255 @ [0.299, 0.587, 0.114])
    assert close(read(encoded(".png", RAMP), bits=12, channels=3), np.repeat(SHARES[..., None], 3, axis=2))


def test_alpha_is_dropped_where_all_is_opaque_and_refused_elsewhere():
    for colours, full in ((COLOURS, 255), (COLOURS.astype(np.uint16) * 257, 65535)):
        alpha = np.full((SIDE, SIDE, 1), full, colours.dtype)
        assert close(read(encoded(".png", np.dstack([colours[..., ::-1], alpha])), channels=3, bits=16), COLOURS / 255)
        alpha[1, 2] = full - 1
        assert "has transparent pixels" in reason(encoded(".png", np.dstack([colours, alpha])), bits=16)
    plain = encoded(".png", RAMP.astype(np.uint8))
    assert "has a transparent colour" in reason(with_chunk(plain, b"tRNS", b"\0\1"))


def with_chunk(png, name, content):
    """A PNG with another chunk behind its header."""
    import zlib

    chunk = len(content).to_bytes(4) + name + content + zlib.crc32(name + content).to_bytes(4)
    return png[:33] + chunk + png[33:]


def tiff(sample, bits=8, photometric=1, more=()):
    """A TIFF of one pixel."""
    fields = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, bits), (262, 3, 1, photometric), (273, 4, 1, 8)]
    fields += [(277, 3, 1, 1), (278, 3, 1, 1), (279, 4, 1, 2), *more]
    packed = [
        struct.pack("<HHI", *field[:3]) + struct.pack("<I" if field[1] == 4 else "<H2x", field[3])
        for field in sorted(fields)
    ]
    return b"II*\0" + struct.pack("<IH", 10, sample) + struct.pack("<H", len(fields)) + b"".join(packed) + bytes(4)


def test_a_tiff_may_have_white_as_zero():
    for bits, white in ((8, 255), (16, 65535)):
        for photometric, expected in ((1, 40 / white), (0, 1 - 40 / white)):
            found = decode(tiff(40, bits, photometric), Form((1, 1), bits=16))[0]
            assert found == pytest.approx(expected, abs=1e-6)


def test_several_pages_are_chosen_by_the_task():
    content = bytes(cv2.imencodemulti(".tiff", [RAMP, RAMP[::-1], RAMP.T])[1])
    assert "has 3 pages or slices: slices = 1 in the task takes the middle one" in reason(content, bits=12)
    assert close(read(content, bits=12, slices=1), SHARES[::-1])
    assert close(read(content, bits=12, slices=2), [SHARES, SHARES.T]) and read(content, bits=12, slices=2).ndim == 4
    assert "has 3 pages or slices, fewer than slices = 4" in reason(content, bits=12, slices=4)


REFUSED = {
    "numbers with a fraction": (
        encoded(".tiff", SHARES.astype(np.float32)),
        "is a TIFF of 32 bits a sample: save it with 8 or 16",
    ),
    "numbers with a sign": (encoded(".tiff", RAMP.astype(np.int16)), "no whole numbers of 8 or 16 bits without sign"),
    "packed bits": (tiff(40, 12), "is a TIFF of 12 bits a sample: save it with 8 or 16"),
    "alpha in a TIFF": (tiff(40, more=[(338, 3, 1, 2)]), "is a TIFF with transparency"),
    "JPEG in a TIFF": (tiff(40, more=[(259, 3, 1, 7)]), "is a TIFF of a compression that is not read: save it unc"),
    "an animation": (with_chunk(encoded(".png", COLOURS), b"acTL", bytes(8)), "is an animated PNG"),
    "nothing": (b"", "is absent, unreadable or empty"),
    "text": (b"a report", "is damaged, too large, or of another kind"),
    "half a PNG": (encoded(".png", COLOURS)[:60], "is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pictures_that_would_be_read_wrongly_are_refused_with_the_reason(name):
    content, expected = REFUSED[name]
    assert expected in reason(content, bits=16)


def test_pages_of_a_tiff_that_name_each_other_end():
    content = bytearray(tiff(40))
    content[-4:] = (10).to_bytes(4, "little")
    assert "pages or slices" in reason(bytes(content))


# DICOM

UNITS = RAMP * 2.0 - 1024
RESCALED = {"RescaleSlope": 2, "RescaleIntercept": -1024}
SIGNED = (RAMP.astype(np.int16) - 2048) & 0xFFF
"""Signed samples of twelve bits, without their sign in the upper four."""


def item(**said):
    data = Dataset()
    for name, value in said.items():
        setattr(data, name, value)
    return data


def window(center, width, **said):
    return {"WindowCenter": center, "WindowWidth": width} | said


def functional_groups():
    units = item(RescaleSlope=2, RescaleIntercept=-1024, RescaleType="HU")
    first, second = (item(FrameVOILUTSequence=[item(**window(c, 400, VOILUTFunction="LINEAR_EXACT"))]) for c in (0, 40))
    return {
        "SharedFunctionalGroupsSequence": [item(PixelValueTransformationSequence=[units])],
        "PerFrameFunctionalGroupsSequence": [first, second],
    }


TABLE = item(LUTDescriptor=[16, 0, 8], LUTData=[255 - 17 * each for each in range(16)])
TABLE["LUTDescriptor"].VR = TABLE["LUTData"].VR = "US"
DICOM = {
    "twelve bits": (dicom(), {"bits": 12}, SHARES),
    "white first": (dicom(PhotometricInterpretation="MONOCHROME1"), {"bits": 12}, 1 - SHARES),
    "signed": (dicom(SIGNED.astype(np.int16)), {"bits": 12}, SHARES),
    "an overlay in the upper bits": (dicom(RAMP | 0x8000), {"bits": 12}, SHARES),
    "a falling scale": (dicom(RescaleSlope=-1, RescaleIntercept=0), {"bits": 12}, 1 - SHARES),
    "eight bits": (dicom(COLOURS[..., 0].copy(), 8), {}, COLOURS[..., 0] / 255),
    "a window": (dicom(**window(1000, 801)), {}, np.clip((RAMP - 999.5) / 800 + 0.5, 0, 1)),
    "a window, and units": (dicom(**RESCALED, **window(40, 401)), {}, np.clip((UNITS - 39.5) / 400 + 0.5, 0, 1)),
    "a window and white first": (
        dicom(**RESCALED, **window(40, 401), PhotometricInterpretation="MONOCHROME1"),
        {},
        1 - np.clip((UNITS - 39.5) / 400 + 0.5, 0, 1),
    ),
    "an exact window": (
        dicom(**RESCALED, **window(40, 400, VOILUTFunction="LINEAR_EXACT")),
        {},
        np.clip((UNITS - 40) / 400 + 0.5, 0, 1),
    ),
    "a sigmoid": (
        dicom(**window(2000, 900, VOILUTFunction="SIGMOID")),
        {},
        1 / (1 + np.exp(-4 * (RAMP - 2000.0) / 900)),
    ),
    "a threshold": (dicom(**window(1000, 1)), {}, RAMP > 999.5),
    "the first of two windows": (dicom(**window([1000, 40], [801, 80])), {}, np.clip((RAMP - 999.5) / 800 + 0.5, 0, 1)),
    "the task's window before the file's": (
        dicom(**RESCALED, **window(40, 400)),
        {"window": (-160.0, 240.0)},
        np.clip((UNITS + 160) / 400, 0, 1),
    ),
    "a table": (
        dicom(np.arange(16, dtype=np.uint16).reshape(SIDE, SIDE), VOILUTSequence=[TABLE]),
        {},
        (255 - 17 * np.arange(16)) / 255,
    ),
    "a window of each frame": (
        dicom(np.stack([RAMP, RAMP.T]), **functional_groups()),
        {"slices": 2},
        [np.clip(UNITS / 400 + 0.5, 0, 1), np.clip((UNITS.T - 40) / 400 + 0.5, 0, 1)],
    ),
    "the middle of three frames": (dicom(np.stack([RAMP, RAMP.T, RAMP])), {"bits": 12, "slices": 1}, SHARES.T),
    "colours": (dicom(COLOURS, 8), {"channels": 3}, COLOURS / 255),
    "colours to grey": (dicom(COLOURS, 8), {}, COLOURS / 255 @ [0.299, 0.587, 0.114]),
    "planes of colours": (
        dicom(COLOURS, 8, PlanarConfiguration=1, PixelData=COLOURS.transpose(2, 0, 1).tobytes()),
        {"channels": 3},
        COLOURS / 255,
    ),
}


@pytest.mark.parametrize("name", DICOM)
def test_dicom_is_read_as_its_header_says(name):
    data, form, expected = DICOM[name]
    assert close(read(written(data), **form), expected)


def test_luminance_and_chrominance_become_colours():
    grey = np.repeat(COLOURS[..., :1], 3, axis=2)
    chrominance = grey.copy()
    chrominance[..., 1:] = 128
    content = written(dicom(chrominance, 8, PhotometricInterpretation="YBR_FULL"))
    np.testing.assert_allclose(read(content, channels=3), grey / 255, atol=1 / 255)


def test_compressed_dicom_is_read_if_that_is_cheap():
    data = dicom()
    data.compress(RLELossless, generate_instance_uid=False)
    assert close(read(written(data), bits=12), SHARES)
    smooth = np.full((16, 16), 100, np.uint8)
    data = dicom(smooth, 8, PixelData=encapsulate([encoded(".jpg", smooth, cv2.IMWRITE_JPEG_QUALITY, 100)]))
    data.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    data["PixelData"].VR, data["PixelData"].is_undefined_length = "OB", True
    np.testing.assert_allclose(read(written(data)), 100 / 255, atol=2 / 255)


def jpeg_in_dicom(pixels, photometric):
    smooth = np.full((16, 16, 3), (10, 100, 200), np.uint8)
    data = dicom(smooth, 8, PixelData=encapsulate([pixels]), PhotometricInterpretation=photometric)
    data.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    data["PixelData"].VR, data["PixelData"].is_undefined_length = "OB", True
    return written(data)


def test_a_jpeg_in_dicom_keeps_its_colours_and_has_the_limits_of_a_jpeg():
    whole = encoded(".jpg", np.full((16, 16, 3), (200, 100, 10), np.uint8), cv2.IMWRITE_JPEG_QUALITY, 100)
    for photometric in ("YBR_FULL_422", "YBR_FULL"):
        found = read(jpeg_in_dicom(whole, photometric), channels=3)
        np.testing.assert_allclose(found, np.broadcast_to(np.array([10, 100, 200]) / 255, found.shape), atol=3 / 255)
    scan = whole[whole.index(b"\xff\xda") : -2]
    endless = whole[:-2] + scan * MAX_SCANS + whole[-2:]
    assert "pixels are damaged or too large" in reason(jpeg_in_dicom(endless, "YBR_FULL_422"))


def without(name):
    data = dicom()
    delattr(data, name)
    return written(data)


def deflated():
    data = dicom()
    data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    return written(data)


def jpeg_2000():
    data = dicom(PixelData=encapsulate([b"\xff\x4f\xff\x51"]))
    data.file_meta.TransferSyntaxUID = JPEG2000Lossless
    data["PixelData"].VR, data["PixelData"].is_undefined_length = "OB", True
    return written(data)


UNREAD = {
    "no scale": (written(dicom()), "is a DICOM file of 12 bits without a window, where the task states bits = None"),
    "another depth": (written(dicom(stored=16)), "of 16 bits without a window, where the task states bits = None"),
    "JPEG 2000": (jpeg_2000(), "is a DICOM file in JPEG 2000 Image Compression (Lossless Only): decompress it"),
    "deflated": (deflated(), "is a deflated DICOM file: decompress it"),
    "a palette": (written(dicom(PhotometricInterpretation="PALETTE COLOR")), "another photometric interpretation"),
    "a report": (without("PixelData"), "without pixels of whole numbers, such as a report"),
    "half a file": (written(dicom())[:-10], "is a DICOM file whose pixels are damaged"),
    "no header": (bytes(128) + b"DICMnonsense" * 9, "DICOM file"),
    "no width": (written(dicom(**window(40, 0))), "a window of no width: state window = (low, high)"),
    "high bits": (written(dicom(HighBit=15)), "samples are not the lowest bits"),
    "frames": (written(dicom(np.stack([RAMP] * 5))), "has 5 pages or slices"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_dicom_that_would_be_read_wrongly_is_refused_with_the_reason(name):
    content, expected = UNREAD[name]
    assert expected in reason(content)


def test_no_message_quotes_the_header(recwarn):
    content = written(dicom(PatientName="Erika^Mustermann", PhotometricInterpretation="MUSTERMANN"))
    assert "ERIKA" not in reason(content).upper() and "MUSTERMANN" not in reason(content) and not recwarn


# NIfTI

VOLUME = np.arange(SIDE**3, dtype=np.int16).reshape(SIDE, SIDE, SIDE) - 20


def nifti(array, affine=None, **header):
    image = nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine)
    for name, value in header.items():
        image.header[name] = value
    return image.to_bytes()


def plane(volume, number):
    """A slice with the front of the body up and its left at the left."""
    return volume[:, :, number].T[::-1]


def test_nifti_is_read_in_its_units():
    scaled = np.clip((VOLUME + 10) / 20, 0, 1)
    content = nifti(VOLUME)
    for same in (content, gzip.compress(content), nibabel.Nifti2Image(VOLUME, np.eye(4)).to_bytes()):
        assert close(read(same, slices=1, window=(-10, 10)), plane(scaled, 2))
        assert close(read(same, slices=4, window=(-10, 10)), [plane(scaled, number) for number in range(4)])
    own = nifti(VOLUME, cal_min=-10, cal_max=10)
    assert close(read(own, slices=1), plane(scaled, 2))
    assert close(read(own, slices=1, window=(0, 5)), plane(np.clip(VOLUME / 5, 0, 1), 2))
    flat = nifti(VOLUME[:, :, 0].astype(np.uint8))
    assert close(read(flat), VOLUME[:, :, 0].astype(np.uint8).T[::-1] / 255)


def test_values_of_nifti_are_rescaled():
    image = nibabel.Nifti1Image(VOLUME, np.eye(4))
    image.header.set_slope_inter(0.5, 3)
    assert close(read(image.to_bytes(), slices=1, window=(0, 20)), plane(np.clip((VOLUME * 0.5 + 3) / 20, 0, 1), 2))


def test_one_slice_is_the_same_in_every_order_of_the_axes():
    expected = read(nifti(VOLUME), slices=4, window=(-20, 40))
    for flip in ((1, 1, 1), (-1, 1, -1), (1, -1, 1)):
        for axes in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
            turned = VOLUME[tuple(slice(None, None, sign) for sign in flip)].transpose(axes)
            affine = np.zeros((4, 4))
            for place, axis in enumerate(axes):
                affine[axis, place] = flip[axis]
            affine[3, 3] = 1
            assert close(read(nifti(turned, affine), slices=4, window=(-20, 40)), expected), (flip, axes)


@pytest.mark.parametrize(
    ("content", "form", "expected"),
    [
        (nifti(VOLUME), {"slices": 1}, "without cal_min and cal_max: state window = (low, high)"),
        (nifti(VOLUME), {"window": (0, 1)}, "has 4 pages or slices"),
        (nifti(np.stack([VOLUME] * 2, axis=-1)), {"window": (0, 1)}, "of another kind than one volume"),
        (nifti(VOLUME)[:-9], {"slices": 1, "window": (0, 1)}, "is a NIfTI file that is cut off"),
        (gzip.compress(b"text"), {}, "is no NIfTI file in gzip"),
        (nifti(np.full((4, 4), np.nan, np.float32)), {"window": (0, 1)}, "not finite"),
    ],
    ids=["no scale", "slices", "a series", "cut off", "another gzip", "NaN"],
)
def test_nifti_that_would_be_read_wrongly_is_refused_with_the_reason(content, form, expected):
    assert expected in reason(content, **form)


# Both


@pytest.mark.parametrize(
    ("package", "content"), [("pydicom", written(dicom())), ("nibabel", nifti(VOLUME))], ids=["pydicom", "nibabel"]
)
def test_without_a_package_the_reason_names_the_extra(monkeypatch, package, content):
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"pydicom": "dicom", "nibabel": "nifti"}[package]
    assert f"needs {package}: pip install 'cloister-fl[{extra}]'" in reason(content)


def test_constants_of_a_task_are_checked():
    for wrong in ({"channels": 2}, {"bits": 17}, {"bits": 0}, {"window": (1.0, 1.0)}, {"slices": 0}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"^{name} = .* of the task is not valid: it must be "):
            Form((SIDE, SIDE), **wrong)


def test_images_of_another_size_keep_their_depth():
    large = np.kron(RAMP, np.ones((3, 3), np.uint16))
    assert close(read(encoded(".png", large), bits=12), SHARES)
    assert close(read(written(dicom(large)), bits=12), SHARES)

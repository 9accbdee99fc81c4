"""Decoding of DICOM and NIfTI files to grey or colour from 0 to 1.

**DICOM** has stored values, then values in their units. The source is DICOM PS3.3, C.7.6.3 (pixels), C.11.1 (units) and
C.11.2 (windows). Files are uncompressed, or in RLE or baseline JPEG. Other decoders take long and much memory for a few
bytes.

**NIfTI**, plain or in gzip, gives slices across the body's long axis, seen from above. In a slice the front of the body
is up, and its left is at the left, independently of the order of the file's axes. An image of one slice is taken as its
file has it.
"""

import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.pictures.form import BYTE_BITS, Form, Note, Unreadable, unreadable

if TYPE_CHECKING:
    from pydicom import Dataset
import math
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibabel import Nifti1Image

PREAMBLE, MAGIC = 128, b"DICM"
"""Bytes before the first four of the format, and these four."""
HEAD = 4096
"""Bytes from the start in which the transfer syntax stands."""
DEFLATED = b"1.2.840.10008.1.2.1.99"
"""Transfer syntax of a file whose whole content is compressed, to an unknown size."""
JPEG, RLE, MAX_RLE_BYTES = "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.5", 2**25
"""Transfer syntaxes of compressed frames that are read, and the largest size of a frame in RLE: it may grow 64-fold."""
DECODED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2", JPEG, RLE)
"""Transfer syntaxes that are read: uncompressed (implicit, explicit, big-endian), and those two."""
GREY, COLOUR = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422")
"""Photometric interpretations that are read. Of MONOCHROME1 the smallest value is white."""


def is_dicom(encoded: bytes) -> bool:
    """Return whether bytes are the start of a DICOM file."""
    return encoded[PREAMBLE : PREAMBLE + len(MAGIC)] == MAGIC


def read_dicom(
    encoded: bytes, form: Form, max_pixels: int, is_safe: Callable[[bytes], bool]
) -> tuple[list[NDArray[np.float32]], Note]:
    """Return the frames of a DICOM file that an example takes, from 0 (black) to 1 (white), and what was found.

    The scale of grey frames is the task's window, or else the file's own window or table, or else the stored bits.

    Args:
        encoded: the bytes of the file.
        form: of the task.
        max_pixels: of one frame.
        is_safe: returns whether a JPEG can be decoded in bounded time and memory.

    Raises:
        Unreadable: the file cannot be used.
    """
    dataset = _dataset(encoded)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of pydicom quote the header
            return _frames(dataset, form, max_pixels, is_safe)
    except Exception as error:  # pydicom raises many types
        raise unreadable(error, "is a DICOM file whose pixels are damaged") from None


def patient_of(encoded: bytes) -> str:
    """Return the PatientID of a DICOM file; empty if there is none.

    Args:
        encoded: the bytes of the file.

    Raises:
        Unreadable: the header is damaged, or pydicom is not installed.
    """
    dataset = _dataset(encoded, specific_tags=["PatientID"], stop_before_pixels=True)
    try:
        return str(dataset.get("PatientID") or "").strip()
    except Exception:  # pydicom converts an element when it is read
        raise Unreadable("is a damaged DICOM file") from None


def _dataset(encoded: bytes, **given: bool | list[str]) -> "Dataset":
    try:
        import pydicom
    except ImportError:
        raise Unreadable("is a DICOM file, which needs pydicom: pip install 'cloister-fl[dicom]'") from None
    if DEFLATED in encoded[:HEAD]:
        raise Unreadable("is a deflated DICOM file: decompress it, for example with gdcmconv --raw")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pydicom.dcmread(BytesIO(encoded), **given)
    except Exception as error:
        raise unreadable(error, "is a damaged DICOM file") from None


def _frames(
    dataset: "Dataset", form: Form, max_pixels: int, is_safe: Callable[[bytes], bool]
) -> tuple[list[NDArray[np.float32]], Note]:
    from pydicom.encaps import get_frame
    from pydicom.pixels import pixel_array

    if "PixelData" not in dataset:
        raise Unreadable("is a DICOM file without pixels of whole numbers, such as a report")
    syntax = dataset.file_meta.TransferSyntaxUID
    if syntax not in DECODED:
        name = syntax.name if syntax.is_transfer_syntax else "an unknown transfer syntax"
        raise Unreadable(f"is a DICOM file in {name}: decompress it, for example with gdcmconv --raw")
    photometric, stored = str(dataset.PhotometricInterpretation), int(dataset.BitsStored)
    if photometric not in GREY + COLOUR:
        raise Unreadable(f"is a DICOM file of another photometric interpretation than {', '.join(GREY + COLOUR)}")
    if dataset.BitsAllocated not in (8, 16) or not 1 < stored <= dataset.BitsAllocated or dataset.HighBit != stored - 1:
        raise Unreadable("is a DICOM file whose samples are not the lowest bits of 8 or 16: convert it to one of these")
    height, width, count = int(dataset.Rows), int(dataset.Columns), int(dataset.get("NumberOfFrames") or 1)
    if height * width > max_pixels:
        raise Unreadable("is too large")
    frames, scale = list[NDArray[np.float32]](), ""
    for number in form.chosen(count):
        if syntax in (JPEG, RLE):
            frame = get_frame(dataset.PixelData, number, number_of_frames=count)
            if not (is_safe(frame) if syntax == JPEG else len(frame) <= MAX_RLE_BYTES):
                raise Unreadable("is a DICOM file whose pixels are damaged or too large")
        samples = pixel_array(dataset, index=number if count > 1 else None)
        if samples.shape != (height, width, *([3] if photometric in COLOUR else [])):
            raise Unreadable("is a DICOM file with other pixels than its header states")
        if photometric in COLOUR:
            _refuse_unstated(stored, form)
            grey, scale = samples / (2.0**stored - 1), f"{stored} bits"
        else:
            grey, scale = _grey(dataset, number, samples, form)
        frames.append((1 - grey if photometric == "MONOCHROME1" else grey).astype(np.float32))
    return frames, Note("DICOM", scale, 3 if photometric in COLOUR else 1, count, height, width)


def _grey(dataset: "Dataset", number: int, samples: NDArray, form: Form) -> tuple[NDArray[np.float64], str]:
    """Return a frame from 0 to 1, before a MONOCHROME1 is inverted, and the source of its scale."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    stored = int(dataset.BitsStored)
    modality = _stating(dataset, number, "PixelValueTransformationSequence", "RescaleSlope")
    values = apply_modality_lut(samples, modality).astype(np.float64)
    if form.window is not None:
        low, high = form.window
        return np.clip((values - low) / (high - low), 0, 1), "window of the task"
    shown = _stating(dataset, number, "FrameVOILUTSequence", "WindowCenter")
    if shown.get("WindowCenter") is not None and shown.get("WindowWidth") is not None:
        return _windowed(values, shown), "window of each file"
    if dataset.get("VOILUTSequence"):
        entry_bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        return apply_voi(values.astype(np.int64), dataset) / (2.0**entry_bits - 1), "table of each file"
    _refuse_unstated(stored, form)
    # A linear rescaling changes the unit and not the range: only its sign counts.
    least = -(2 ** (stored - 1)) if dataset.PixelRepresentation else 0
    share = (samples.astype(np.float64) - least) / (2**stored - 1)
    return (1 - share if float(modality.get("RescaleSlope", 1)) < 0 else share), f"{stored} bits"


def _refuse_unstated(stored: int, form: Form) -> None:
    """Refuse a scale that follows from the stored bits alone, which differ between machines."""
    if stored > BYTE_BITS and form.bits != stored:
        raise Unreadable(
            f"is a DICOM file of {stored} bits without a window, where the task states bits = {form.bits}: state "
            f"window = (low, high), in the file's units, or bits = {stored}"
        )


def _stating(dataset: "Dataset", number: int, sequence: str, keyword: str) -> "Dataset":
    """Return the part of the header with a keyword: that of all frames, of this one, or else the whole header."""
    for place, item in (("SharedFunctionalGroupsSequence", 0), ("PerFrameFunctionalGroupsSequence", number)):
        groups = dataset.get(place) or []
        inner = groups[item].get(sequence) if item < len(groups) else None
        if inner and keyword in inner[0]:
            return inner[0]
    return dataset


def _windowed(values: NDArray[np.float64], header: "Dataset") -> NDArray[np.float64]:
    """Return values from 0 to 1 by the first window of a header (C.11.2.1.2 and C.11.2.1.3)."""
    center, width = (float(np.atleast_1d(header[key].value)[0]) for key in ("WindowCenter", "WindowWidth"))
    function = header.get("VOILUTFunction") or "LINEAR"
    if not np.isfinite((center, width)).all() or width < (1 if function == "LINEAR" else np.finfo(float).tiny):
        raise Unreadable("is a DICOM file with a window of no width: state window = (low, high) in the task")
    if function == "SIGMOID":
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-4 * (values - center) / width))
    if function == "LINEAR_EXACT":
        return np.clip((values - center) / width + 0.5, 0, 1)
    if width == 1:
        return (values > center - 0.5).astype(np.float64)
    return np.clip((values - (center - 0.5)) / (width - 1) + 0.5, 0, 1)


GZIP, GZIP_FORMAT = b"\x1f\x8b", 31
"""First bytes of gzip, and zlib's number for it."""
NIFTI_MAGIC = {b"n+1\0": (344, "Nifti1Image"), b"n+2\0": (4, "Nifti2Image")}
"""First four bytes of each version of the format -> their place, and its class in nibabel."""
AS_STORED = np.array([[0, 1], [1, 1], [2, 1]], np.float64)
"""Orientation in nibabel's terms that changes no axis."""
UPWARDS, AXES = 2, 3
"""Number of the body's long axis in nibabel, and the number of axes of a volume."""


def is_nifti(encoded: bytes) -> bool:
    """Return whether bytes are a NIfTI file, or in gzip."""
    return encoded.startswith(GZIP) or _class_of(encoded) is not None


def _class_of(content: bytes) -> str | None:
    return next((name for magic, (at, name) in NIFTI_MAGIC.items() if content[at : at + len(magic)] == magic), None)


def read_nifti(encoded: bytes, form: Form, max_bytes: int, max_pixels: int) -> tuple[list[NDArray[np.float32]], Note]:
    """Return the slices of a NIfTI file that an example takes, from 0 to 1, and what was found.

    The scale is the task's window, or else the file's own (`cal_min`, `cal_max`), or that of unscaled bytes.

    Args:
        encoded: the bytes of the file.
        form: of the task.
        max_bytes: of the file without its compression.
        max_pixels: of one slice.

    Raises:
        Unreadable: the file cannot be used.
    """
    try:
        import nibabel
    except ImportError:
        raise Unreadable("is a NIfTI file, which needs nibabel: pip install 'cloister-fl[nifti]'") from None
    try:
        plain = encoded
        if encoded.startswith(GZIP):
            plain = zlib.decompressobj(GZIP_FORMAT).decompress(encoded, max_bytes + 1)
        name = _class_of(plain)
        if len(plain) > max_bytes or name is None:
            raise Unreadable(f"is no NIfTI file in gzip of at most {max_bytes >> 20} MiB")
        image = getattr(nibabel, name).from_bytes(plain)
        if image.dataobj.offset + math.prod(image.shape) * image.get_data_dtype().itemsize > len(plain):
            raise Unreadable("is a NIfTI file that is cut off")
        return _slices(image, form, max_pixels)
    except Exception as error:  # nibabel raises many types
        raise unreadable(error, "is a damaged NIfTI file") from None


def _slices(image: "Nifti1Image", form: Form, max_pixels: int) -> tuple[list[NDArray[np.float32]], Note]:
    import nibabel

    shape = (*image.shape, 1, 1)[:AXES]
    is_volume = len(image.shape) >= AXES - 1 and math.prod(image.shape) == math.prod(shape) > 0
    if not is_volume or image.get_data_dtype().kind not in "iuf":
        raise Unreadable("is a NIfTI file of another kind than one volume of numbers: save each volume by itself")
    low, high, scale = float(image.header["cal_min"]), float(image.header["cal_max"]), "window of each file"
    if form.window is not None:
        (low, high), scale = form.window, "window of the task"
    elif not low < high:
        if image.get_data_dtype() != np.uint8 or (image.dataobj.slope, image.dataobj.inter) != (1, 0):
            raise Unreadable("is a NIfTI file without cal_min and cal_max: state window = (low, high) in the task")
        low, high, scale = 0, 2**BYTE_BITS - 1, f"{BYTE_BITS} bits"
    orientation = AS_STORED if shape[-1] == 1 else nibabel.io_orientation(image.affine)
    if not np.isfinite(orientation).all():
        raise Unreadable("is a NIfTI file whose affine matrix gives no orientation")
    axis = int(np.argmax(orientation[:, 0] == UPWARDS))
    count, planes = shape[axis], list[NDArray[np.float32]]()
    if math.prod(shape) // count > max_pixels:
        raise Unreadable("is too large")
    for number in form.chosen(count):
        at = number if orientation[axis, 1] > 0 else count - 1 - number
        where, thin = [slice(None)] * len(image.shape), list(shape)
        thin[axis] = 1
        if axis < len(where):
            where[axis] = slice(at, at + 1)
        slab = np.asarray(image.dataobj[tuple(where)], np.float64).reshape(thin)
        plane = nibabel.apply_orientation(slab, orientation)[:, :, 0].T[::-1]
        planes.append(np.clip((plane - low) / (high - low), 0, 1).astype(np.float32))
    return planes, Note("NIfTI", scale, 1, count, *planes[0].shape)

"""Decoding of NIfTI files, plain or in gzip: slices across the body's long axis, seen from above.

In a slice the front of the body is up, and its left is at the left, independently of the order of the file's axes. An
image of one slice is taken as its file has it.
"""

import math
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.pictures.form import BYTE_BITS, Form, Note, Unreadable, unreadable

if TYPE_CHECKING:
    from nibabel import Nifti1Image

GZIP, GZIP_FORMAT = b"\x1f\x8b", 31
"""First bytes of gzip, and zlib's number for it."""
MAGIC = {b"n+1\0": (344, "Nifti1Image"), b"n+2\0": (4, "Nifti2Image")}
"""First four bytes of each version of the format -> their place, and its class in nibabel."""
AS_STORED = np.array([[0, 1], [1, 1], [2, 1]], np.float64)
"""Orientation in nibabel's terms that changes no axis."""
UPWARDS, AXES = 2, 3
"""Number of the body's long axis in nibabel, and the number of axes of a volume."""


def is_nifti(encoded: bytes) -> bool:
    """Return whether bytes are a NIfTI file, or in gzip."""
    return encoded.startswith(GZIP) or _class_of(encoded) is not None


def _class_of(content: bytes) -> str | None:
    return next((name for magic, (at, name) in MAGIC.items() if content[at : at + len(magic)] == magic), None)


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
    low, high, scale = _range_of(image, form)
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


def _range_of(image: "Nifti1Image", form: Form) -> tuple[float, float, str]:
    """Return the values that become 0 and 1, and their source."""
    if form.window is not None:
        return (*form.window, "window of the task")
    low, high = float(image.header["cal_min"]), float(image.header["cal_max"])
    if low < high:
        return low, high, "window of each file"
    is_scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    if image.get_data_dtype() == np.uint8 and not is_scaled:
        return 0, 2**BYTE_BITS - 1, f"{BYTE_BITS} bits"
    raise Unreadable("is a NIfTI file without cal_min and cal_max: state window = (low, high) in the task")

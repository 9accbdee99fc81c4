"""Tiny images in the formats that hospitals have, and a task that reads them."""

from io import BytesIO

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from cloister.config.run import TaskConfig
from cloister.tasks.base import Recipe
from cloister.tasks.pictures.task import PictureTask

SIDE = 4
RAMP = (np.arange(SIDE * SIDE, dtype=np.uint16) * 273).reshape(SIDE, SIDE)
"""Sixteen values of twelve bits, from 0 to 4095."""


def dicom(samples=RAMP, stored=12, **said):
    """A DICOM dataset of one grey frame, several frames of shape (n, h, w), or colours of shape (h, w, 3)."""
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = SecondaryCaptureImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = generate_uid(entropy_srcs=["a"])
    coloured = samples.ndim == 3 and samples.shape[-1] == 3
    data.Rows, data.Columns = samples.shape[:2] if coloured else samples.shape[-2:]
    if samples.ndim == 3 and not coloured:
        data.NumberOfFrames = len(samples)
    data.SamplesPerPixel, data.PhotometricInterpretation = (3, "RGB") if coloured else (1, "MONOCHROME2")
    if coloured:
        data.PlanarConfiguration = 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 8 * samples.itemsize, stored, stored - 1
    data.PixelRepresentation = int(samples.dtype.kind == "i")
    data.PixelData = samples.tobytes()
    for name, value in said.items():
        setattr(data, name, value)
    return data


def written(data):
    """The bytes of a DICOM file."""
    file = BytesIO()
    data.save_as(file, enforce_file_format=True)
    return file.getvalue()


def scans(config=None, **attributes):
    """A task of two classes, whose images have four rows and columns."""
    own = {
        "recipe": Recipe(1, 1, 0.1),
        "classes": 2,
        "class_names": ("healthy", "ill"),
        "usual_size": SIDE,
        "models": ("none",),
        "build": lambda self: None,
    }
    return type("Scans", (PictureTask,), own | attributes)(TaskConfig(name="scans", **(config or {})))

"""Small sets of images in the layouts that users have."""

import json
from pathlib import Path

import cv2
import numpy as np

from cloister.config.run import TaskConfig
from cloister.tasks.datasets.alzheimer_mri import CLASSES, AlzheimerMri
from cloister.tasks.pictures.decode import decode
from cloister.tasks.pictures.form import Form, Unreadable

SIZE = 18
"""The smallest that the network takes."""


def mri(path, **config):
    return AlzheimerMri(TaskConfig(name="alzheimer-mri", data_path=str(path), **({"image_size": SIZE} | config)))


def scan(label, number, shape=(20, 24)):
    """Noise around a grey value that tells the class."""
    rng = np.random.default_rng([label, number])
    return np.clip(40 + 50 * label + rng.normal(0, 10, shape), 0, 255).astype(np.uint8)


def grey(encoded, shape):
    """The grey values of an image of this shape; None if it cannot be used."""
    try:
        return decode(encoded, Form(shape))[0][..., 0]
    except Unreadable:
        return None


def jpeg(image):
    return cv2.imencode(".jpg", image)[1].tobytes()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def folders(root, count=5, classes=CLASSES, parts=("",), shape=(20, 24)):
    """A folder per class of `count` JPEGs, below `train` and `test` if those are the parts."""
    for place, part in enumerate(parts):
        for label, name in enumerate(classes):
            for number in range(count):
                image = scan(label, 100 * place + number, shape)
                put(Path(root) / part / name / f"scan ({number}).jpg", jpeg(image))
    return Path(root)


def parquet(path, labels, names=None, images=None):
    """A file as Hugging Face writes it; without `names` it does not say what its labels mean."""
    import pyarrow as pa
    from pyarrow import parquet

    encoded = images or [jpeg(scan(label, number)) for number, label in enumerate(labels)]
    table = pa.table({"image": [{"bytes": each, "path": "x.jpg"} for each in encoded], "label": labels})
    if names is not None:
        facts = {"info": {"features": {"label": {"names": list(names), "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(facts)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=7)
    return path

"""Average payments to US hospitals (CMS, 2011), and synthetic linear data of two populations.

In hospital charges no constant is computed from the data. A service is an index, a place is the coordinates of its
ZIP code. Powers of ten bring all inputs to the range of the units (Galli et al., 2023, §5.2).

In linear data half of the users follow one optimum, half the other (Galli et al., 2023, §5.1). The paper does not
state the distribution of the inputs. Here it is N(0, I), so that the noise of mean ½ moves no optimum.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Regression
from cloister.tasks.partition import SPLIT_SEED, numbered
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

if TYPE_CHECKING:
    import keras
    import pandas


CHARGES = "IPPS_DRG_CSV.zip"
PLACES = "us_zip_latlon.csv"
DIAGNOSES = (194, 292, 392, 690)
"""Simple pneumonia; heart failure and shock; oesophagitis and digestive disorders; kidney and urinary tract infections:
the groups that most hospitals report. The position in this tuple is the service index.
"""
COLUMNS = ("DRG Definition", "Provider Id", "Provider Zip Code", "Average Total Payments")
"""Columns of the table of charges. Spaces around their names are ignored."""
DEGREES = 10.0
DOLLARS = 1000.0
HELD_OUT = 0.3
"""Share of the hospitals that only test."""


class HospitalCharges(Regression):
    """Average total payment, in thousands of dollars. x is float32 of shape (n, 3).

    Inputs: service index (0 to 3), longitude and latitude in tens of degrees.
    """

    recipe = Recipe(local_epochs=5, batch_size=4, learning_rate=0.003)
    partition = "natural"
    input_shape = (3,)
    models = ("network", "keras")
    public = True

    def load(self) -> Dataset:
        """Return training and test data, split by hospital.

        Seven tenths of the hospitals train, and three tenths test. Each has up to four examples.
        """
        folder = expanded(self.config.data_path)
        missing = [name for name in (CHARGES, PLACES) if not self.config.data_path or not (folder / name).is_file()]
        if missing:
            raise DataError(
                f"task.data-path = {self.config.data_path!r} must be a folder with {' and '.join(missing)}: the "
                "inpatient charges of fiscal year 2011 as the Centers for Medicare and Medicaid Services publish them "
                "(a CSV file in a zip), and a table of ZIP codes with columns zip, lat and lon"
            )
        charges, places = _read(folder / CHARGES, COLUMNS), _read(folder / PLACES, ("zip", "lat", "lon"))
        try:
            services = charges["DRG Definition"].str.extract(r"^\s*(\d+)", expand=False).astype(int)
            rows = charges.assign(service=services)[services.isin(DIAGNOSES)]
            placed = rows.merge(places, left_on="Provider Zip Code", right_on="zip", how="left", validate="many_to_one")
            service = np.searchsorted(DIAGNOSES, placed["service"])
            x = np.stack([service, placed["lon"] / DEGREES, placed["lat"] / DEGREES], axis=1).astype(np.float32)
            y = (placed["Average Total Payments"].to_numpy(np.float64) / DOLLARS).astype(np.float32)
        except (ValueError, AttributeError, TypeError):
            # Not chained: the message of pandas quotes cells.
            raise DataError(f"task.data-path: {folder}: a column holds what is not of its kind") from None
        if not len(x):
            raise DataError(f"task.data-path: {folder / CHARGES} has no row of the diagnoses {DIAGNOSES}")
        unknown = ~np.isfinite(x).all(axis=1)
        if unknown.any():
            raise DataError(f"task.data-path: {folder / PLACES} lacks the ZIP codes of {unknown.sum()} rows of charges")
        if not np.isfinite(y).all():
            raise DataError(f"task.data-path: {folder / CHARGES} has rows without an average total payment")
        examples, owners = Examples(x, y), placed["Provider Id"].to_numpy()
        hospitals = numbered(owners, np.random.default_rng(SPLIT_SEED))
        training = round((1 - HELD_OUT) * (hospitals.max() + 1))
        train, test = np.flatnonzero(hospitals < training), np.flatnonzero(hospitals >= training)
        return Dataset(
            examples.take(train),
            examples.take(test),
            owners=hospitals[train],
            test_owners=hospitals[test] - training,
            groups={"hospital": hospitals[train]},
        )

    def build(self) -> Model:
        """Return a 3-2-1 network with ReLU (11 parameters), in NumPy or in Keras."""
        if self.model_name == "keras":
            from cloister.tasks.keras_model import KerasModel

            return KerasModel(charges_network)
        from cloister.tasks.numpy_models import HiddenLayerRegression

        return HiddenLayerRegression(features=3, hidden=2)


def _read(path: Path, columns: tuple[str, ...]) -> "pandas.DataFrame":
    """Read columns of a CSV file, zipped or not."""
    import pandas

    try:
        frame = pandas.read_csv(path, usecols=lambda name: name.strip() in columns)
    except Exception:  # pandas raises a different type for a broken zip, another encoding and a missing table
        raise DataError(
            f"task.data-path: {path} is not a CSV file with a header, or a zip with one such file"
        ) from None
    frame = frame.rename(columns=str.strip)
    missing = [name for name in columns if name not in frame]
    if missing:
        raise DataError(f"task.data-path: {path} lacks the columns {', '.join(missing)}")
    return frame


def charges_network() -> "keras.Model":
    """Return a 3-2-1 network with ReLU."""
    import keras

    return keras.Sequential(
        [
            keras.Input((3,), name="service"),
            keras.layers.Dense(2, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="output"),
        ],
        name="network",
    )


OPTIMA = np.array([[5.0, 6.0], [4.0, -4.5]])
"""θ* of the users with even and with odd numbers."""
USERS = 100
SAMPLES = 10
"""Number of examples of each user."""
DATA_SEED = 0
"""A constant, so that every run of every strategy uses the same users."""


class Linear(Regression):
    """y = x·θ* + u, u uniform on [0, 1). x is float32 of shape (n, 2). Training users and test users are disjoint."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.1)
    partition = "natural"
    input_shape = (OPTIMA.shape[1],)
    models = ("linear", "keras")
    public = True
    bundled = True

    def load(self) -> Dataset:
        """Return `USERS` training users and as many test users.

        Each has `SAMPLES` examples.
        """
        rng = np.random.default_rng(DATA_SEED)
        users = np.repeat(np.arange(USERS), SAMPLES)
        train, test = _drawn(users, rng), _drawn(users, rng)
        return Dataset(train, test, owners=users, test_owners=users, groups={"user": users})

    def build(self) -> Model:
        """Return a linear map with two parameters and no intercept, in NumPy or Keras."""
        if self.model_name == "keras":
            from cloister.tasks.keras_model import KerasModel

            return KerasModel(linear_network)
        from cloister.tasks.numpy_models import LinearRegression

        return LinearRegression(features=OPTIMA.shape[1])


def _drawn(users: NDArray, rng: np.random.Generator) -> Examples:
    x = rng.standard_normal((len(users), OPTIMA.shape[1]))
    y = np.vecdot(x, OPTIMA[users % len(OPTIMA)]) + rng.random(len(users))
    return Examples(x.astype(np.float32), y.astype(np.float32))


def linear_network() -> "keras.Model":
    """Return a linear map without an intercept."""
    import keras

    initial = keras.initializers.RandomNormal(stddev=1.0)
    return keras.Sequential(
        [
            keras.Input(OPTIMA.shape[1:], name="x"),
            keras.layers.Dense(1, use_bias=False, kernel_initializer=initial, name="linear"),
        ],
        name="linear",
    )

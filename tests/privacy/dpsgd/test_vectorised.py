"""Vectorised gradients of rows that an example names."""

import pytest
import tensorflow as tf

from cloister.privacy.dpsgd import vectorised

IDS = tf.constant([[0, 5], [1, -1], [2, 2]])
"""Of three examples. Some name no row of four. On a GPU they raise no exception."""


def of_each(dense):
    """Every example adds 1 to the rows that it names."""

    def of_one(ids):
        return dense(tf.IndexedSlices(tf.ones([2, 1]), ids, tf.constant([4, 1])))

    return tf.vectorized_map(of_one, IDS)[:, :, 0].numpy().tolist()


def test_an_example_names_no_row_of_another():
    assert of_each(lambda rows: vectorised._dense_gradients([rows])[0]) == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0]]


@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
def test_without_that_it_would():
    """Index 5 of the first example, which has rows 0 to 3, is row 1 of the second."""
    assert of_each(tf.convert_to_tensor)[1][1] == 2

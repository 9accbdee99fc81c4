"""The inside of a round on the server: Flower strategies that put a privacy mechanism around a Flower strategy."""

from cloister.aggregation.clustering import LaplaceClustering
from cloister.aggregation.constructors import GlobalDP, MetricDP
from cloister.aggregation.private_strategy import PrivateStrategy

__all__ = ["GlobalDP", "LaplaceClustering", "MetricDP", "PrivateStrategy"]

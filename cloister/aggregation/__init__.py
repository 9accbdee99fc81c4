"""Flower strategies that place a privacy mechanism around another Flower strategy."""

from cloister.aggregation.clustering import LaplaceClustering
from cloister.aggregation.constructors import GlobalDP, MetricDP
from cloister.aggregation.private_strategy import PrivateStrategy

__all__ = ["GlobalDP", "LaplaceClustering", "MetricDP", "PrivateStrategy"]

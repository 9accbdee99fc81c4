"""Decorators: Flower strategies that put a privacy mechanism around a Flower strategy."""

from cloister.aggregation.clustering import LaplaceClustering
from cloister.aggregation.global_dp import GlobalDP
from cloister.aggregation.metric_dp import MetricDP

__all__ = ["GlobalDP", "LaplaceClustering", "MetricDP"]

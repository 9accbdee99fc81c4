"""Decorators: Flower strategies that put a privacy mechanism around a Flower strategy."""

from cloister.privacy.decorators.clustering import LaplaceClustering
from cloister.privacy.decorators.global_dp import GlobalDP
from cloister.privacy.decorators.metric_dp import MetricDP

__all__ = ["GlobalDP", "LaplaceClustering", "MetricDP"]

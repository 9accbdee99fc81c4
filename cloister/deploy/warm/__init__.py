"""Warm nodes: libraries are imported once, and every message gets a process that is forked from that state.

Flower starts a new Python process for every message, which imports TensorFlow or PyTorch anew. There is no supported
way around it in flwr 1.41 and 1.42: its warm executors are for other kinds of tasks.
"""

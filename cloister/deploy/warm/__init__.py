"""A node whose clients start at once: libraries are imported once, and every message gets a process forked from that.

Flower starts a new Python process for every message, which imports TensorFlow anew. There is no supported way around
it in flwr 1.41 and 1.42: its warm executors are for other kinds of tasks.
"""

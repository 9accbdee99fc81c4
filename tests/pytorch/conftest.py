"""Settings of PyTorch for its tests."""

import importlib.util

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # threads of two tests wait for each other

"""Made-up notes, told apart by a small transformer whose adapters (LoRA, by `peft`) are trained alone."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from cloister import Dataset, Examples, Recipe, TorchTask

WORDS, LENGTH, WIDTH = 64, 12, 32
ALARMING = 8
"""Number of words, the first of the vocabulary, that urgent notes alone have."""


class Block(nn.Module):
    """Attention of one head and a hidden layer, each added to its inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hidden, self.output = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        """Return outputs in the shape of the inputs, (n, LENGTH, WIDTH)."""
        normal = self.first(x)
        scores = self.query(normal) @ self.key(normal).transpose(1, 2) / WIDTH**0.5
        x = x + torch.softmax(scores, -1) @ self.value(normal)
        return x + self.output(torch.relu(self.hidden(self.second(x))))


class Transformer(nn.Module):
    """Two blocks on words and their places, and a linear head on the mean of the places."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        """Return logits of shape (n, 2) for words of shape (n, LENGTH)."""
        return self.head(self.blocks(self.words(x) + self.places.weight).mean(1))


class NotesLora(TorchTask):
    """Adapters and the head travel. The body stays at the site: its weights are drawn by the seed of `build`."""

    recipe = Recipe(local_epochs=2, batch_size=16, learning_rate=0.01, optimizer="adam")
    classes, class_names = 2, ("calm", "urgent")
    input_shape, input_dtype = (LENGTH,), "int32"
    models = ("lora",)
    public = True

    def load(self) -> Dataset:
        """Return 320 notes to train on and 80 to test on."""
        rng = np.random.default_rng(0)
        return Dataset(notes(rng, 320), notes(rng, 80))

    def build(self) -> nn.Module:
        """Return the transformer in the form of `peft`. A body of your own is loaded from a file of the package."""
        adapters = LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["head"])
        return get_peft_model(Transformer(), adapters)


def notes(rng: np.random.Generator, count: int) -> Examples:
    """Return made-up notes as numbers of words, and whether each is urgent."""
    y = np.arange(count) % 2
    x = rng.integers(ALARMING, WORDS, (count, LENGTH))
    alarming = rng.random((count, LENGTH)) < 0.4 * y[:, None]
    x[alarming] = rng.integers(0, ALARMING, np.count_nonzero(alarming))
    return Examples(x.astype(np.int32), y)

"""The model of the server's task `digits` is softmax regression; here PyTorch trains it."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

app = ClientApp()
KERNEL, BIAS = "softmax/kernel", "softmax/bias"
"""What the server's task calls the arrays."""


def own_part(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this site; a real one would read its own file here."""
    x, y = load_digits(return_X_y=True)
    mine = np.arange(len(y)) % int(context.node_config["num-partitions"]) == int(context.node_config["partition-id"])
    return torch.tensor(x[mine] / 16, dtype=torch.float32), torch.tensor(y[mine])


@app.train()
def train(message: Message, context: Context) -> Message:
    """One pass over the site's rows, from the model that came."""
    sent = message.content["arrays"]
    model = torch.nn.Linear(64, 10)
    model.weight.data, model.bias.data = torch.tensor(sent[KERNEL].numpy().T), torch.tensor(sent[BIAS].numpy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = own_part(context)
    for rows in torch.randperm(len(y)).split(16):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    arrays = {KERNEL: model.weight.detach().numpy().T, BIAS: model.bias.detach().numpy()}
    record = ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})
    # No count of examples: under a guarantee the server weighs all sites the same.
    return Message(RecordDict({"arrays": record}), reply_to=message)

"""The model of the server's task `digits` is softmax regression; here scikit-learn trains it."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

app = ClientApp()
KERNEL, BIAS = "softmax/kernel", "softmax/bias"
"""What the server's task calls the arrays."""


def own_part(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """The rows of this site; a real one would read its own file here."""
    x, y = load_digits(return_X_y=True)
    mine = np.arange(len(y)) % int(context.node_config["num-partitions"]) == int(context.node_config["partition-id"])
    return x[mine] / 16, y[mine]


@app.train()
def train(message: Message, context: Context) -> Message:
    """One pass over the site's rows, from the model that came."""
    sent = message.content["arrays"]
    x, y = own_part(context)
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=0)
    model.partial_fit(x[:1], y[:1], classes=np.arange(10))
    model.coef_[:], model.intercept_[:] = sent[KERNEL].numpy().T, sent[BIAS].numpy()
    model.partial_fit(x, y)
    arrays = {KERNEL: model.coef_.T.astype(np.float32), BIAS: model.intercept_.astype(np.float32)}
    record = ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})
    # No count of examples: under a guarantee the server weighs all sites the same.
    return Message(RecordDict({"arrays": record}), reply_to=message)

"""The clients: each trains a linear classifier on its part of scikit-learn's digits."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

app = ClientApp()
CLASSES = np.arange(10)


def own_part(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """The rows of this client."""
    x, y = load_digits(return_X_y=True)
    mine = np.arange(len(y)) % int(context.node_config["num-partitions"]) == int(context.node_config["partition-id"])
    return x[mine] / 16, y[mine]


@app.train()
def train(message: Message, context: Context) -> Message:
    """One pass over the client's rows."""
    weights, biases = message.content["arrays"].to_numpy_ndarrays()
    x, y = own_part(context)
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=0)
    model.partial_fit(x[:1], y[:1], classes=CLASSES)
    model.coef_[:], model.intercept_[:] = weights.T, biases
    model.partial_fit(x, y)
    arrays = [model.coef_.T.astype(np.float32), model.intercept_.astype(np.float32)]
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The accuracy of the global model on the client's rows."""
    weights, biases = message.content["arrays"].to_numpy_ndarrays()
    x, y = own_part(context)
    accuracy = float(np.mean((x @ weights + biases).argmax(axis=1) == y))
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

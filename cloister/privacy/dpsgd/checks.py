"""Whether a model has per-example gradients that can be vouched for, and how they are to be computed.

What is known not to have them is refused by name (`refusals`). Everything else is tried on made-up examples (`trials`):
an example's gradient must not change with the other examples, and norms and sums must agree with TensorFlow's own
gradients of one example at a time. A model with a layer or loss that is not known to keep examples apart
(`known_layers`) is computed one unit at a time. Its layers are tried by themselves besides: where one mixes examples,
the model would be trained as another one.
"""

from collections.abc import Callable
from functools import partial

from cloister.core.errors import UnsupportedModel
from cloister.core.tensors import Network
from cloister.privacy.dpsgd.draws import draws_otherwise, seeds_of
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.known_layers import keeps_examples_apart
from cloister.privacy.dpsgd.probe import Probe, check_probe
from cloister.privacy.dpsgd.refusals import refuse_by_name, refusing_what_cannot_be_tried
from cloister.privacy.dpsgd.row_by_row import row_by_row
from cloister.privacy.dpsgd.trials import ModelTrials, Trial
from cloister.privacy.dpsgd.vectorised import Loss


def checked(model: Network, loss: Loss, probe: Probe) -> Gradients:
    """The fastest way to this model's per-example gradients that is right.

    Args:
        model: built, of one input and one output.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of a few made-up examples.

    Raises:
        UnsupportedModel: it has none, with the reason and what to use in its place.
        ConfigError: the probe has another number of examples, or the loss does not give a number for each.
    """
    check_probe(probe)
    refuse_by_name(model)
    with refusing_what_cannot_be_tried():
        trials = ModelTrials(model, loss, probe)
        apart = keeps_examples_apart(model, loss, probe[1].ndim) and trials.first.keeps_rows()
        if not apart:
            trials.refuse_coupled_layers()
        trials.refuse_coupling()
        make = partial(Gradients, model, loss, one_at_a_time=not apart)
        # A layer that is not known could write the states that others draw from.
        may_write = not apart and bool(seeds_of(model))
        alone = (
            may_write
            or draws_otherwise(model)
            or trials.first.shares_draws()
            or not trials.passes(Trial.is_batch_independent)
        )
        by_layer = None if alone else _by_layer(make, trials)
        if by_layer is None:
            return _as_a_whole(make, trials)
        # Tried beside the other, which computes the larger microbatches.
        by_row = _by_layer(make, trials, by_row=True) if apart and row_by_row(model) else None
        return by_row or by_layer


def _by_layer(make: Callable[..., Gradients], trials: ModelTrials, by_row: bool = False) -> Gradients | None:
    """The gradients layer by layer if they are right; None if they are not."""
    try:
        gradients = make(by_layer=True, by_row=by_row)
        return gradients if trials.passes(lambda trial: trial.agrees_by_layer(gradients)) else None
    except UnsupportedModel:
        raise
    except Exception:  # a layer that cannot be vectorised alone, for one
        return None


def _as_a_whole(make: Callable[..., Gradients], trials: ModelTrials) -> Gradients:
    gradients = make(by_layer=False)
    if not trials.passes(lambda trial: trial.agrees_as_a_whole(gradients)):
        raise UnsupportedModel("vectorised gradients of this model differ from those of one example at a time")
    return gradients

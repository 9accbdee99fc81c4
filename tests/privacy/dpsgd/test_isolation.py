"""Labels cover what data flow shows, operation by operation; what mixes units is refused."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import failures
from tensorflow.python.framework import op_callbacks

from cloister.privacy.dpsgd import isolation
from cloister.privacy.dpsgd.isolation import labels, prove
from cloister.privacy.dpsgd.isolation_rules import RULES
from cloister.privacy.dpsgd.labels import Mixes, NotIsolated, Rows, Unproved
from cloister.privacy.dpsgd.tracing import with_functions

layers, ops, raw = keras.layers, keras.ops, tf.raw_ops
UNITS = 3
W = tf.constant(np.random.default_rng(0).standard_normal((4, 4)), tf.float32)
IMAGES = (6, 4, 4, 2)


def chain(kind, inputs, attributes, outputs, op_name=None, graph=None):
    """Replace a sum of many terms by a chain, as the caller does."""
    if graph is None or kind != "AddN" or len(inputs) < 3:
        return None
    total = inputs[0]
    for one in inputs[1:]:
        total = raw.AddN(inputs=[total, one])
    return [total]


def traced(function, *specs, replaced=chain):
    op_callbacks.add_op_callback(replaced)
    try:
        return tf.function(function, autograph=False).get_concrete_function(*[tf.TensorSpec(*one) for one in specs])
    finally:
        op_callbacks.remove_op_callback(replaced)


def label(function, *shapes):
    """Label what a function gives for inputs with units along the first axis."""
    graph = traced(function, *[(shape, tf.float32) for shape in shapes]).graph
    given = {id(one): Rows(0, one.shape[0] // UNITS) for one in graph.inputs[: len(shapes)]}
    return labels(graph, UNITS, given, graph.outputs)


def refused(function, *shapes):
    with pytest.raises(NotIsolated) as caught:
        label(function, *(shapes or [(6, 4)]))
    assert "\n" not in str(caught.value)
    return caught.value


def slope(function):
    """Turn a function into its gradient, weighted by the function itself."""

    def backward(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            given = function(*inputs)
        return tape.gradient(given, inputs, output_gradients=tf.nest.map_structure(tf.sin, given))

    return backward


def covers(found, changed, unit):
    if found is None:
        return not changed.any()
    own = np.arange(changed.shape[found.axis]) // found.inner % UNITS == unit
    return not np.compress(~own, changed, found.axis).any()


def follow(function, *shapes):
    """Assert that labels cover all that changes with one unit's input; return the types in the graph."""
    concrete = traced(function, *[(shape, tf.float32) for shape in shapes])
    given = {id(one): Rows(0, one.shape[0] // UNITS) for one in concrete.graph.inputs[: len(shapes)]}
    found, seen = labels(concrete.graph, UNITS, given, concrete.graph.outputs), 0
    rng = np.random.default_rng(1)
    one = [rng.uniform(0.1, 0.9, shape).astype(np.float32) for shape in shapes]
    before = run(concrete, one)
    assert len(before) == len(found) > 0
    for unit in range(UNITS):
        other = [array.copy() for array in one]
        for array in other:
            own = np.arange(len(array)) // (len(array) // UNITS) == unit
            array[own] = rng.uniform(-1.9, 1.9, array[own].shape)
        for old, new, own in zip(before, run(concrete, other), found, strict=True):
            changed = (old != new) & ~((old != old) & (new != new))
            assert covers(own, changed, unit), f"{own}: {changed}"
            seen += changed.any()
    assert seen or all(own is None for own in found), f"nothing changes, though labels are {found}"
    return {operation.type for own in with_functions(concrete.graph) for operation in own.get_operations()}


def run(concrete, arrays):
    given = concrete(*map(tf.constant, arrays))
    return [np.asarray(one) for one in tf.nest.flatten(given) if one is not None]


def of_raw(kind, prepare, **options):
    """Call an operation with the same tensor, or with several, as its inputs."""
    names = list(inspect.signature(getattr(raw, kind)).parameters)

    def function(x):
        tensors = tf.nest.flatten(prepare(x))
        return getattr(raw, kind)(**dict(zip(names, tensors, strict=False)), **options)

    return function


FLOATS = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Erfc Exp Expm1 Floor Identity LeakyRelu Log Log1p "
    "Erfinv Neg Reciprocal Relu Relu6 Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square "
    "StopGradient Tan Tanh OnesLike ZerosLike Rank Size"
)
PAIRS = (
    "AddV2 Atan2 DivNoNan Greater GreaterEqual Less LessEqual Maximum Minimum Mul Pow RealDiv SquaredDifference Sub "
    "FloorDiv FloorMod"
)
SLOPES = (
    "EluGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftsignGrad SqrtGrad "
    "TanhGrad"
)
INTEGERS = "BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift"


def whole(x):
    return tf.cast(tf.abs(x) * 9 + 1, tf.int32)


def bits(x):
    return x > 0.5


def rolled_out(x):
    """Loop over positions with a list, as a recurrent layer does."""
    steps = tf.TensorArray(tf.float32, 4, element_shape=(6,)).unstack(tf.transpose(x))
    return tf.while_loop(lambda i, _: i < 4, lambda i, state: (i + 1, tf.tanh(steps.read(i) + state)), (0, x[:, 0]))[1]


def draw(x):
    return x * tf.random.stateless_uniform(x.shape, [1, 2]) + tf.random.stateless_normal((6, 1), [1, 3])


@tf.function(autograph=False)
def inner_function(x, y):
    return tf.sin(x) @ W, y * 2


def in_cond(x):
    return tf.cond(W[0, 0] > 0, lambda: tf.sin(x), lambda: tf.cos(x) * x)


def optional(x):
    held = raw.OptionalFromValue(components=[x])
    return raw.OptionalGetValue(optional=held, output_types=[tf.float32], output_shapes=[x.shape])


def conv(x):
    return tf.nn.conv2d(x, tf.reshape(W, (2, 2, 2, 2)), 1, "SAME")


def dilated(x):
    return tf.nn.convolution(x, tf.reshape(W, (2, 2, 2, 2)), dilations=2, padding="SAME")


def conv3d(x):
    return tf.nn.conv3d(x[..., None], tf.reshape(W, (2, 2, 2, 1, 2)), [1] * 5, "SAME")


def blocks(x):
    y = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
    return y, tf.batch_to_space(y, [2, 2], [[0, 0], [1, 0]])


def depthwise(x):
    return tf.nn.depthwise_conv2d(x, tf.reshape(W, (2, 2, 2, 2)), [1] * 4, "SAME")


def resized(method):
    return lambda x: raw_resize(method, x)


def raw_resize(method, x):
    return getattr(raw, f"Resize{method}")(images=x, size=[7, 3])


def attention(x):
    scores = tf.einsum("btk,bsk->bts", x, x)
    return tf.einsum("bts,bsk->btk", tf.nn.softmax(scores), x) + tf.matmul(x, x @ W, transpose_b=True)


def classes(x):
    return tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x * 2), x)


def sparse(x):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(tf.abs(x[:, 0]) * 2, tf.int32), x)


def chosen(x):
    indices = tf.cast(tf.abs(x) * 2, tf.int32)
    table = tf.tile(W[None], (6, 1, 1))
    return (
        *(tf.gather(W, indices), tf.gather(W, indices, axis=1), tf.gather(table, indices, batch_dims=1)),
        *(tf.gather(x, [1, 0], axis=1), tf.gather(tf.transpose(x), [1, 0]), tf.gather(x, indices, batch_dims=1)),
    )


def cut_out(x):
    y = tf.transpose(x)
    whole_units = tf.reshape(x, (3, 2, 4))
    return (
        *(x[:, 1:3], x[..., 1], x[:, None, ::2], y[1:, :], y[::-1, ..., None]),
        *(whole_units[:, 0], whole_units[:, ::-1], x[::2], tf.slice(x, [0, 1], [6, 2])),
        *tf.split(x, [1, 3], 1),
        *tf.split(y, 2),
        *tf.unstack(x, axis=-1),
        tf.concat([x, tf.ones((6, 4)), x], 0),
    )


def stacked(x):
    return (
        *(tf.stack([x, x * 2]), tf.stack([x, tf.zeros((6, 4))], -1)),
        *(tf.concat([x, tf.ones((6, 2))], 1), tf.concat([x, x * 2], 0), tf.concat([x, x], -1)),
    )


def shaped(x):
    return (
        *(tf.reshape(x, (24,)), tf.reshape(x, (3, 8)), tf.reshape(x, (1, 3, 2, 4)), tf.reshape(x, (6, 2, 2))),
        *(tf.reshape(tf.transpose(tf.reshape(x, (3, 2, 4)), (1, 0, 2)), (6, 4)), x[:, None], tf.transpose(x)),
        *(tf.reshape(tf.transpose(x), (2, 2, 6)), tf.squeeze(x[None, :, None]), tf.linalg.matrix_transpose(x[None])),
        *(tf.tile(x, (2, 3)), tf.broadcast_to(x, (5, 6, 4)), tf.pad(x, ((0, 0), (1, 2)))),
        *(tf.pad(x, ((0, 0), (1, 2)), "REFLECT"), tf.pad(x, ((0, 0), (1, 2)), constant_values=1.0)),
        *(tf.one_hot(whole(x), 5), tf.one_hot(whole(x), 5, axis=0)),
    )


def through_axes(x):
    square = tf.tile(x[..., None], (1, 1, 4)) * W
    y = tf.reshape(x, (3, 2, 4))
    return (
        *(tf.cumsum(x, 1), tf.math.cumprod(x, -1), tf.reverse(x, [-1]), tf.roll(x, 1, 1), *tf.math.top_k(x, 2)),
        *(tf.linalg.diag_part(square), tf.linalg.band_part(square, 1, 0), tf.reduce_all(bits(x), -1)),
        *(tf.reduce_min(y, 1), tf.reduce_prod(x, -1)),
        *(tf.linalg.band_part(x, 1, 1), tf.reduce_sum(y, 1), tf.reduce_mean(y, (1, 2), keepdims=True)),
        *(tf.reduce_max(tf.transpose(x), 0), tf.reduce_any(bits(x), -1)),
        *(tf.argmax(x, 1), tf.argmin(tf.transpose(x), 0), tf.nn.log_softmax(x)),
    )


CASES = {
    **{kind: ((6, 4), of_raw(kind, lambda x: x)) for kind in FLOATS.split()},
    **{kind: ((6, 4), of_raw(kind, lambda x: (x, x[:, ::-1] + 0.3))) for kind in f"{PAIRS} {SLOPES}".split()},
    **{f"{kind} repeated": ((6, 4), of_raw(kind, lambda x: (x[:, None, :1], W))) for kind in PAIRS.split()},
    **{kind: ((6, 4), of_raw(kind, lambda x: (whole(x), whole(x) % 3 + 1))) for kind in INTEGERS.split()},
    "equal": ((6, 4), lambda x: (tf.equal(whole(x), 3), tf.not_equal(whole(x), whole(x) % 2))),
    "finite": (
        (6, 4),
        lambda x: (tf.math.is_nan(y := tf.math.log(x)), tf.math.is_finite(y), tf.math.is_inf(1 / tf.nn.relu(x))),
    ),
    "logic": ((6, 4), lambda x: (bits(x) & bits(x - 0.2), bits(x) | (x < 0.1), ~bits(x))),
    "ensured": ((6, 4), lambda x: (tf.ensure_shape(x, (6, 4)), tf.clip_by_value(x, 0.2, 0.5))),
    "select": ((6, 4), lambda x: (tf.where(bits(x), x, 0.0), tf.where(bits(x[:, :1]), W[0], x))),
    "select of rows": ((6, 4), lambda x: raw.Select(condition=bits(x[:, 0]), x=x, y=tf.ones((6, 4)))),
    "shapes": ((6, 4), lambda x: (raw.Shape(input=x), *raw.ShapeN(input=[x, x]), *tf.identity_n([x, W]))),
    "added": ((6, 4), lambda x: (tf.add_n([x, x * 2]), tf.nn.bias_add(x, W[0]))),
    "conv": (IMAGES, conv),
    "conv 1x1 strided": (IMAGES, lambda x: tf.nn.conv2d(x, tf.reshape(W[:2, :2], (1, 1, 2, 2)), 2, "VALID")),
    "dilated": (IMAGES, dilated),
    "conv3d": (IMAGES, conv3d),
    "depthwise": (IMAGES, depthwise),
    "pools": (IMAGES, lambda x: (tf.nn.max_pool2d(x, 2, 2, "SAME"), tf.nn.avg_pool2d(x, 2, 1, "VALID"))),
    "pools3d": (
        IMAGES,
        lambda x: (tf.nn.max_pool3d(x[..., None], 2, 2, "SAME"), tf.nn.avg_pool3d(x[..., None], 2, 1, "SAME")),
    ),
    "bilinear": (IMAGES, resized("Bilinear")),
    "nearest": (IMAGES, resized("NearestNeighbor")),
    "bicubic": (IMAGES, resized("Bicubic")),
    "blocks": (
        IMAGES,
        lambda x: (y := tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]), tf.batch_to_space(y, [2, 2], [[0, 0], [1, 0]])),
    ),
    "matmul": ((6, 4), lambda x: (x @ W, tf.matmul(W, x, transpose_b=True), tf.matmul(x, W, transpose_b=True))),
    "matmul of transposes": ((6, 4), lambda x: tf.matmul(tf.transpose(x), W, transpose_a=True)),
    "batches of matrices": ((6, 4, 4), lambda x: (x @ x, x @ W, W @ x, tf.matmul(x, x[:, :2], adjoint_b=True))),
    "rows times matrices": ((6, 4), lambda x: tf.matmul(tf.tile(W[None], (5, 1, 1)), tf.transpose(x))),
    "einsum": ((6, 4), lambda x: (tf.einsum("bi,ij->jb", x, W), tf.einsum("bi,bj->bij", x, x))),
    "attention": ((6, 4, 4), attention),
    "softmax": ((6, 4), classes),
    "sparse softmax": ((6, 4), sparse),
    "chosen": ((6, 4), chosen),
    "cut out": ((6, 4), cut_out),
    "stacked": ((6, 4), stacked),
    "shaped": ((6, 4), shaped),
    "axes": ((6, 4), through_axes),
    "function": ((6, 4), lambda x: (inner_function(x, W), inner_function(W, x))),
    "a fold": ((6, 4), lambda x: tf.reduce_sum(x[None], raw.AddV2(x=tf.constant([1]), y=[1]))),
}


def smooth(x):
    """Take shapes apart and put them together, where all is differentiable."""
    return (
        *(x[:, 1:3], x[..., 1], x[:, None, ::2], tf.transpose(x)[1:], tf.reshape(x, (3, 2, 4))[:, 0]),
        *tf.split(x, [1, 3], 1),
        *(tf.pad(x, ((0, 0), (1, 2))), tf.pad(x, ((0, 0), (1, 2)), "REFLECT"), tf.tile(x, (1, 3))),
        *(tf.concat([x, tf.ones((6, 2))], 1), tf.stack([x, x * 2]), tf.squeeze(x[None]), tf.cumsum(x, 1)),
        *(tf.reduce_mean(x, 1), tf.reduce_max(tf.reshape(x, (3, 2, 4)), 1), *tf.unstack(x, axis=1)),
    )


SMOOTH = (
    "conv dilated conv3d depthwise pools pools3d bilinear nearest bicubic blocks matmul attention softmax "
    "function einsum added select"
)


def test_labels_cover_what_changes_with_one_unit(monkeypatch):
    """Whole numbers are made of floats here, whatever they may raise."""
    monkeypatch.setattr(isolation, "_refuse_raising", lambda *_: None)
    used = set()

    def check(name, shape, function):
        used.update(follow(function, shape))

    cases = [(name, shape, function) for name, (shape, function) in CASES.items()]
    cases += [(f"gradient of {name}", CASES[name][0], slope(CASES[name][1])) for name in SMOOTH.split()]
    cases += [("gradient of shapes", (6, 4), slope(smooth)), ("random numbers", (6, 4), draw)]
    found = failures(cases, check)
    assert not found, pytest.fail("\n".join(found), pytrace=False)
    mixing = {one for one in RULES if one.startswith(("FusedBatchNorm", "BiasAddGrad", "L2Loss")) or "Filter" in one}
    assert not (untried := set(RULES) - used - mixing), untried


def sort_units(x):
    return tf.sort(x, axis=0)


def looped_by_units(x):
    return tf.while_loop(lambda y: tf.reduce_sum(y) < 9, lambda y: (y * 2,), (x,))


def guarded(x):
    with tf.control_dependencies([raw.Assert(condition=tf.reduce_all(x < 1e9), data=[1])]):
        return tf.identity(x)


def turned_in_a_loop(x):
    """Carry units to places of other units, round by round."""
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.roll(y, 2, 0)), (0, x))[1]


def turned_over_in_a_loop(x):
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.transpose(y)), (0, tf.concat([x, x[:, :2]], 1)))[1]


def growing(x):
    shapes = tf.TensorShape([None, 4])
    body = lambda i, y: (i + 1, tf.concat([y[:1], y], 0))  # noqa: E731
    return tf.while_loop(lambda i, y: i < 2, body, (0, x), (tf.TensorShape([]), shapes))[1]


def listed_by_units(x):
    return tf.TensorArray(tf.float32, 6).unstack(x).read(0)


def normalised(x):
    return raw.FusedBatchNormV3(x=x, scale=W[0, :2], offset=W[0, :2], mean=[], variance=[])[0]


def filters(x):
    return raw.Conv2DBackpropFilter(
        input=x, filter_sizes=[1, 1, 2, 2], out_backprop=x, strides=[1, 1, 1, 1], padding="SAME"
    )


MIXING = {
    "mean": lambda x: x - tf.reduce_mean(x, 0),
    "mean of all": lambda x: x * tf.reduce_mean(x),
    "sort": sort_units,
    "cumsum": lambda x: tf.cumsum(x, 0),
    "cumprod": lambda x: tf.math.cumprod(x, -2),
    "gram": lambda x: tf.matmul(x, x, transpose_b=True),
    "sum by a product": lambda x: tf.matmul(x, x, transpose_a=True),
    "einsum over units": lambda x: tf.einsum("bi,bj->ij", x, x),
    "einsum of pairs": lambda x: tf.einsum("bi,ci->bc", x, x),
    "softmax over units": lambda x: tf.nn.softmax(x, axis=0),
    "a transpose that is added": lambda x: (y := tf.concat([x, x[:, :2]], 1)) + tf.transpose(y),
    "a transpose in a list of terms": lambda x: tf.add_n([y := tf.concat([x, x[:, :2]], 1), tf.transpose(y)]),
    "orders of two kinds": lambda x: x + tf.reshape(tf.transpose(tf.reshape(x, (3, 2, 4)), (1, 0, 2)), (6, 4)),
    "gradient of weights": lambda x: raw.BiasAddGrad(out_backprop=x),
}
UNPROVED = {
    "one unit added to all": lambda x: x + x[0],
    "the first unit and the last": lambda x: x[0] * x[-1],
    "roll by one unit": lambda x: tf.roll(x, tf.cast(x[0, 0], tf.int32), 1),
    "select by one unit": lambda x: tf.where(x[0, 0] > 0, x, 0.0),
    "one unit": lambda x: x[2:4],
    "units taken apart": lambda x: tf.stack(tf.unstack(x)),
    "loop": rolled_out,
    "branches": in_cond,
    "optional": optional,
    "no rule": lambda x: tf.linalg.expm(tf.tile(x[..., None], (1, 1, 4))),
    "segments": lambda x: tf.math.unsorted_segment_sum(x, [0, 0, 1, 1, 2, 2], 3),
    "roll": lambda x: tf.roll(x, 2, 0),
    "flat roll": lambda x: tf.reshape(tf.roll(tf.reshape(x, (-1,)), 3, 0), (6, 4)),
    "reverse": lambda x: tf.reverse(x, [-2]),
    "slice that turns": lambda x: x[::-1],
    "gather": lambda x: tf.gather(x, [2, 3, 0, 1, 4, 5]),
    "gather by units": lambda x: tf.gather(x, tf.cast(x[:, 0], tf.int32)),
    "some units": lambda x: x[:4],
    "half a slice": lambda x: x[1:],
    "split": lambda x: tf.split(x, 2)[0],
    "a part of units": lambda x: tf.slice(x, [1, 0], [3, 4]),
    "pad": lambda x: tf.pad(x, ((2, 1), (0, 0))),
    "pad and cut": lambda x: tf.pad(x, ((2, 0), (0, 0)))[:6],
    "pad by whole units": lambda x: tf.pad(x, ((2, 4), (0, 0))),
    "append whole units": lambda x: tf.concat([tf.ones((2, 4)), x, tf.ones((4, 4))], 0),
    "append": lambda x: tf.concat([tf.ones((3, 4)), x], 0),
    "append other rows and another order": lambda x: tf.concat([x, tf.ones((6, 4)), tf.reverse(x, [0])], 0),
    "stack in another order": lambda x: tf.stack([x[4], x[2], x[0]]),
    "stack unevenly": lambda x: tf.concat([x[:1], x[2:4], x[4:]], 0),
    "a reshape that mixes": lambda x: tf.reshape(x, (4, 6)),
    "a transposed reshape": lambda x: tf.reshape(tf.transpose(x), (6, 4)),
    "diagonal": lambda x: tf.linalg.diag_part(tf.concat([x, x[:, :2]], 1)),
    "where": lambda x: tf.where(x > 0),
    "range": lambda x: tf.range(tf.cast(x[0, 0], tf.int32)),
    "shape of what a unit fills": lambda x: tf.shape(tf.fill([tf.cast(x[0, 0], tf.int32)], 1.0)),
    "list of units": listed_by_units,
    "loop by units": looped_by_units,
    "branch by units": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
    "branch by one unit": lambda x: tf.cond(x[0, 0] > 0, lambda: x, lambda: -x),
    "branches of two kinds": lambda x: tf.cond(W[0, 0] > 0, lambda: x[0], lambda: x[2]),
    "loop that turns": turned_in_a_loop,
    "loop that transposes": turned_over_in_a_loop,
    "loop that grows": growing,
    "guard": guarded,
    "guard of numbers": lambda x: tf.debugging.check_numerics(x, ""),
    "guard of one unit": lambda x: (tf.debugging.check_numerics(x[0], ""), x)[1],
    "numbers that units share": lambda x: x * tf.random.stateless_uniform((1, 4), [1, 2]),
    "numbers seeded by a unit": lambda x: tf.random.stateless_uniform((6, 4), tf.cast(x[0, :2], tf.int32)),
    "numbers of a kind without rule": lambda x: x * tf.random.stateless_gamma((6, 4), [1, 2], 1.0),
    "numbers with a state": lambda x: x * tf.random.uniform((6, 4)),
    "python": lambda x: tf.ensure_shape(tf.numpy_function(lambda y: y, [x], tf.float32, stateful=False), (6, 4)),
    "print": lambda x: (tf.print(W), x)[1],
    "file": lambda x: (tf.io.read_file("absent"), x)[1],
    "inplace": lambda x: raw.InplaceUpdate(x=x, i=[0], v=x[:1]),
    "crops": lambda x: (
        raw.CropAndResizeGradBoxes(
            grads=tf.ones((1, 2, 2, 1)), image=tf.ones((1, 4, 4, 1)), boxes=tf.ones((1, 4)), box_ind=[0]
        )
        * x[0, 0]
    ),
}


def test_what_takes_units_together_is_refused_as_mixing():
    def check(name, function):
        error = refused(function)
        assert isinstance(error, Mixes), error
        assert error.kind and error.operation and error.reason in str(error)

    images = {"batch norm": normalised, "gradient of filters": filters}
    found = failures(MIXING.items(), check)
    assert not found, pytest.fail("\n".join(found), pytrace=False)
    assert all(isinstance(refused(function, IMAGES), Mixes) for function in images.values())


def test_what_no_rule_covers_is_unproved():
    def check(name, function):
        error = refused(function)
        assert isinstance(error, Unproved), error

    found = failures(UNPROVED.items(), check)
    assert not found, pytest.fail("\n".join(found), pytrace=False)


def test_options_of_operations_over_examples_are_checked():
    refused(lambda x: raw.MaxPool(input=x, ksize=[2, 1, 1, 1], strides=[1, 1, 1, 1], padding="VALID"), IMAGES)
    refused(lambda x: tf.nn.max_pool2d(tf.transpose(x, (3, 1, 2, 0)), 2, 1, "SAME"), IMAGES)
    refused(lambda x: tf.nn.max_pool2d(tf.transpose(x, (0, 3, 1, 2)), 2, 2, "SAME", data_format="NCHW"), IMAGES)
    refused(lambda x: tf.nn.conv2d(tf.ones((1, 4, 4, 1)), tf.reshape(x, (2, 3, 1, 4)), 1, "SAME"))


def test_sums_of_three_are_unproved_without_the_chain():
    graph = traced(lambda x: tf.add_n([x, x, x]), ((6, 4), tf.float32), replaced=lambda *args, **named: None).graph
    with pytest.raises(Unproved, match="timing"):
        prove(graph, UNITS, graph.inputs[:1], graph.outputs)


def test_writing_is_refused_though_no_target_needs_it():
    seen = tf.Variable(0.0)

    def function(x):
        tf.cond(W[0, 0] > 0, lambda: seen.assign(1.0), lambda: seen.read_value())
        return x

    concrete = traced(function, ((6, 4), tf.float32))
    with pytest.raises(Unproved, match="AssignVariableOp"):
        prove(concrete.graph, UNITS, concrete.graph.inputs[:1], [concrete.graph.inputs[0]])


def test_targets_hold_the_units_in_order_along_the_first_axis():
    good = [lambda x: x, lambda x: tf.reshape(x, (3, 8)), lambda x: W[:2], lambda x: tf.reduce_sum(x, 1)]
    bad = [tf.transpose, lambda x: x[0], lambda x: tf.tile(x, (2, 1)), lambda x: tf.concat([x, x], 0)]
    bad.append(lambda x: tf.reshape(tf.transpose(tf.reshape(x, (3, 2, 4)), (1, 0, 2)), (6, 4)))

    def check(function):
        graph = traced(function, ((6, 4), tf.float32)).graph
        prove(graph, UNITS, graph.inputs[:1], graph.outputs)

    assert not failures([(one,) for one in good], check)
    assert len(failures([(one,) for one in bad], check)) == len(bad)


def test_what_mixes_and_reaches_no_target_does_no_harm():
    def function(x):
        return x + 1, tf.reduce_sum(x)

    graph = traced(function, ((6, 4), tf.float32)).graph
    prove(graph, UNITS, graph.inputs[:1], graph.outputs[:1])
    with pytest.raises(Mixes):
        prove(graph, UNITS, graph.inputs[:1], graph.outputs)


def test_labels_are_given_for_placeholders_alone():
    graph = traced(lambda x: tf.sin(x), ((6, 4), tf.float32)).graph
    own = graph.inputs[0]
    assert labels(graph, 2, {id(own): Rows(1, 2)}, graph.outputs) == [Rows(1, 2)]
    with pytest.raises(Unproved):
        labels(graph, 2, {id(own): Rows(1, 3)}, graph.outputs)
    with pytest.raises(ValueError, match="placeholders"):
        labels(graph, 2, {id(graph.outputs[0]): Rows(0)}, graph.outputs)
    with pytest.raises(ValueError, match="at least 2"):
        labels(graph, 1, {}, graph.outputs)


class Gated(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")

    def call(self, x):
        return x * ops.sigmoid(ops.matmul(x, self.kernel)) + ops.cumsum(x, axis=1)


class Centred(layers.Layer):
    def call(self, x):
        return x + ops.mean(x, axis=0)


def sequential(shape, *parts, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts, layers.Flatten(), layers.Dense(3, "softmax")])


def attentive():
    own = keras.Input((5, 4))
    given = layers.MultiHeadAttention(2, 4)(own, own)
    return keras.Model(own, layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(given)))


def proof(model, units=4, each=1):
    """Prove the losses, and their gradients with respect to what each layer gives."""
    spec, kept = model.inputs[0], []
    first = units * each

    def function(x, y):
        held = []
        with keras.StatelessScope([(one, one.value) for one in model.variables]), tf.GradientTape() as tape:
            given = x
            for layer in model.layers if isinstance(model, keras.Sequential) else [model]:
                given = layer(given, training=True)
                tape.watch(given)
                held.append(given)
            losses = keras.losses.sparse_categorical_crossentropy(y, given)
            total = tf.reduce_sum(losses)
        kept[:] = [losses, *tape.gradient(total, held)]
        return kept

    concrete = traced(function, ((first, *spec.shape[1:]), spec.dtype), ((first,), tf.int64))
    rows, targets = concrete.graph.inputs[:2], concrete.graph.outputs
    prove(concrete.graph, units, rows, targets)
    given = {id(row): Rows(0, each) for row in rows}
    assert labels(concrete.graph, units, given, targets) == [Rows(0, each)] * len(targets)


MODELS = {
    "dense": lambda: sequential((6,), layers.Dense(5, "relu")),
    "conv": lambda: sequential((6, 6, 2), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(2)),
    "conv1d": lambda: sequential((6, 2), layers.Conv1D(4, 3, activation="gelu"), layers.AveragePooling1D(2)),
    "depthwise": lambda: sequential((6, 6, 2), layers.DepthwiseConv2D(3, strides=2), layers.UpSampling2D(2)),
    "layer norm": lambda: sequential((5, 4), layers.LayerNormalization(), layers.Dense(4, "selu")),
    "group norm": lambda: sequential((4, 4, 4), layers.GroupNormalization(2)),
    "attention": attentive,
    "embedding": lambda: sequential((5,), layers.Embedding(9, 4), layers.Dropout(0.5), dtype="int32"),
    "dropout": lambda: sequential((6,), layers.Dropout(0.5), layers.Dense(4, "tanh")),
    "own layer": lambda: sequential((6,), Gated()),
    "lstm": lambda: sequential((4, 3), layers.LSTM(2, unroll=True)),
}


@pytest.mark.parametrize("each", [1, 2])
def test_models_are_proved(each):
    def check(name, make):
        proof(make(), each=each)

    found = failures(MODELS.items(), check)
    assert not found, pytest.fail("\n".join(found), pytrace=False)


def test_models_that_mix_are_refused():
    for parts in ([layers.BatchNormalization()], [Centred()], [layers.Dense(4), Centred(), layers.Dense(4)]):
        with pytest.raises(Mixes):
            proof(sequential((6,), *parts))

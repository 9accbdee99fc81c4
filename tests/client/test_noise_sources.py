"""Without a seed nobody can know what a client draws; with one, a paper's run can be repeated."""

from support import failures

from cloister.client.dp_sgd import SECRET_BYTES, NoiseSource
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.training.plan import TrainingPlan


def plan(*seed):
    return TrainingPlan(epochs=1, batch_size=8, learning_rate=0.1, proximal_mu=0.0, seed=seed)


def drawn(source, of):
    """Everything that a client draws in a round."""
    return source.noise(of).standard_normal(16).tolist(), source.batch_seed(of), source.secret(of)


def test_without_a_seed_the_operating_system_is_asked_each_time():
    """A server that knows the whole plan, `-1` and this code draws something else, and so does a second client."""
    noise, batches, secret = zip(*(drawn(NoiseSource(-1), plan(1, 1, 0)) for _ in range(3)), strict=True)
    assert len({tuple(each) for each in noise}) == len(set(secret)) == 3
    assert batches == (None,) * 3 and {len(each) for each in secret} == {SECRET_BYTES}


def test_without_a_seed_one_stream_serves_all_rounds():
    source = NoiseSource(-1)
    assert source.noise(plan(1, 1, 0)) is source.noise(plan(2, 1, 0)), "a new stream might begin as another one did"


def test_with_a_seed_everything_can_be_repeated():
    def check(seed):
        assert drawn(NoiseSource(seed), plan(1, 1, 0)) == drawn(NoiseSource(seed), plan(1, 1, 0))

    assert failures([0, 1, 12], check) == []


def test_a_seed_gives_the_same_in_every_version():
    """Papers are repeated with later ones."""
    noise, batches, secret = drawn(NoiseSource(7), plan(1, 2, 0))
    assert noise == GaussianNoise(19270270689005433320).standard_normal(16).tolist()
    assert (batches, secret) == (34130680981630818219, b"19329182428694117057")


def test_rounds_clients_and_seeds_have_streams_of_their_own():
    def check(other):
        one, two = drawn(NoiseSource(7), plan(1, 1, 0)), drawn(NoiseSource(other[0]), other[1])
        assert all(mine != others for mine, others in zip(one, two, strict=True))
        assert one[1] >= 2**64, "no seed that a person writes down"

    assert failures([(other,) for other in [(7, plan(1, 2, 0)), (7, plan(2, 1, 0)), (8, plan(1, 1, 0))]], check) == []

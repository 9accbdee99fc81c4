"""The noise that a client adds to what it computes, by the run configuration."""

from cloister.config.run import PrivacyConfig
from cloister.privacy.dpsgd.local_steps import LocalDpSgd
from cloister.privacy.mechanisms.circumstances import Circumstances
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism, PublishedLaplace


def mechanism_of(privacy: PrivacyConfig) -> LocalMechanism | None:
    """The local mechanism that `privacy.client` names; None: a client sends what it trained."""
    if privacy.client == "gaussian":
        return LocalGaussian(privacy.client_clipping_norm, privacy.client_noise_multiplier)
    if privacy.client != "laplace":
        return None
    if privacy.radius:
        return LocalLaplace(privacy.radius, privacy.client_noise_multiplier, privacy.per_layer)
    return PublishedLaplace(privacy.client_noise_multiplier, privacy.per_layer)


def dp_sgd_of(privacy: PrivacyConfig, grouped: bool = False) -> LocalDpSgd:
    """DP-SGD as the configuration asks for it.

    Args:
        privacy: of the run.
        grouped: whether gradients are clipped group by group.
    """
    return LocalDpSgd(
        privacy.client_noise_multiplier,
        privacy.client_clipping_norm,
        privacy.clipping_decay,
        privacy.least_clipping_norm,
        privacy.batch_sampling,
        privacy.group_cap if grouped else 0,
    )


def circumstances_of(privacy: PrivacyConfig) -> Circumstances:
    """What the run does beside the mechanism that the guarantee depends on."""
    hypotheses = privacy.clusters if privacy.server == "laplace-clustering" else 1
    private = privacy.choice == "private"
    return Circumstances(privacy.noise_seed != -1, hypotheses, private, privacy.choice_epsilon)


def caveats_of(privacy: PrivacyConfig, mechanism: LocalMechanism) -> list[str]:
    """Why nothing can be claimed for a client that adds this noise; empty if it can.

    Args:
        privacy: of the run.
        mechanism: that it names.
    """
    return [*mechanism.caveats(), *circumstances_of(privacy).caveats()]


def chooses_exactly(privacy: PrivacyConfig) -> bool:
    """Whether clients choose among hypotheses without noise."""
    circumstances = circumstances_of(privacy)
    return circumstances.hypotheses > 1 and not circumstances.private


def chooses_privately(privacy: PrivacyConfig) -> bool:
    """Whether clients choose among hypotheses by noised losses."""
    return privacy.client != "none" and circumstances_of(privacy).chooses_privately

"""The noise that a client adds to the model it sends, by the run configuration."""

from cloister.config.run import PrivacyConfig
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


def caveats_of(privacy: PrivacyConfig, mechanism: LocalMechanism) -> list[str]:
    """Why nothing can be claimed for a client that adds this noise; empty if it can."""
    caveats = mechanism.caveats()
    if privacy.noise_seed != -1:
        caveats.append("the noise is seeded: whoever knows privacy.noise-seed can remove it")
    if chooses_exactly(privacy):
        caveats.append("privacy.choice is 'exact': which hypothesis suits the data is found out without noise")
    return caveats


def chooses_exactly(privacy: PrivacyConfig) -> bool:
    """Whether clients choose among hypotheses without noise."""
    return privacy.server == "laplace-clustering" and privacy.clusters > 1 and privacy.choice == "exact"


def chooses_privately(privacy: PrivacyConfig) -> bool:
    """Whether clients choose among hypotheses by noised losses."""
    several = privacy.server == "laplace-clustering" and privacy.clusters > 1
    return several and privacy.client != "none" and privacy.choice == "private"

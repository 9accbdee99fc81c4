"""The noise that a client adds to the model it sends, by the run configuration."""

from cloister.config.privacy import PrivacyConfig
from cloister.config.variants import GaussianPrivacy, LaplacePrivacy
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism, PublishedLaplace


def mechanism_of(privacy: PrivacyConfig) -> LocalMechanism | None:
    """The local mechanism that `privacy.client` names; None: a client sends what it trained."""
    client = privacy.client
    if isinstance(client, GaussianPrivacy):
        return LocalGaussian(client.clipping_norm, client.noise_multiplier)
    if not isinstance(client, LaplacePrivacy):
        return None
    if client.radius:
        return LocalLaplace(client.radius, client.noise_multiplier, client.per_layer)
    return PublishedLaplace(client.noise_multiplier, client.per_layer)


def caveats_of(privacy: PrivacyConfig, mechanism: LocalMechanism) -> list[str]:
    """Why nothing can be claimed for a client that adds this noise; empty if it can."""
    caveats = mechanism.caveats()
    if privacy.noise_seed != -1:
        caveats.append("the noise is seeded: whoever knows privacy.noise-seed can remove it")
    if privacy.chooses_exactly:
        caveats.append("privacy.choice is 'exact': which hypothesis suits the data is found out without noise")
    return caveats

"""Scalars of a round, for all plots."""

from cloister.server.loop import Round


def scalars(done: Round, secret_cohorts: bool) -> dict[str, float]:
    """Return the scores and the publishable measurements of a round, by name.

    Args:
        done: a finished round.
        secret_cohorts: whether to omit the number of rejected replies.
    """
    found = {f"central/{name}": value for name, value in done.central.items()}
    found |= {f"federated/{name}": value for name, value in done.federated.items()}
    if (measured := done.measured) is not None:
        # The strategy omits measurements that would be another release.
        known = {
            "privacy/noise-std": measured.noise_std,
            "privacy/epsilon": measured.epsilon,
            "privacy/clipping-norm": measured.clipping_norm,
            "privacy/clipped-fraction": measured.clipped_fraction,
            "replies/rejected": None if secret_cohorts else len(measured.rejected),
        }
        found |= {name: float(value) for name, value in known.items() if value is not None}
    return found
